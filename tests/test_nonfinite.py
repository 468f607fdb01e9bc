import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, sparse

import jaxsparse as js

WORKERS = 4
BAD = [np.nan, np.inf, -np.inf]


def params(dtype=jnp.float32):
    return {"a": jnp.ones((2, 3), dtype), "b": jnp.zeros(4)}


def gradients(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda p: rng.integers(-300, 300, (WORKERS, *p.shape)) / 64  # noqa: E731
    return jax.tree.map(lambda p: jnp.asarray(draw(p), p.dtype), params(dtype))


def spoilt(grads, value, worker=2, leaf="a"):
    bad = grads[leaf].at[(worker, *[1] * (grads[leaf].ndim - 1))].set(value)
    return {**grads, leaf: bad}


def chain(momentum=False):
    reducer = sparse(js.random_k(0.5))
    memory = js.momentum_correction if momentum else js.error_feedback
    return optax.chain(memory(reducer), optax.adamw(0.1, weight_decay=0.1))


def of_all_workers(one, state, example):
    """The state, shared and workers' own, and one worker's step on all of them."""
    local = js.local_leaves(one, state, example, axis_name=AXIS, num_workers=WORKERS)
    shared, own = js.split(state, local)

    # out_axes None proves that parameters, moments and counters are the same.
    @jax.jit
    @functools.partial(
        jax.vmap, in_axes=(None, 0, 0), out_axes=(None, 0), axis_name=AXIS
    )
    def step(shared, own, x):
        return js.split(one(js.merge(shared, own), x), local)

    return shared, js.stack_workers(own, WORKERS), step


@functools.cache
def stepper(make, dtype):
    """The state before step one, shared and workers' own, and the step on both."""
    tx = js.skip_nonfinite(make(), axis_name=AXIS)

    def one(state, grads):
        current, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, current)
        return optax.apply_updates(current, updates), opt_state

    state = (params(dtype), tx.init(params(dtype)))
    return of_all_workers(one, state, params(dtype))


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def run(make, grads, dtype=jnp.float32):
    """Parameters and state after every step."""
    shared, own, step = stepper(make, dtype)
    path = [js.merge(shared, own)]
    for g in grads:
        shared, own = step(shared, own, g)
        path.append(js.merge(shared, own))
    return path


