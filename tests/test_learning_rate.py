"""What is owed keeps the rate at which it was computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, on_workers, sparse, stacked

import jaxsparse as js

WORKERS, N, K = 4, 24, 4
RATES = np.array([0.5, 0.5, 1.0, 0.0, 0.25, 1e-3, 0.0, 0.0, 2.0, 2.0, 0.1, 0.03])
STEPS = len(RATES)


def schedule(count):
    return jnp.asarray(RATES, jnp.float32)[count]


@functools.cache
def gradients():
    return np.random.default_rng(0).normal(size=(STEPS, WORKERS, N)).astype("float32")


def run(tx, grads):
    """Means after each step, the same on all workers, and every worker's last state."""

    def train(grads):
        def step(state, g):
            mean, state = tx.update(g, state)
            return state, mean

        state, means = jax.lax.scan(step, tx.init(grads[0]), grads)
        return means, state

    return on_workers(train, (None, 0))(jnp.asarray(grads).swapaxes(0, 1))


def in_numpy(rates, grads, k):
    """Means and the last residuals; a gradient at a rate of 0 leaves nothing behind."""
    owed, before, means = np.zeros(grads.shape[1:]), 1.0, []
    for rate, g in zip(rates, grads.astype(np.float64), strict=True):
        x = g + (before / rate * owed if rate else 0)
        sent = simulation.top_k(x, k)
        means.append(sent.mean(0))
        if rate:
            owed, before = x - sent, rate
    return np.stack(means), owed


def test_it_does_what_numpy_says():
    memory = js.error_feedback(sparse(js.top_k(K / N)))
    means, state = run(js.follow_learning_rate(memory, schedule), gradients())
    expected, owed = in_numpy(RATES, gradients(), K)
    np.testing.assert_allclose(means, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.inner.residual.value, owed, rtol=1e-4, atol=1e-5)
    plain, _ = run(memory, gradients())
    assert np.abs(means - plain).max() > 1  # or nothing was rescaled


def server(**kwargs):
    exchange = js.server(ladder=False, **kwargs)
    return sparse(js.top_k(K / N), exchange=exchange, workers=WORKERS)


CONSERVING = {
    "top_k": lambda: js.error_feedback(sparse(js.top_k(K / N))),
    "int8": lambda: js.error_feedback(sparse(js.top_k(K / N), js.codec.int8())),
    "server": lambda: js.error_feedback(server(limit=1.0)),
    "no momentum": lambda: js.momentum_correction(sparse(js.top_k(K / N)), 0.0),
    "partition": lambda: optax.partition({"a": server_memory()}, "a"),
}


def server_memory():
    return js.error_feedback(server(downlink=js.codec.bfloat16()))


def owed_by(state):
    """What memories and servers still owe, as the mean over the workers."""
    is_shard = lambda v: getattr(v, "reshard", None) == "shard"  # noqa: E731
    memory = optax.tree.get_all_with_path(state, "residual")
    memory += optax.tree.get_all_with_path(state, "velocity")
    owed = [
        np.asarray(node.value, np.float64).mean(0)
        for _, node in memory
        if not is_shard(node)
    ]
    shards = [
        js.reshard({"s": node}, 1)["s"].value[0]  # one server has the whole vector
        for node in jax.tree.leaves(state, is_leaf=is_shard)
        if is_shard(node)
    ]
    return sum(owed) + sum(np.asarray(shard, np.float64) for shard in shards)


@pytest.mark.parametrize("name", CONSERVING)
def test_every_gradient_is_applied_or_owed_at_its_own_rate(name):
    """sum_t eta_t mean_t + eta_T owed_T = sum_t eta_t mean(g_t)."""
    tx = js.follow_learning_rate(CONSERVING[name](), schedule)
    means, state = run(tx, gradients())
    applied = RATES @ np.asarray(means, np.float64)
    owed = RATES[-1] * owed_by(state)
    given = RATES @ gradients().astype(np.float64).mean(1)
    np.testing.assert_allclose(applied + owed, given, atol=1e-5)
    assert np.abs(owed).max() > 1e-3


