"""All methods x all laws (docs/design.md, section 3). Rows are in contract_table.py."""

import contract_table as table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, ROWS, SHAPES, TRANSFORMATIONS, dyadic, on_workers

import jaxsparse as js

WORKERS = 4


every_row = pytest.mark.parametrize("name", ROWS)
every_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)


def prepared(name, x):
    """The row, its reducer, its state for a tree stacked over workers, and the step.

    Out axes None for the mean and the shared state prove that all workers agree.
    """
    row = ROWS[name]
    reducer = row.make(jax.tree.leaves(x)[0].shape[0])
    state, step = mapped(reducer, x)
    return row, reducer, state, step


def mapped(reducer, x):
    """The state, local parts stacked, and the step over all workers."""
    workers = jax.tree.leaves(x)[0].shape[0]
    state, axes = table.stacked(reducer.init(table.worker_zero(x)), workers)
    return state, on_workers(reducer.reduce, (None, 0, axes), (0, axes))


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def flat(tree):
    parts = [leaf.reshape(-1) for leaf in leaves(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)


def over_workers(tree):
    """The sum over the workers, in float64, as one flat vector."""
    return flat(jax.tree.map(lambda v: np.asarray(v, np.float64).sum(0), tree))


def conserved(x, mean, left, tolerance, let_go=0.0):
    """Law 2: the sum over workers of (updates - left) is N times the mean.

    ``let_go`` is what the servers held before, less what they hold now: in units of
    the mean, as one flat vector.
    """
    workers = jax.tree.leaves(x)[0].shape[0]
    np.testing.assert_allclose(
        over_workers(x) - over_workers(left) + workers * let_go,
        workers * flat(mean),
        rtol=0,
        atol=tolerance * workers * 8,
    )


def one_step(step, x, state):
    """The step's results, and what the servers have let go of in it."""
    mean, left, after = step(x, state)
    n = sum(leaf[0].size for leaf in leaves(x))
    let_go = table.held_by_servers(state, n) - table.held_by_servers(after, n)
    return mean, left, after, let_go


@every_row
def test_conservation_and_agreement(name):
    x = dyadic(1, workers=WORKERS)
    row, _, state, step = prepared(name, x)
    for _ in range(3):
        mean, left, state, let_go = one_step(step, x, state)
        conserved(x, mean, left, 0.0 if row.exact else 1e-6, let_go)


# Rows that differ in selection or codec alone, which know nothing of workers, are run
# with two counts; 4 workers are in nearly all other tests.
COUNTS = [
    (name, workers)
    for name, row in ROWS.items()
    for workers in ([3, 8] if row.variant else [1, 2, 3, 5, 7, 8])
]


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("name, workers", COUNTS)
def test_any_number_of_workers(name, workers):
    x = dyadic(2, workers=workers)
    row, _, state, step = prepared(name, x)
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


@every_row
@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("shapes", ODD_TREES.values(), ids=ODD_TREES)
def test_odd_trees(name, shapes):
    x = {**dyadic(3, shapes, WORKERS), "none": None}
    row, _, state, step = prepared(name, x)
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


@every_row
@pytest.mark.usefixtures("fast_compilation")
def test_half_precision_values_are_right(name):
    x = jax.tree.map(lambda v: v.astype(jnp.bfloat16), dyadic(6, workers=2))
    _, _, state, step = prepared(name, x)
    mean, left, _, let_go = one_step(step, x, state)
    lost = over_workers(x) - over_workers(left) + 2 * let_go - 2 * flat(mean)
    # Each of mean and left is rounded to bfloat16 once: 2**-8 relative.
    magnitude = over_workers(jax.tree.map(jnp.abs, (x, left))).reshape(2, -1).sum(0)
    assert np.all(np.abs(lost) <= 2.0**-7 * (magnitude + 1e-3))


@every_row
@pytest.mark.usefixtures("fast_compilation")
def test_state_keeps_its_structure_in_scan_and_cond(name):
    x = dyadic(7, workers=WORKERS)
    _, reducer, state, _ = prepared(name, x)

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
    state, step = mapped(row.limit(WORKERS), x)
    mean, left, _ = step(x, state)
    for a, m, r in zip(leaves(x), leaves(mean), leaves(left), strict=True):
        tolerance = row.limit_tolerance * np.abs(a).max()
        np.testing.assert_allclose(m, a.mean(0), rtol=0, atol=tolerance)
        np.testing.assert_allclose(r, 0, atol=tolerance)


def extremes(largest):
    one = np.zeros(55)
    one[17] = 3.0
    return {
        "zeros": np.zeros(55),
        "constant": np.full(55, 0.1),
        "negative constant": np.full(55, -2.0),
        "one entry": one,
        "denormal": np.full(55, 1e-40),
        "mixed scales": np.geomspace(1e-38, 1e38, 55),
        "largest": np.full(55, largest),
        "signs of largest": largest * (-1.0) ** np.arange(55),
    }


@every_row
def test_finite_in_finite_out(name):
    largest = float(jnp.finfo(jnp.float32).max)
    x = {"a": jnp.zeros((WORKERS, 5, 11))}
    row, _, state, step = prepared(name, x)
    for what, values in extremes(largest).items():
        given = np.broadcast_to(values.reshape(5, 11), (WORKERS, 5, 11))
        inner = state
        for _ in range(2):
            mean, left, inner, let_go = one_step(
                step, {"a": jnp.asarray(given, jnp.float32)}, inner
            )
        for leaf in [*leaves(mean), *leaves(left), *leaves(inner)]:
            assert np.all(np.isfinite(leaf)), what
        if not row.exact and abs(values).max() > 1e30:
            continue  # finite is all that is asked for at the very edge
        # What is below the normal range may be flushed to zero.
        scale = max(np.abs(values).max(), 1e-30)
        in_units = [np.asarray(v["a"], np.float64) / scale for v in (mean, left)]
        conserved(given / scale, *in_units, 1e-6, let_go / scale)


@pytest.mark.parametrize(
    "name", [name for name, row in ROWS.items() if row.contraction]
)
def test_what_is_left_contracts(name):
    rng = np.random.default_rng(9)
    x = {k: jnp.asarray(rng.standard_normal((1, *s))) for k, s in SHAPES.items()}
    row, _, state, step = prepared(name, x)
    bound = 1 - row.contraction(list(SHAPES.values()))
    for _ in range(3):
        _, left, state = step(x, state)
        squares = lambda t: sum(np.sum(v**2) for v in leaves(t))  # noqa: E731
        assert squares(left) <= bound * squares(x) * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.unbiased])
