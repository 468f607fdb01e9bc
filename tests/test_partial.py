"""Partial work: accumulated gradients, frozen parameters, gradients that are zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, on_workers, sparse

import jaxsparse as js

WORKERS, RATE = 4, 0.125


def memory(k, n):
    return js.error_feedback(sparse(js.top_k(k / n)))


def trainer(tx, see=lambda state: state):
    """``(params, grads)`` to parameters, and what is seen of the state, step by step.

    Gradients are [workers, steps, ...]; out axes None prove that parameters agree.
    """

    def train(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, see(state))

        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    return on_workers(train, (None, 0), (None, 0))


def gradients(seed, steps, **shapes):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(WORKERS, steps, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


MICRO, N, K = 3, 20, 4
ACCUMULATED = {
    "around": lambda: optax.MultiSteps(
        optax.chain(memory(K, N), optax.sgd(RATE)), MICRO
    ),
    "inside": lambda: optax.chain(
        optax.MultiSteps(memory(K, N), MICRO).gradient_transformation(),
        optax.sgd(RATE),
    ),
}


@pytest.mark.parametrize("where", ACCUMULATED)
def test_what_is_compressed_is_the_accumulated_mean(where):
    grads = gradients(0, 4 * MICRO, w=(N,))["w"]
    train = trainer(
        ACCUMULATED[where](), lambda state: optax.tree.get(state, "residual").value
    )
    path, residual = train(jnp.zeros(N), grads)
    accumulated = np.asarray(grads).reshape(WORKERS, 4, MICRO, N).mean(2)
    means, held = simulation.error_feedback(accumulated.swapaxes(0, 1), K)
    expected = -RATE * means.cumsum(0)
    np.testing.assert_allclose(path[MICRO - 1 :: MICRO], expected, atol=1e-6)
    np.testing.assert_allclose(residual[:, -1], held, atol=1e-6)
    # Parameters and memory move in the steps that emit, and in no other.
    moved = (np.diff(path, axis=0) != 0).any(1)
    changed = (np.diff(residual, axis=1) != 0).any((0, 2))
    emits = [(step + 1) % MICRO == 0 for step in range(1, 4 * MICRO)]
    assert moved.tolist() == changed.tolist() == emits


def frozen_by(how, tx):
    """``tx`` for leaf ``w`` alone; leaf ``frozen`` does not move."""
    if how == "partition":
        parts = {"w": tx, "frozen": optax.set_to_zero()}
        return optax.partition(parts, {"w": "w", "frozen": "frozen"})
    trained = {"w": True, "frozen": False}
    fixed = optax.masked(optax.set_to_zero(), {"w": False, "frozen": True})
    if how == "masked":
        return optax.chain(optax.masked(tx, trained), fixed)
    return optax.chain(fixed, optax.masked(tx, trained))


HOW = {
    "partition": js.momentum_correction,
    "masked": js.error_feedback,
    "zeroed before": js.error_feedback,
}


def both():
    return {"w": jnp.ones((3, 5)), "frozen": jnp.full((200,), 1 / 3)}


@pytest.mark.parametrize("how", HOW)
def test_frozen_parameters_stay_and_the_others_train_as_if_alone(how):
    grads = gradients(1, 5, w=(3, 5), frozen=(200,))
    tx = optax.chain(HOW[how](sparse(js.top_k(0.2))), optax.adam(0.1))
    path, _ = trainer(frozen_by(how, tx))(both(), grads)
    alone, _ = trainer(tx)({"w": both()["w"]}, {"w": grads["w"]})
    np.testing.assert_array_equal(path["w"], alone["w"])
    np.testing.assert_array_equal(path["frozen"], [both()["frozen"]] * 5)
    assert (path["w"][-1] != path["w"][0]).any()


@pytest.mark.parametrize("how", HOW)
def test_frozen_parameters_cost_neither_bytes_nor_memory(how):
    def cost(tx, params):
        state = tx.init(params)
        traced = jax.make_jaxpr(tx.update, axis_env=[(AXIS, WORKERS)])(params, state)
        return js.traffic(traced), sum(leaf.size for leaf in jax.tree.leaves(state))

    tx = optax.chain(memory(3, 15), optax.adam(0.1))
    alone = cost(tx, {"w": both()["w"]})
    assert cost(frozen_by(how, tx), both()) == alone
    assert cost(tx, both()) != alone


SILENT = {
    "int8": lambda: sparse(js.top_k(K / 30), js.codec.int8(), scope="leaf"),
    "sign_mean codec": lambda: sparse(
        js.top_k(K / 30, js.penalty()), js.codec.sign_mean()
    ),
    "sampled_top_k": lambda: sparse(js.sampled_top_k(K / 30, sample=1.0)),
    "sign_mean": lambda: js.sign_mean(axis_name=AXIS),
    "low_rank": lambda: js.low_rank(1, axis_name=AXIS),
}


@pytest.mark.parametrize("name", SILENT)
def test_gradients_that_are_always_zero_give_updates_of_zero(name):
    """No NaN from a norm of zero, no entry of the other leaf in their place."""
    tx = optax.chain(
        js.clip_by_local_norm(1.0, axis_name=AXIS),
        js.momentum_correction(SILENT[name](), masking=False),
        optax.adam(0.1),
    )
    params = {"silent": jnp.ones((4, 5)), "w": jnp.ones((2, 5))}
    grads = gradients(2, 4, silent=(4, 5), w=(2, 5))
    zero = {**grads, "silent": 0 * grads["silent"]}
    train = trainer(tx)
    path, _ = train(params, zero)
    np.testing.assert_array_equal(path["silent"], [params["silent"]] * 4)
    assert (path["w"][-1] != params["w"]).any()
    still, state = train(params, jax.tree.map(lambda g: 0 * g, grads))
    for leaf in params:
        np.testing.assert_array_equal(still[leaf], [params[leaf]] * 4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_gradients_that_are_zero_take_no_place_from_others():
    """With k entries that are not zero, top-k is what it is without the zeros."""
    grads = gradients(3, 6, silent=(20,), w=(10,))
    zero = {**grads, "silent": 0 * grads["silent"]}
    params = {"silent": jnp.zeros(20), "w": jnp.zeros(10)}
    tx = optax.chain(memory(K, 30), optax.sgd(1.0))
    path, residual = trainer(tx, lambda s: s[0].residual.value)(params, zero)
    alone, held = simulation.error_feedback(np.asarray(grads["w"]).swapaxes(0, 1), K)
    np.testing.assert_allclose(path["w"], -alone.cumsum(0), atol=1e-5)
    np.testing.assert_allclose(residual["w"][:, -1], held, atol=1e-5)
    assert not np.any(residual["silent"])
