"""All methods x all laws (docs/design.md, section 3). Rows are in contract_table.py."""

import contract_table as table
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
    WORKERS,
    conserved,
    flat,
    leaves,
    mapped,
    one_step,
    over_workers,
    prepared,
)
from contract_table import AXIS, ROWS, SHAPES, dyadic, on_workers

import jaxsparse as js

every_row = pytest.mark.parametrize("name", ROWS)
# Rows that differ in selection or codec alone say little new in most laws.
variants_slow = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if row.variant else ())
        for name, row in ROWS.items()
    ],
)


@every_row
def test_conservation_and_agreement(name):
    x = dyadic(1, workers=WORKERS)
    row, _, state, step, _ = prepared(name)
    for _ in range(3):
        mean, left, state, let_go = one_step(step, x, state)
        conserved(x, mean, left, 0.0 if row.exact else 1e-6, let_go)


@variants_slow
@pytest.mark.parametrize("workers", [1, 3, 8])  # 2 and 4 are in most other laws
def test_any_number_of_workers(name, workers):
    x = dyadic(2, workers=workers)
    row, _, state, step, _ = prepared(name, workers)
    power_of_two = workers & (workers - 1) == 0
    if row.power_of_two and not power_of_two:
        with pytest.raises(ValueError, match="must be a power of two"):
            one_step(step, x, state)
        return
    mean, left, _, let_go = one_step(step, x, state)
    conserved(x, mean, left, 0.0 if row.exact and power_of_two else 1e-6, let_go)


ODD_TREES = {
    "all ranks": {
        "scalar": (),
        "one": (1,),
        "empty": (0,),
        "prime": (13,),
        "matrix": (3, 7),
        "cube": (2, 3, 5),
        "conv": (3, 3, 2, 2),
        "five": (2, 1, 2, 1, 3),
    },
    "only empty": {"a": (0,), "b": (0, 3)},
    "single scalar": {"a": ()},
}


@variants_slow
@pytest.mark.parametrize("shapes", ODD_TREES.values(), ids=ODD_TREES)
def test_odd_trees(name, shapes):
    x = {**dyadic(3, shapes, WORKERS), "none": None}
    row, _, state, step, _ = prepared(name, shapes={**shapes, "none": None})
    mean, left, _, let_go = one_step(step, x, state)
    assert jax.tree.structure(mean) == jax.tree.structure(x)
    conserved(x, mean, left, 0.0 if row.exact else 1e-6, let_go)


@every_row
def test_three_hundred_leaves(name):
    shapes = {f"leaf{i:03}": (1 + i % 2, 2) for i in range(300)}
    x = dyadic(4, shapes, 2)
    reducer = ROWS[name].make(2)
    state = reducer.init(table.worker_zero(x))
    # Tracing alone: the compiled program is as good as that of three leaves.
    jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, 2)])(
        table.worker_zero(x), state
    )
    collectives = [
        c
        for path, found in js.traffic(jaxpr).items()
        for c in found
        if path in ("", "ladder[0]") and c.bytes > 4  # agreeing on a rung takes a word
    ] + js.traffic(jaxpr).get("phases[0]", [])
    assert 1 <= sum(c.times for c in collectives) <= 2


@every_row
@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16",) * 3, ("float16",) * 3, ("float32", "bfloat16", "float16")],
    ids="-".join,
)
def test_shapes_and_dtypes_stay(name, dtypes):
    x = dyadic(5)
    x = {k: v.astype(d) for (k, v), d in zip(x.items(), dtypes, strict=True)}
    reducer = ROWS[name].make(2)
    state, axes = table.stacked(reducer.init(x), 2)
    f = jax.vmap(reducer.reduce, (0, axes), (None, 0, axes), axis_name=AXIS)
    stacked = js.stack_workers(x, 2)
    mean, left, new = jax.eval_shape(f, stacked, state)
    describe = lambda t: jax.tree.map(lambda v: (v.shape, v.dtype), t)  # noqa: E731
    assert describe(mean) == describe(x)
    assert describe(left) == describe(stacked)
    assert describe(new) == describe(state)


@variants_slow
def test_half_precision_values_are_right(name):
    x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), dyadic(6, workers=2))
    _, _, state, step, _ = prepared(name, 2, dtype="bfloat16")
    mean, left, _, let_go = one_step(step, x, state)
    lost = over_workers(x) - over_workers(left) + 2 * let_go - 2 * flat(mean)
    # Each of mean and left is rounded to bfloat16 once: 2**-8 relative.
    magnitude = over_workers(jax.tree.map(jnp.abs, (x, left))).reshape(2, -1).sum(0)
    assert np.all(np.abs(lost) <= 2.0**-7 * (magnitude + 1e-3))


@every_row
def test_state_keeps_its_structure_in_scan_and_cond(name):
    x = dyadic(7, workers=WORKERS)
    _, reducer, state, _, _ = prepared(name)

    def scanned(x, state):
        def body(state, go):
            state = jax.lax.cond(
                go, lambda s: reducer.reduce(x, s)[2], lambda s: s, state
            )
            return state, None

        return jax.lax.scan(body, state, jnp.array([True, False, True]))[0]

    # Tracing shows it: scan and cond refuse a state that changes its structure.
    _, axes = table.stacked(state, WORKERS)
    after = jax.eval_shape(on_workers(scanned, axes, (0, axes)), x, state)
    describe = lambda t: jax.tree.map(lambda v: (v.shape, v.dtype), t)  # noqa: E731
    assert describe(after) == describe(state)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.limit])
