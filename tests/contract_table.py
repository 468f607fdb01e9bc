"""The table of the contract: every reducer and what it promises. A new method is a row.

Formulas are written out here, from the methods' papers and the message layout, and not
taken from the library.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse as js

AXIS = "workers"


class Row(NamedTuple):
    make: Callable[[], js.Reducer]
    # sizes of the leaves -> what one worker brings to collectives: (op, dtype, bytes)
    traffic: Callable[[list[tuple[int, ...]]], list[tuple[str, str, int]]]
    limit: Callable[[], js.Reducer] | None = None  # must equal dense
    limit_tolerance: float = 0.0  # relative to the largest entry
    exact: bool = True  # dyadic numbers are handled without rounding
    # (n, shapes) -> delta of ||left||^2 <= (1 - delta) ||x||^2
    contraction: Callable[[list[tuple[int, ...]]], float] | None = None
    unbiased: bool = False  # (n / k) mean over many steps converges to the input
    worker_order: bool = True
    stateful: bool = False


def size(shapes):
    return sum(math.prod(s) for s in shapes)


def ceil_words(bits):
    return -(-bits // 32)


def index_words(k, n):
    """Elias-Fano of k indices in [0, n], n being padding, or a bitmap if smaller."""
    if k == 0:
        return 0
    plain = ceil_words(n)
    low = int(math.log2(n / k)) if n > k else 0
    while (k << (low + 1)) <= n:
        low += 1
    while low and (k << low) > n:
        low -= 1
    return min(plain, ceil_words(k * low) + ceil_words(k + (n >> low)))


def message(shapes, density, bits, *, scales=lambda k: 0, leaf=False, agreed=False):
    """Bytes of one sparse message: a header word, indices, values, scales."""
    n = size(shapes)
    count = lambda n: min(n, math.ceil(round(density * n, 9)))  # noqa: E731
    k = sum(count(math.prod(s)) for s in shapes) if leaf else count(n)
    indices = 0 if agreed else index_words(k, n)
    return 4 * (1 + indices + ceil_words(k * bits) + scales(k))


def gathered(*args, **kwargs):
    return lambda shapes: [("all-gather", "uint32", message(shapes, *args, **kwargs))]


def low_rank_traffic(rank):
    def traffic(shapes):
        first, second = 0, 0
        for shape in shapes:
            rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
            columns = shape[-1] if len(shape) > 1 else math.prod(shape)
            if rank * (rows + columns) < rows * columns:
                first += rank * rows
                second += rank * columns
            else:
                first += rows * columns
        return [("all-reduce", "float32", 4 * part) for part in (first, second) if part]

    return traffic


def sign_traffic(shapes):
    return [("all-gather", "uint32", 4 * (ceil_words(size(shapes)) + len(shapes)))]


def dense_traffic(shapes):
    return [("all-reduce", "float32", 4 * size(shapes))]


def sparse(selection, codec=None, scope="global"):
    codec = js.codec.float32() if codec is None else codec
    return js.sparse(
        selection, js.all_gather(), axis_name=AXIS, codec=codec, scope=scope
    )


def top_k_contraction(density):
    return lambda shapes: math.ceil(round(density * size(shapes), 9)) / size(shapes)


D = 0.1
ROWS = {
    "dense": Row(
        lambda: js.dense(axis_name=AXIS),
        dense_traffic,
        limit=lambda: js.dense(axis_name=AXIS),
        contraction=lambda shapes: 1.0,
    ),
    "top_k": Row(
        lambda: sparse(js.top_k(D)),
        gathered(D, 32),
        limit=lambda: sparse(js.top_k(1.0)),
        contraction=top_k_contraction(D),
    ),
    "top_k_leaf": Row(
        lambda: sparse(js.top_k(D), scope="leaf"),
        gathered(D, 32, leaf=True),
        limit=lambda: sparse(js.top_k(1.0), scope="leaf"),
        contraction=lambda shapes: D,
    ),
    "top_k_bfloat16": Row(
        lambda: sparse(js.top_k(D), js.codec.bfloat16()),
        gathered(D, 16),
    ),
    "top_k_float16": Row(
        lambda: sparse(js.top_k(D), js.codec.float16()),
        gathered(D, 16),
    ),
    "top_k_int8": Row(
        lambda: sparse(js.top_k(D), js.codec.int8(block=4)),
        gathered(D, 8, scales=lambda k: -(-k // 4)),
        exact=False,
    ),
    "top_k_sign": Row(
        lambda: sparse(js.top_k(D), js.codec.sign_mean()),
        gathered(D, 1, scales=lambda k: 1),
        exact=False,
    ),
    "sampled_top_k": Row(
        lambda: sparse(js.sampled_top_k(D, sample=0.3)),
        gathered(D, 32),
        limit=lambda: sparse(js.sampled_top_k(1.0)),
    ),
    "threshold": Row(
        lambda: sparse(js.threshold(1.0, max_density=D)),
        gathered(D, 32),
        limit=lambda: sparse(js.threshold(0.0, max_density=1.0)),
    ),
    "random_k": Row(
        lambda: sparse(js.random_k(D, seed=3)),
        gathered(D, 32, agreed=True),
        limit=lambda: sparse(js.random_k(1.0)),
        unbiased=True,
        stateful=True,
    ),
    "random_block": Row(
        lambda: sparse(js.random_block(D, seed=3), scope="leaf"),
        gathered(D, 32, agreed=True, leaf=True),
        limit=lambda: sparse(js.random_block(1.0)),
        stateful=True,
    ),
    "low_rank": Row(
        lambda: js.low_rank(1, axis_name=AXIS),
        low_rank_traffic(1),
        limit=lambda: js.low_rank(64, axis_name=AXIS),
        limit_tolerance=1e-5,
        exact=False,
        stateful=True,
    ),
    "sign_mean": Row(
        lambda: js.sign_mean(axis_name=AXIS),
        sign_traffic,
        exact=False,
        contraction=lambda shapes: 0.0,
    ),
    "phases": Row(
        lambda: js.phases([(1, js.dense(axis_name=AXIS)), (None, sparse(js.top_k(D)))]),
        dense_traffic,  # of the first phase
        limit=lambda: js.phases(
            [(1, js.dense(axis_name=AXIS)), (None, sparse(js.top_k(1.0)))]
        ),
        contraction=top_k_contraction(D),
        stateful=True,
    ),
}

TRANSFORMATIONS = {
    "error_feedback": lambda: js.error_feedback(sparse(js.top_k(D))),
    "error_feedback_decay": lambda: js.error_feedback(sparse(js.top_k(D)), 0.9),
    "error_feedback_int8": lambda: js.error_feedback(
        sparse(js.top_k(D), js.codec.int8())
    ),
    "momentum_correction": lambda: js.momentum_correction(sparse(js.top_k(D)), 0.9),
    "momentum_nesterov": lambda: js.momentum_correction(
        sparse(js.top_k(D)), 0.9, nesterov=True
    ),
    "stateless_dense": lambda: js.stateless(js.dense(axis_name=AXIS)),
    "dgc": lambda: js.dgc(
        D,
        axis_name=AXIS,
        clip_norm=4.0,
        warmup_steps=2,
        warmup_densities=(0.5, 0.25),
        scope="global",
    ),
    "power_sgd": lambda: js.power_sgd(1, axis_name=AXIS),
    "ef_sign_sgd": lambda: js.ef_sign_sgd(axis_name=AXIS),
    "random_k": lambda: js.error_feedback(sparse(js.random_k(D))),
}

SHAPES = {"bias": (7,), "kernel": (5, 11), "scale": ()}


def dyadic(seed, shapes=None, workers=None, dtype=jnp.float32):
    """A tree of multiples of 1/64: sums of a few are exact in float32."""
    rng = np.random.default_rng(seed)
    lead = () if workers is None else (workers,)
    draw = lambda s: rng.integers(-300, 300, (*lead, *s)) / 64  # noqa: E731
    return {
        name: jnp.asarray(draw(shape), dtype)
        for name, shape in (SHAPES if shapes is None else shapes).items()
    }


def on_workers(f, out_axes=0, in_axes=0):
    """The function on every worker by vmap, jitted; ``out_axes`` None is a proof."""
    return jax.jit(jax.vmap(f, in_axes, out_axes, axis_name=AXIS))


def worker_zero(tree):
    return jax.tree.map(lambda x: x[0], tree)