def test_mean_over_steps_converges_to_the_input(name):
    x = dyadic(10, workers=1)
    _, reducer, state, _ = prepared(name, x)
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
@pytest.mark.usefixtures("fast_compilation")
def test_no_retrace_same_bits_any_order_of_workers(name):
    x = dyadic(11, workers=WORKERS)
    row, reducer, state, _ = prepared(name, x)
    traces = 0

    def counted(x, state):
        nonlocal traces
        traces += 1
        return reducer.reduce(x, state)

    _, axes = table.stacked(state, WORKERS)
    step = on_workers(counted, (None, 0, axes), (0, axes))
    mean, left, after = step(x, state)
    again, left_again, _ = step(x, state)
    step(x, after)
    assert traces == 1
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


@every_transformation
def test_delivered_plus_held_is_what_was_given(name):
    """Law 2 over many steps, for memories that forget nothing."""
    tx = TRANSFORMATIONS[name](WORKERS)
    rng = np.random.default_rng(12)
    grads = {
        k: jnp.asarray(rng.integers(-200, 200, (12, WORKERS, *s)) / 64, jnp.float32)
        for k, s in SHAPES.items()
    }
    zeros = jax.tree.map(lambda v: v[0, 0] * 0, grads)

    def run(grads):
        def body(carry, g):
            state, delivered = carry
            mean, state = tx.update(g, state, zeros, extra="passed on")
            return (state, jax.tree.map(jnp.add, delivered, mean)), None

        (state, delivered), _ = jax.lax.scan(body, (tx.init(zeros), zeros), grads)
        return delivered, state

    state_axes = js.state_axes(tx.init(zeros))
    delivered, state = on_workers(run, (None, state_axes), 1)(grads)
    held = [s for s in jax.tree.leaves(state, is_leaf=is_memory) if is_memory(s)]
    if name in ("error_feedback_decay", "dgc") or "momentum" in name:
        # These change the mass on purpose; what they do to it is in test_memory.py.
        assert all(np.all(np.isfinite(v)) for v in leaves((delivered, held)))
        return
    residual = jax.tree.map(lambda z: z[None], zeros)
    for memory in held:  # of a partition each one has its own leaves
        residual = jax.tree.map(
            lambda other, own: other if isinstance(own, optax.MaskedNode) else own,
            residual,
            memory.residual.value,
        )
    given = jax.tree.map(lambda g: g.sum(0), grads)
    held_back = -table.held_by_servers(state, table.size(SHAPES.values()))
    conserved(given, delivered, residual, 3e-5, held_back)


def is_memory(node):
    return type(node).__name__ in ("ErrorFeedbackState", "MomentumCorrectionState")


@every_transformation
def test_initial_buffers_are_distinct(name):
    """Aliased leaves abort under donation."""
    state = TRANSFORMATIONS[name](2).init(dyadic(13))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@every_transformation
def test_abstract_init(name):
    """``init`` and ``update`` agree on the state, without any array being made."""
    tx = TRANSFORMATIONS[name](2)
    abstract = jax.eval_shape(lambda: dyadic(14))
    state = jax.eval_shape(tx.init, abstract)
    stacked = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct((2, *v.shape), v.dtype), abstract
    )
    axes = js.state_axes(state)
    parts = jax.eval_shape(lambda s: table.stacked(s, 2)[0], state)
    update = jax.vmap(tx.update, (0, axes), (None, axes), axis_name=AXIS)
    _, after = jax.eval_shape(update, stacked, parts)
    describe = lambda t: jax.tree.map(lambda v: (v.shape, v.dtype), t)  # noqa: E731
    assert describe(after) == describe(parts)


@every_transformation
@pytest.mark.usefixtures("fast_compilation")
def test_bad_step_on_one_worker_is_skipped_by_all(name):
    """Law 13: parameters, moments and memories untouched, the counter goes up."""
    tx = js.skip_nonfinite(
        optax.chain(TRANSFORMATIONS[name](2), optax.adam(0.1)), axis_name=AXIS
    )
    good = dyadic(15, workers=2)
    zeros = jax.tree.map(lambda v: v[0] * 0, good)
    stacked = js.stack_workers(tx.init(zeros), 2)
    step = on_workers(tx.update)
    _, state = step(good, stacked)
    after = state
    for skipped, bad in enumerate([np.nan, -np.inf], 1):
        poisoned = {**good, "bias": good["bias"].at[1, 3].set(bad)}
        updates, after = step(poisoned, after)
        assert all(np.all(u == 0) for u in leaves(updates))
        for a, b in zip(leaves(state.inner), leaves(after.inner), strict=True):
            np.testing.assert_array_equal(a, b)
        assert after.skipped.tolist() == after.consecutive.tolist() == [skipped] * 2
    updates, after = step(good, after)
    assert after.skipped.tolist() == [2, 2] and after.consecutive.tolist() == [0, 0]
    assert any(np.any(u != 0) for u in leaves(updates))


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