def test_with_momentum_what_is_owed_is_rescaled_and_the_momentum_is_not():
    """u = m u + g on every worker; sums of u in the place of those of g."""
    memory = js.momentum_correction(sparse(js.top_k(K / N)), 0.9, masking=False)
    means, state = run(js.follow_learning_rate(memory, schedule), gradients())
    u, given = np.zeros((WORKERS, N)), np.zeros(N)
    for rate, g in zip(RATES, gradients().astype(np.float64), strict=True):
        u = 0.9 * u + g
        given += rate * u.mean(0)
    np.testing.assert_allclose(state.inner.momentum.value, u, rtol=1e-4, atol=1e-5)
    applied = RATES @ np.asarray(means, np.float64)
    owed = RATES[-1] * np.asarray(state.inner.velocity.value).mean(0)
    np.testing.assert_allclose(applied + owed, given, atol=1e-5)


@pytest.mark.parametrize("rate", [0.3, lambda count: 0.3 + 0 * count])
def test_a_constant_rate_changes_no_bit(rate):
    memory = js.error_feedback(sparse(js.top_k(K / N)))
    means, state = run(js.follow_learning_rate(memory, rate), gradients())
    plain, held = run(memory, gradients())
    np.testing.assert_array_equal(means, plain)
    np.testing.assert_array_equal(state.inner.residual.value, held.residual.value)


def test_where_nothing_is_left_no_schedule_changes_anything():
    memory = js.error_feedback(js.dense(axis_name=AXIS))
    means, _ = run(js.follow_learning_rate(memory, schedule), gradients())
    np.testing.assert_array_equal(means, run(memory, gradients())[0])


def test_rates_at_the_ends_of_the_range_leave_everything_finite():
    rates = np.array([1.0, 0.0, 1e-45, 1e-38, 1e30, 2e-38, 1e38, 0.0, 1.0], "float32")
    tx = js.follow_learning_rate(
        js.error_feedback(sparse(js.top_k(K / N))), lambda t: jnp.asarray(rates)[t]
    )
    means, state = run(tx, gradients()[: len(rates)])
    for leaf in jax.tree.leaves((means, state)):
        assert np.isfinite(leaf).all()


def test_other_workers_take_up_what_is_owed_at_its_rate():
    tx = js.follow_learning_rate(server_memory(), schedule)
    state, axes = stacked(tx.init(jnp.zeros(N)), WORKERS)
    step = on_workers(tx.update, (None, axes), (0, axes))
    for g in gradients()[:3]:
        _, state = step(jnp.asarray(g), state)
    after = js.reshard(state, 2)
    assert after.rate == RATES[2] and after.count == 3
    assert after.inner.residual.value.shape == (2, N)
    np.testing.assert_allclose(owed_by(after), owed_by(state), atol=1e-5)


def test_only_what_the_memory_holds_differs_between_workers():
    tx = optax.chain(
        js.follow_learning_rate(server_memory(), schedule), optax.sgd(schedule)
    )

    def step(state, g):
        updates, opt_state = tx.update(g, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    state = jnp.zeros(N), tx.init(jnp.zeros(N))
    local = js.local_leaves(
        step, state, jnp.zeros(N), axis_name=AXIS, num_workers=WORKERS
    )
    assert not local[1][0].rate and not local[1][0].count
    assert local[1][0].inner.residual.value


@pytest.mark.parametrize(
    ("tx", "rate", "error", "match"),
    [
        (js.dense(axis_name=AXIS), 0.1, TypeError, "takes a transformation.*Reducer"),
        (optax.identity(), -0.1, ValueError, "not negative, got -0.1"),
        (optax.identity(), float("nan"), ValueError, "not negative, got nan"),
        (optax.identity(), "0.1", TypeError, "must be a number, got '0.1'"),
    ],
)
def test_wrong_arguments_are_refused(tx, rate, error, match):
    with pytest.raises(error, match=match):
        js.follow_learning_rate(tx, rate)
