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


@functools.cache
def stepper(make, dtype):
    """The state before step one, shared and workers' own, and the step on both."""
    tx = js.skip_nonfinite(make(), axis_name=AXIS)

    def one(state, grads):
        current, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, current)
        return optax.apply_updates(current, updates), opt_state

    state = (params(dtype), tx.init(params(dtype)))
    grads = params(dtype)
    local = js.local_leaves(one, state, grads, axis_name=AXIS, num_workers=WORKERS)
    shared, own = js.split(state, local)

    # out_axes None proves that parameters, moments and counters are the same.
    @jax.jit
    @functools.partial(
        jax.vmap, in_axes=(None, 0, 0), out_axes=(None, 0), axis_name=AXIS
    )
    def step(shared, own, grads):
        return js.split(one(js.merge(shared, own), grads), local)

    return shared, js.stack_workers(own, WORKERS), step


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
