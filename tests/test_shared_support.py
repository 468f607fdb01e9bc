import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from contract_table import AXIS, index_words, on_workers, sparse

import jaxsparse as js

N, K, STEPS = 30, 4, 7


def gradients(workers, seed=0):
    shape = (STEPS, workers, N)
    return np.random.default_rng(seed).integers(-300, 300, shape) / np.float32(64)


@functools.cache
def compiled(selection, codec=None):
    """Means, rests and metrics of steps that start anew from every gradient."""
    reducer = sparse(selection, codec, exchange=js.shared_support())

    def run(grads):
        def step(state, g):
            mean, left, state = reducer.reduce(g, state)
            shared = state.metrics._replace(sent_norm=None)
            return state, (mean, left, shared, state.metrics.sent_norm.value)

        state, out = jax.lax.scan(step, reducer.init(grads[0]), grads)
        return *out, state.exchange

    return on_workers(run, (None, 0, None, 0, None), in_axes=1)


def over(grads, selection=None, codec=None):
    out = compiled(js.top_k(K / N) if selection is None else selection, codec)(grads)
    mean, left, metrics, norms, state = jax.tree.map(np.asarray, out)
    return mean, left.swapaxes(0, 1), metrics, norms.T, state


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_lead_in_turn_and_all_send_what_the_leader_chose(workers):
    g = gradients(workers)
    mean, left, metrics, norms, state = over(g)
    for t, x in enumerate(g):
        chosen = simulation.top_k(x[t % workers][None], K)[0] != 0
        sent = np.where(chosen, x, 0)
        np.testing.assert_allclose(mean[t], sent.mean(0), rtol=1e-6)
        np.testing.assert_array_equal(left[t], x - sent)
        np.testing.assert_allclose(norms[t], np.linalg.norm(sent, axis=1), rtol=1e-6)
    assert state.step == STEPS
    for name, wanted in {
        "selected": K,
        "aggregated": K,
        "overlap": workers,
        "common": K,
        "overflow": 0,
        "rung": 0,
    }.items():
        np.testing.assert_array_equal(getattr(metrics, name), wanted)


def test_a_selection_that_all_agree_on_needs_no_leader():
    selection = js.random_k(K / N, seed=5)
    g = gradients(3)
    mean, left, metrics, _, _ = over(g, selection)
    state = selection.init(N)
    for t, x in enumerate(g):
        chosen = np.isin(np.arange(N), selection.select(jnp.zeros(N), state)[0])
        state = selection.observe(state, jnp.zeros(N), jnp.zeros(N))
        np.testing.assert_allclose(mean[t], np.where(chosen, x, 0).mean(0), rtol=1e-6)
        np.testing.assert_array_equal(left[t], np.where(chosen, 0, x))
    np.testing.assert_array_equal(metrics.aggregated, K)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_indices_are_sent_unless_they_are_agreed(workers):
    """A word for every value; the size does not depend on the number of workers."""

    def traffic(selection):
        reducer = sparse(selection, exchange=js.shared_support())
        x = jnp.zeros(N)
        program = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])
        found = js.traffic(program(x, reducer.init(x)))
        return sorted((c.op, c.dtype, c.bytes) for c in found[""])

    values = ("all-reduce", "float32", 4 * K)
    indices = ("all-reduce", "uint32", 4 * index_words(K, N))
    assert traffic(js.random_k(K / N)) == [values]
    assert traffic(js.top_k(K / N)) == [values, indices]


def test_places_that_the_leader_leaves_empty_stay_empty():
    g = gradients(3)
    g[1, 1] = 0  # leads at step 1
    mean, left, metrics, _, _ = over(g, js.threshold(4.4, max_density=K / N))
    assert not mean[1].any()
    np.testing.assert_array_equal(left[1], g[1])
    for t, x in enumerate(g):
        found = min((np.abs(x[t % 3]) > 4.4).sum(), K)
        assert metrics.selected[t] == metrics.aggregated[t] == found


@pytest.mark.parametrize("codec", [js.codec.bfloat16, js.codec.int8])
def test_the_codecs_loss_is_left(codec):
    g = gradients(4) * np.float32(1 + 2**-11)
    mean, left, _, _, _ = over(g, None, codec())
    sent = np.asarray(g, np.float64) - left
    np.testing.assert_allclose(mean, sent.mean(1), atol=1e-6)
    assert ((left != 0) & (np.abs(left) < 0.05) & (sent != 0)).any()


def test_with_error_feedback_everything_is_delivered_in_the_end():
    tx = js.error_feedback(sparse(js.top_k(K / N), exchange=js.shared_support()))
    g = gradients(3, seed=1)

    def run(g):
        def step(state, x):
            mean, state = tx.update(x, state)
            return state, mean

        state, means = jax.lax.scan(step, tx.init(g[0]), g)
        return means.sum(0), state.residual.value

    delivered, residual = on_workers(run, (None, 0), in_axes=1)(g)
    owed = np.asarray(residual).mean(0)
    np.testing.assert_allclose(delivered + owed, g.sum(0).mean(0), atol=1e-5)
