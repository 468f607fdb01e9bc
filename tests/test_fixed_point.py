import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, on_workers

from jaxsparse.exchange.fixed_point import fixed_point_mean


def averaged(x, bits):
    f = on_workers(
        functools.partial(fixed_point_mean, bits=bits, axis_name=AXIS), (None, 0)
    )
    return [np.asarray(v, np.float64) for v in f(jnp.asarray(x, jnp.float32))]


@pytest.mark.parametrize("bits", [5, 8, 16])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_mean_of_what_each_put_in(bits, workers):
    x = np.random.default_rng(bits).normal(size=(workers, 21)).astype(np.float32)
    mean, own = averaged(x, bits)
    np.testing.assert_allclose(mean, own.mean(0), atol=1e-6)
    count = (2**bits - 1) // workers + 1
    rms = np.sqrt(np.mean(x**2, axis=1))
    asked = np.minimum(
        np.sqrt(2.7 * np.log(count)) * rms, np.abs(x).max(1) * count / (count - 1)
    )
    reach = asked.max()  # cells of width 2 reach / count, read in the middle
    inside = np.abs(x) <= reach
    assert np.abs(own - x)[inside].max() <= reach / count * (1 + 1e-4)
    outermost = reach * (1 - 1 / count)
    np.testing.assert_allclose(np.abs(own)[~inside], outermost, rtol=1e-5)


def test_few_levels_lose_as_little_as_is_possible():
    """Max (1960), table II: uniform quantisers of normal entries, 4 and 8 levels."""
    x = np.random.default_rng(0).normal(size=(8, 4000))
    for bits, error in ((5, 0.1188), (6, 0.0374)):
        _, own = averaged(x, bits)
        assert 0.97 < np.mean((own - x) ** 2) / error < 1.05


def test_the_largest_magnitudes_do_not_carry_over():
    x = np.where(np.arange(12) % 2, 3.0, -3.0) * np.ones((8, 1))
    mean, own = averaged(x, 8)
    np.testing.assert_allclose(mean, x[0], rtol=1e-6)
    np.testing.assert_allclose(own, x, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-40, 3.4e38])
def test_finite_at_the_ends(value):
    mean, own = averaged(np.full((4, 5), value), 16)
    np.testing.assert_allclose(mean, own[0], rtol=1e-6)
    np.testing.assert_allclose(mean, value if value > 1e-38 else 0, rtol=1e-6)


def test_the_order_of_the_workers_does_not_matter():
    x = np.random.default_rng(0).normal(size=(4, 9))
    np.testing.assert_array_equal(averaged(x, 16)[0], averaged(x[::-1], 16)[0])


@pytest.mark.parametrize("bits", [2, 3, 17, 32])
def test_bits_that_do_not_hold_the_sum_are_refused(bits):
    with pytest.raises(ValueError, match="do not add up"):
        averaged(np.zeros((8, 3)), bits)


def test_a_vector_of_no_entries():
    shapes = jax.eval_shape(
        on_workers(lambda x: fixed_point_mean(x, 16, AXIS), (None, 0)),
        jnp.zeros((2, 0)),
    )
    assert [s.shape for s in shapes] == [(0,), (2, 0)]