@pytest.mark.parametrize("leaf", ["a", "b"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_number_on_one_worker_changes_nothing_on_any(bad, leaf):
    first, second = gradients(0), gradients(1)
    path = run(chain, [first, spoilt(second, bad, leaf=leaf), second])
    before, skipped, after = path[1:]
    assert_same(skipped[0], before[0])
    assert_same(skipped[1].inner, before[1].inner)
    assert skipped[1].skipped == skipped[1].consecutive == 1
    # And then it goes on as if the bad step had not been.
    clean = run(chain, [first, second])[-1]
    assert_same(after[0], clean[0])
    assert_same(after[1].inner, clean[1].inner)
    assert after[1].skipped == 1
    assert after[1].consecutive == 0


def test_good_steps_are_those_of_the_chain_alone():
    grads = [gradients(seed) for seed in range(3)]
    wrapped = run(chain, grads)[-1]
    tx = chain()

    @jax.jit
    @functools.partial(jax.vmap, out_axes=None, axis_name=AXIS)
    def alone(grads):
        current = params()
        state = tx.init(current)
        for g in grads:
            updates, state = tx.update(g, state, current)
            current = optax.apply_updates(current, updates)
        return current

    for a, b in zip(*map(jax.tree.leaves, (wrapped[0], alone(grads))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert wrapped[1].skipped == 0


def test_skips_are_counted_in_all_and_in_a_row():
    good, bad = gradients(0), spoilt(gradients(1), np.nan)
    path = run(chain, [bad, bad, good, bad])
    assert [int(s.skipped) for _, s in path] == [0, 1, 2, 2, 3]
    assert [int(s.consecutive) for _, s in path] == [0, 1, 2, 0, 1]
    assert js.metrics(path[-1][1]).skipped == 3


def accumulating():
    return optax.MultiSteps(chain(momentum=True), 2)


def test_a_micro_batch_that_is_bad_is_left_out_of_its_accumulator():
    first, second, third = map(gradients, range(3))
    bad = spoilt(third, np.nan)
    mixed = run(accumulating, [first, bad, second, bad])
    clean = run(accumulating, [first, second])
    assert_same(mixed[2][1].inner, mixed[1][1].inner)
    assert_same(mixed[-1][0], clean[-1][0])
    assert_same(mixed[-1][1].inner, clean[-1][1].inner)
    assert int(mixed[-1][1].skipped) == 2
    assert (mixed[3][0]["a"] != params()["a"]).any()  # it did step


def with_sgd():
    return optax.chain(js.error_feedback(sparse(js.top_k(0.5))), optax.sgd(0.5))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bad", BAD)
def test_half_precision_is_looked_at_and_its_largest_numbers_are_finite(bad, dtype):
    most = float(jnp.finfo(dtype).max)
    large, good = spoilt(gradients(0, dtype), most), gradients(1, dtype)
    path = run(with_sgd, [large, spoilt(good, bad)], dtype)
    assert [int(s.skipped) for _, s in path] == [0, 0, 1]
    assert path[1][0]["a"].dtype == dtype
    assert_same(path[2][0], path[1][0])
    assert_same(path[2][1].inner, path[1][1].inner)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(path[2]))


def test_the_axis_must_be_bound():
    tx = js.skip_nonfinite(optax.sgd(0.1), axis_name=AXIS)
    with pytest.raises(NameError, match="axis_name='workers' is not bound"):
        tx.update(params(), tx.init(params()))


def behind_a_priority():
    selection = js.top_k(0.5, js.ema(weight=4.0))
    memory = js.error_feedback(
        js.sparse(selection, js.server(), axis_name=AXIS, num_workers=WORKERS)
    )
    return optax.chain(memory, optax.sgd(0.1))


@pytest.mark.parametrize(
    "make", [chain, functools.partial(chain, momentum=True), behind_a_priority]
)
def test_no_memory_keeps_a_bad_number(make):
    first, second = gradients(0), gradients(1)
    bad = spoilt(spoilt(second, np.nan), np.inf, worker=0, leaf="b")
    _, before, after = run(make, [first, bad])
    assert int(after[1].consecutive) == 1
    assert_same(after[1].inner, before[1].inner)
    assert any(x.any() for x in jax.tree.leaves(before[1].inner[0]))


@pytest.mark.parametrize("of", ["magnitude", "support"])
@pytest.mark.parametrize("bad", BAD)
def test_without_skipping_an_average_forgets_a_bad_number(bad, of):
    priority = js.ema(decay=0.5, of=of)
    average = priority.init(3)
    for mean in ([1.0, bad, 2.0], [1.0, 0.0, 4.0]):
        average = priority.observe(average, jnp.array(mean), jnp.array(mean))
    seen = {"magnitude": [0.25, 0, 0.5], "support": [0.5, 0.5, 0.5]}[of]
    later = {"magnitude": [0.125, 0, 0.5], "support": [0.5, 0, 0.5]}[of]
    np.testing.assert_allclose(average, np.array(seen) / 2 + later, rtol=1e-6)


GAIN = 1e-6  # of a loss whose gradients float16 takes for 0, unless they are scaled


@functools.cache
def scaled_stepper(dtype):
    """A step in half precision with a loss scale, as on docs/methods' page."""
    tx = js.error_feedback(sparse(js.top_k(0.25)))
    tx = js.skip_nonfinite(optax.chain(tx, optax.sgd(0.15 / GAIN)), axis_name=AXIS)

    def loss(p, x):
        return jnp.sum((p - x.astype(dtype)) ** 2).astype(jnp.float32) * GAIN

    def one(state, x):
        current, opt_state, scale = state
        grads = jax.grad(lambda p: loss(p, x) * scale)(current.astype(dtype))
        updates, new = tx.update(grads.astype(jnp.float32) / scale, opt_state)
        skipped = js.metrics(new).consecutive > 0
        scale = jnp.where(skipped, scale / 2, scale)
        return optax.apply_updates(current, updates), new, scale

    start = jnp.zeros(12)
    state = (start, tx.init(start), jnp.float32(1))
    return of_all_workers(one, state, start)


def scaled_run(dtype, scale, batches):
    shared, own, step = scaled_stepper(dtype)
    shared = (*shared[:2], jnp.float32(scale))
    path = []
    for x in batches:
        shared, own = step(shared, own, x)
        path.append((shared, own))
    return path


def targets(steps):
    rng = np.random.default_rng(0)
    draw = lambda: rng.permuted(  # noqa: E731
        np.tile(np.arange(-6, 6) / 2 + 0.25, (WORKERS, 1)), axis=1
    )
    return [jnp.asarray(draw(), jnp.float32) for _ in range(steps)]


def test_a_scaled_loss_in_float16_goes_the_way_of_float32():
    batches = targets(10)
    # 2 * 2.75 * GAIN * 2**34 is more than float16 has, and half of it is not.
    half = scaled_run(jnp.float16, 2.0**35, batches)
    scales = [float(shared[2]) for shared, _ in half]
    assert scales == [2.0**34, *[2.0**33] * 9]
    for shared, own in half[:2]:
        assert not any(x.any() for x in jax.tree.leaves((shared[0], own)))
    whole = scaled_run(jnp.float32, 1.0, batches[2:])
    unscaled = scaled_run(jnp.float16, 1.0, batches[2:])
    residuals = [jax.tree.leaves(own)[0] for _, own in whole]
    assert all((r != 0).sum() >= WORKERS * 8 for r in residuals)
    # Parameters up to 2.75 are rounded by 2**-10 at most, in each of eight steps.
    for (a, _), (b, _) in zip(half[2:], whole, strict=True):
        np.testing.assert_allclose(a[0], b[0], atol=8 * 2**-10)
    assert np.abs(unscaled[-1][0][0] - whole[-1][0][0]).max() > 0.05
