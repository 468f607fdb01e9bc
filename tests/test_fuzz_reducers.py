"""The contract's laws on random trees, densities, dtypes, workers and values."""

import functools
import math
from typing import NamedTuple

import contract_table as table
import jax
import numpy as np
from contract_table import AXIS, gathered, on_workers, sparse
from fuzzing import ASKED, budget, tick
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js

VALUES = 100 if ASKED else 10  # on each program: most of the time goes into compiling


class Method(NamedTuple):
    make: object  # (density, N) -> reducer
    traffic: object  # density -> (shapes, N) -> collectives
    tolerance: float = 1e-6  # relative to the largest magnitude


def coded(codec, bits, scales=lambda k: 0):
    return Method(
        lambda d, N: sparse(js.top_k(d), codec(), scope="leaf"),
        lambda d: gathered(d, bits, scales=scales, leaf=True),
    )


METHODS = {
    "dense": Method(
        lambda d, N: js.dense(axis_name=AXIS), lambda d: table.dense_traffic
    ),
    "top_k": Method(lambda d, N: sparse(js.top_k(d)), lambda d: gathered(d, 32)),
    "leaf": coded(js.codec.bfloat16, 16),
    "int8": coded(lambda: js.codec.int8(4), 8, lambda k: -(-k // 4)),
    "signs": coded(js.codec.sign_mean, 1, lambda k: 1),
    "ema": Method(
        lambda d, N: sparse(js.top_k(d, js.ema(0.5, 3.0))), lambda d: gathered(d, 32)
    ),
    "sampled": Method(
        lambda d, N: sparse(js.sampled_top_k(d, sample=0.5)), lambda d: gathered(d, 32)
    ),
    "threshold": Method(
        lambda d, N: sparse(js.threshold(0.5, max_density=d)), lambda d: gathered(d, 32)
    ),
    "random_k": Method(
        lambda d, N: sparse(js.random_k(d)), lambda d: gathered(d, 32, agreed=True)
    ),
    "server": Method(
        lambda d, N: sparse(
            js.top_k(d), exchange=js.server(limit=1.5, ladder=False), workers=N
        ),
        lambda d: table.server_traffic(d, 32, limit=1.5),
    ),
    "leader": Method(
        lambda d, N: sparse(js.top_k(d), exchange=js.shared_support()),
        table.shared_traffic,
    ),
    "sign_mean": Method(
        lambda d, N: js.sign_mean(axis_name=AXIS), lambda d: table.sign_traffic
    ),
    "low_rank": Method(
        lambda d, N: js.low_rank(1, axis_name=AXIS),
        lambda d: table.low_rank_traffic(1),
        1e-5,
    ),
}
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TREES = st.lists(SHAPES, min_size=1, max_size=4).map(tuple)
DENSITIES = st.one_of(
    st.floats(1e-6, 1.0), st.sampled_from([1e-9, 0.01, 0.1, 1 / 3, 0.5, 0.999, 1.0])
)
DTYPES = st.sampled_from(["float32", "float32", "bfloat16", "float16"])


@functools.cache
def program(name, shapes, density, dtype, workers):
    """The reducer, its state, local parts stacked, and the step over the workers."""
    reducer = METHODS[name].make(density, workers)
    state = reducer.init([np.zeros(shape, dtype) for shape in shapes])
    parts, axes = table.stacked(state, workers)
    # Out axes None prove that all workers have the same mean and shared state.
    return reducer, parts, on_workers(reducer.reduce, (None, 0, axes), (0, axes))


KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "ties": lambda rng, n: rng.integers(-2, 3, n),
    "zero": lambda rng, n: np.zeros(n),
    "few": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.1),
    "scales": lambda rng, n: rng.normal(size=n) * 10.0 ** rng.integers(-30, 30, n),
    "huge": lambda rng, n: rng.choice([-1, 1], n) * 3e38,
    "denormal": lambda rng, n: rng.integers(-9, 9, n) * 1e-41,
}


def values(rng, shapes, dtype, workers):
    """Gradients [workers, ...]; each worker's are of a kind of their own, at times."""
    kinds = rng.choice([*KINDS], workers if rng.random() < 0.3 else 1)
    sizes = [math.prod(shape) for shape in shapes]
    rows = [KINDS[kinds[i % len(kinds)]](rng, sum(sizes)) for i in range(workers)]
    most = {"float16": 1e4}.get(dtype, 3e38)
    flat = np.clip(np.stack(rows), -most, most)
    cuts = np.split(flat, np.cumsum(sizes)[:-1], axis=1)
    return [
        part.reshape(workers, *shape).astype(jax.numpy.dtype(dtype))
        for part, shape in zip(cuts, shapes, strict=True)
    ]


def vector(leaves):
    """All leaves end to end, in float64."""
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])


def check_laws(method, x, mean, left, before, after, dtype):
    """Shapes and dtypes stay; finite in, finite out; what went away is the mean.

    ``before`` and ``after`` are what servers hold, in units of the mean.
    """
    workers = x[0].shape[0]
    for given_, m, kept in zip(x, mean, left, strict=True):
        assert m.shape == given_.shape[1:] and kept.shape == given_.shape
        assert m.dtype == kept.dtype == given_.dtype
        assert np.isfinite(np.asarray(m, np.float64)).all()
        assert np.isfinite(np.asarray(kept, np.float64)).all()
    total = lambda tree: vector([np.asarray(v, np.float64).sum(0) for v in tree])  # noqa: E731
    largest = max((np.abs(np.float64(v)).max(initial=0) for v in x), default=0)
    if method.tolerance > 1e-6 and largest > 1e30:
        return  # of rounded products finite is all that is asked for at the very edge
    rounding = {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype, 0.0)
    # What is below the normal range may be flushed to zero.
    floor = 1e-6 if dtype == "float16" else 1e-36
    allowed = 8 * workers * (method.tolerance + rounding) * largest + floor
    # On top of a large number that a server holds a small one is rounded.
    allowed = allowed + 1e-6 * workers * np.abs(before)
    lost = total(x) - total(left) + workers * (before - after - vector(mean))
    assert np.all(np.abs(lost) <= allowed), (lost, allowed)


@budget(quick=10, values=VALUES)
@given(
    name=st.sampled_from([*METHODS]),
    shapes=TREES,
    density=DENSITIES,
    dtype=DTYPES,
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_laws(name, shapes, density, dtype, workers, seed):
    method, n = METHODS[name], sum(map(math.prod, shapes))
    reducer, state, step = program(name, shapes, density, dtype, workers)
    rng = np.random.default_rng(seed)
    for _ in range(VALUES):
        x = values(rng, shapes, dtype, workers)
        before = table.held_by_servers(state, n)
        mean, left, state = step(x, state)
        check_laws(
            method, x, mean, left, before, table.held_by_servers(state, n), dtype
        )
    check_bytes(method, reducer, shapes, density, dtype, workers)
    tick("laws", VALUES)
    if ASKED:  # programs would pile up
        program.cache_clear()
        jax.clear_caches()


def check_bytes(method, reducer, shapes, density, dtype, workers):
    """What the step moves is the formula's."""
    x = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    state = jax.eval_shape(reducer.init, x)
    traced = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])(x, state)
    moved = [c for found in js.traffic(traced).values() for c in found]
    nothing = table.size(shapes) == 0  # then there is no message
    wanted = [] if nothing else method.traffic(density)(list(shapes), workers)
    total = lambda parts: sum(size for _, _, size in parts)  # noqa: E731
    assert total([(c.op, c.dtype, c.bytes * c.times) for c in moved]) == total(wanted)
