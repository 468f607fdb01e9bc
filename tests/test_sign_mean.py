import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, on_workers

import jaxsparse as js

WORKERS = 4
SHAPES = {"a": (7,), "b": (5, 9), "c": (), "d": (0,), "e": (64,)}


def updates(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=(WORKERS, *shape)).astype(np.float32) * 10**i
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def signs(x):
    """What a worker sends of a leaf: zero counts as positive."""
    scale = np.abs(x).mean() if x.size else 0
    return np.where(x >= 0, scale, -scale)


reduced = on_workers(
    lambda x: js.sign_mean(axis_name=AXIS).reduce(x, ())[:2], (None, 0)
)


def test_every_leaf_is_its_signs_times_its_mean_magnitude():
    mean, left = reduced(updates())
    for name, x in updates().items():
        sent = np.stack([signs(row) for row in x])
        tolerance = 1e-6 * np.abs(x).max(initial=0)
        np.testing.assert_allclose(mean[name], sent.mean(0), rtol=0, atol=tolerance)
        np.testing.assert_allclose(left[name], x - sent, rtol=0, atol=tolerance)


def test_zero_counts_as_positive():
    x = jnp.array([[0.0, -2.0], [-0.0, 4.0]])
    mean, left = reduced(x)
    np.testing.assert_array_equal(mean, [1.5, 0.5])
    np.testing.assert_array_equal(left, [[-1.0, -1.0], [-2.0, 2.0]])


def test_what_is_left_is_as_short_as_the_paper_says():
    # ||x - C(x)||^2 = ||x||^2 - ||x||_1^2 / n
    x = updates()["b"].reshape(WORKERS, -1)
    left = np.asarray(reduced(jnp.asarray(x))[1], np.float64)
    x = x.astype(np.float64)
    expected = (x**2).sum(1) - np.abs(x).sum(1) ** 2 / x.shape[1]
    np.testing.assert_allclose((left**2).sum(1), expected, rtol=1e-5)


def test_numbers_of_one_magnitude_come_through_exactly():
    x = np.random.default_rng(1).choice([-0.75, 0.75], (WORKERS, 33)).astype(np.float32)
    mean, left = reduced(jnp.asarray(x))
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    np.testing.assert_allclose(left, 0, atol=1e-6)


@pytest.mark.parametrize("value", [3.4e38, 1e-40])
def test_the_largest_numbers_do_not_overflow(value):
    x = np.full((WORKERS, 1000), value, np.float32)
    mean, left = reduced(jnp.asarray(x))
    np.testing.assert_allclose(mean, x[0], rtol=1e-5, atol=1.2e-38)
    assert np.isfinite(left).all()


@pytest.mark.report("grace#10")
def test_error_feedback_delivers_in_the_end_what_the_signs_lost():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(WORKERS, 16)), jnp.float32)
    tx = js.ef_sign_sgd(axis_name=AXIS)
    steps = 400

    def run(x):
        def step(state, _):
            mean, state = tx.update(x, state)
            return state, mean

        return jax.lax.scan(step, tx.init(x), length=steps)[1].mean(0)

    mean = on_workers(run, None)(x)
    # The mean residual is bounded, so what was delivered approaches what was given.
    assert np.abs(mean - x.mean(0)).max() < 0.1 * np.abs(x).max()


def test_more_entries_than_an_int32_counts_are_refused_at_init():
    huge = jax.ShapeDtypeStruct((2**31 - 1,), jnp.float32)
    with pytest.raises(ValueError, match=r"2\*\*31 - 2 entries, got 2147483647"):
        jax.eval_shape(js.ef_sign_sgd(axis_name=AXIS).init, huge)