def test_limit_case_is_dense_averaging(name):
    row = ROWS[name]
    x = dyadic(8, workers=WORKERS)
    state, step, _ = mapped(row.limit(WORKERS), table.worker_zero(x))
    mean, left, _ = step(x, state)
    for a, m, r in zip(leaves(x), leaves(mean), leaves(left), strict=True):
        tolerance = row.limit_tolerance * np.abs(a).max()
        np.testing.assert_allclose(m, a.mean(0), rtol=0, atol=tolerance)
        np.testing.assert_allclose(r, 0, atol=tolerance)


LARGEST = float(np.finfo(np.float32).max)
ONE_ENTRY = np.where(np.arange(63) == 17, 3.0, 0.0)
EXTREMES = {
    "zeros": np.zeros(63),
    "constant": np.full(63, 0.1),
    "negative constant": np.full(63, -2.0),
    "one entry": ONE_ENTRY,
    "denormal": np.full(63, 1e-40),
    "mixed scales": np.geomspace(1e-38, 1e38, 63),
    "largest": np.full(63, LARGEST),
    "signs of largest": LARGEST * (-1.0) ** np.arange(63),
}


def in_units_of(scale, tree):
    return jax.tree.map(lambda v: np.asarray(v, np.float64) / scale, tree)


@every_row
def test_finite_in_finite_out(name):
    zeros = jax.tree.map(np.zeros, SHAPES, is_leaf=lambda s: isinstance(s, tuple))
    _, as_tree = jax.flatten_util.ravel_pytree(zeros)
    row, _, before, step, _ = prepared(name)
    for what, values in EXTREMES.items():
        x = jax.tree.map(
            lambda v: np.broadcast_to(v, (WORKERS, *v.shape)),
            as_tree(values.astype(np.float32)),
        )
        state = before
        for _ in range(2):
            mean, left, state, let_go = one_step(step, x, state)
        for leaf in [*leaves(mean), *leaves(left), *leaves(state)]:
            assert np.all(np.isfinite(leaf)), what
        if not row.exact and abs(values).max() > 1e30:
            continue  # finite is all that is asked for at the very edge
        # What is below the normal range may be flushed to zero.
        scale = max(np.abs(values).max(), 1e-30)
        x, mean, left = in_units_of(scale, (x, mean, left))
        conserved(x, mean, left, 1e-6, let_go / scale)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row.contraction]
)
def test_what_is_left_contracts(name):
    rng = np.random.default_rng(9)
    x = {k: jnp.asarray(rng.standard_normal((1, *s))) for k, s in SHAPES.items()}
    row, _, state, step, _ = prepared(name, 1)
    bound = 1 - row.contraction(list(SHAPES.values()))
    for _ in range(3):
        _, left, state = step(x, state)
        squares = lambda t: sum(np.sum(v**2) for v in leaves(t))  # noqa: E731
        assert squares(left) <= bound * squares(x) * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.unbiased])
def test_mean_over_steps_converges_to_the_input(name):
    x = dyadic(10, workers=1)
    _, reducer, state, _, _ = prepared(name, 1)
    steps = 4000

    def scanned(x, state):
        def body(carry, _):
            total, state = carry
            mean, _, state = reducer.reduce(x, state)
            return (jax.tree.map(jnp.add, total, mean), state), None

        zero = jax.tree.map(jnp.zeros_like, x)
        return jax.lax.scan(body, (zero, state), None, length=steps)[0][0]

    _, axes = table.stacked(state, 1)
    total = on_workers(scanned, None, (0, axes))(x, state)
    n = table.size(SHAPES.values())
    scale = n / -(-n // 10)
    for a, t in zip(leaves(x), leaves(total), strict=True):
        # Of a draw with probability p = 1 / scale; five standard deviations.
        deviation = np.abs(a[0]) * np.sqrt((scale - 1) / steps)
        assert np.all(np.abs(scale * t / steps - a[0]) <= 5 * deviation + 1e-6)


@every_row
def test_no_retrace_same_bits_any_order_of_workers(name):
    x = dyadic(11, workers=WORKERS)
    row, _, state, step, traces = prepared(name)
    mean, left, after = step(x, state)
    again, left_again, _ = step(x, state)
    step(x, after)
    assert len(traces) == 1
    for a, b in zip(leaves((mean, left)), leaves((again, left_again)), strict=True):
        np.testing.assert_array_equal(a, b)

    if not row.worker_order:
        return
    order = np.array([2, 0, 3, 1])
    permuted = jax.tree.map(lambda v: v[order], x)
    mean_p, left_p, _ = step(permuted, state)
    tolerance = 0.0 if row.exact else 1e-5
    for a, b in zip(leaves(mean), leaves(mean_p), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    for a, b in zip(leaves(left), leaves(left_p), strict=True):
        np.testing.assert_allclose(a[order], b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.traffic])
def test_bytes_of_the_program_equal_the_formula(name):
    """Law 11: formula, jaxpr and compiled program count the same bytes."""
    row, workers = ROWS[name], 2
    reducer = row.make(workers)
    x = dyadic(16)
    state = reducer.init(x)
    jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])(x, state)
    parts, axes = table.stacked(state, workers)
    by_pmap = jax.pmap(
        reducer.reduce, AXIS, in_axes=(0, axes), out_axes=(None, 0, axes)
    )
    compiled = by_pmap.lower(js.stack_workers(x, workers), parts).compile()
    wanted = sorted(row.traffic([SHAPES[k] for k in sorted(SHAPES)], workers))
    for found in (js.traffic(jaxpr), js.traffic(compiled)):
        first = {
            path: sorted((c.op, c.dtype, c.bytes) for c in collectives)
            for path, collectives in found.items()
            if path in ("", "phases[0]") and collectives
        }
        assert list(first.values()) == [wanted]
        assert all(c.times == 1 for cs in found.values() for c in cs)
