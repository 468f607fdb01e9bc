import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from contract_table import AXIS, on_workers

import jaxsparse as js

WORKERS, N = 4, 40


@functools.cache
def gradients(steps=9):
    shape = (steps, WORKERS, N)
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


def over(tx, grads):
    """Means of every step, with the phase and how many entries were sent."""

    def run(x):
        def step(state, g):
            mean, state = tx.update(g, state)
            metrics = js.metrics(state)
            return state, (mean, metrics.phase, metrics.selected)

        return jax.lax.scan(step, tx.init(x[0]), x)[1]

    return on_workers(run, None, in_axes=1)(jnp.asarray(grads))


exact = functools.partial(
    js.dgc, axis_name=AXIS, codec=js.codec.float32(), scope="global", sample=1.0
)


def clipped(grads, norm):
    """Every worker's gradient of every step clipped to a norm."""
    length = np.linalg.norm(grads, axis=-1, keepdims=True)
    return grads * np.minimum(1, norm / length)


@pytest.mark.parametrize(("nesterov", "masking"), [(False, True), (True, False)])
def test_dgc_is_the_paper_where_all_entries_are_sampled(nesterov, masking):
    tx = exact(
        0.1,
        momentum=0.8,
        nesterov=nesterov,
        masking=masking,
        clip_norm=9.0,
        num_workers=WORKERS,
    )
    small = clipped(gradients(), 9 / np.sqrt(WORKERS))
    assert (small != gradients()).any(axis=-1).all()  # all were clipped
    expected, _, _ = simulation.momentum_correction(small, 4, 0.8, nesterov, masking)
    np.testing.assert_allclose(over(tx, gradients())[0], expected, atol=1e-5)


@pytest.mark.report("grace#15")
def test_dgc_warms_up_through_the_densities_above_its_own():
    tx = exact(0.1, warmup_steps=5, warmup_densities=(0.5, 0.25, 0.1, 0.05))
    _, phase, selected = over(tx, gradients())
    assert phase.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    k = [20, 20, 10, 10, 10, 4, 4, 4, 4]
    np.testing.assert_allclose(selected, k)


def test_dgc_by_default_has_a_budget_for_every_leaf_and_no_warm_up():
    tx = js.dgc(0.25, axis_name=AXIS, sample=1.0)
    tree = {"a": jnp.ones((WORKERS, 8)), "b": 100 * jnp.ones((WORKERS, 4))}
    mean = on_workers(lambda g: tx.update(g, tx.init(g))[0], None)(tree)
    assert int((mean["a"] != 0).sum()) == 2 and int((mean["b"] != 0).sum()) == 1


def test_local_clipping_divides_by_the_root_of_the_workers_and_leaves_the_small():
    tx = js.clip_by_local_norm(6.0, axis_name=AXIS)
    x = {"a": jnp.array([[6.0], [0.3], [-30.0], [0.0]]), "b": jnp.zeros((WORKERS, 2))}
    x["b"] = x["b"].at[:, 0].set(jnp.array([8.0, 0.4, 40.0, 0.0]))
    out = on_workers(lambda g: tx.update(g, tx.init(g))[0])(x)
    # Lengths 10, 0.5, 50 and 0; the bound is 6 / sqrt(4) = 3.
    np.testing.assert_allclose(out["a"][:, 0], [1.8, 0.3, -1.8, 0], rtol=1e-6)
    np.testing.assert_allclose(out["b"][:, 0], [2.4, 0.4, 2.4, 0], rtol=1e-6)


def test_power_sgd_averages_densely_before_its_start_and_then_by_low_rank():
    grads = gradients().reshape(9, WORKERS, 8, 5)
    mean, phase, _ = over(js.power_sgd(1, axis_name=AXIS, start_step=3), grads)
    np.testing.assert_allclose(mean[:3], grads[:3].mean(1), atol=1e-6)
    assert phase.tolist() == [0] * 3 + [1] * 6
    ranks = np.linalg.matrix_rank(mean, tol=1e-4)
    assert ranks.tolist() == [5] * 3 + [1] * 6
    # What low rank yields from there on does not depend on what came before.
    alone, *_ = over(js.power_sgd(1, axis_name=AXIS), grads[3:])
    np.testing.assert_allclose(mean[3:], alone, atol=1e-5)


def test_ef_sign_sgd_is_algorithm_1_of_the_paper():
    mean, *_ = over(js.ef_sign_sgd(axis_name=AXIS), gradients())
    error, expected = np.zeros((WORKERS, N)), []
    for g in gradients():
        p = g + error
        sent = np.abs(p).mean(1, keepdims=True) * np.where(p >= 0, 1, -1)
        error = p - sent
        expected.append(sent.mean(0))
    np.testing.assert_allclose(mean, expected, atol=1e-5)


def test_warm_up_densities_that_rise_are_refused():
    with pytest.raises(ValueError, match=r"warmup_densities=.*must fall.*0.1, 0.2"):
        js.dgc(0.01, axis_name=AXIS, warmup_steps=9, warmup_densities=(0.1, 0.2))


@pytest.mark.report("DeepSpeed#753")
def test_fewer_warm_up_steps_than_densities_are_refused():
    with pytest.raises(ValueError, match=r"dgc\(warmup_steps=.*at least 4.*got 3"):
        js.dgc(axis_name=AXIS, warmup_steps=3)
    js.dgc(0.1, axis_name=AXIS, warmup_steps=1)  # only 0.25 is above 0.1


@pytest.mark.parametrize("steps", [-1, 2.5, "3", None])
def test_steps_that_are_no_whole_number_are_refused(steps):
    with pytest.raises(ValueError, match=r"dgc\(warmup_steps=...\)` must be a whole"):
        js.dgc(axis_name=AXIS, warmup_steps=steps)
    with pytest.raises(
        ValueError, match=r"power_sgd\(start_step=...\)` must be a whole"
    ):
        js.power_sgd(1, axis_name=AXIS, start_step=steps)


def test_dgc_checks_the_number_of_workers():
    tx = js.dgc(0.5, axis_name=AXIS, num_workers=3)
    with pytest.raises(ValueError, match="is 3, but axis 'workers' has 4"):
        over(tx, gradients())


def test_local_clipping_of_large_gradients_scales_them():
    """Their squares overflow; the direction stays."""
    tx = js.clip_by_local_norm(1.0, axis_name=AXIS)
    g = jnp.full((4, 2), 1e30)
    clipped = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(g)
    np.testing.assert_allclose(clipped, 0.5 / np.sqrt(2), rtol=1e-5)
