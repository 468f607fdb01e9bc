import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, on_workers

import jaxsparse as js

WORKERS = 4


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def steps_of(rank):
    """Means, what was left, for updates [workers, steps, ...]; in one ``lax.scan``."""
    reducer = js.low_rank(rank, axis_name=AXIS)

    def run(x):
        def step(state, x):
            mean, left, state = reducer.reduce(x, state)
            return state, (mean, left)

        state = reducer.init(jax.tree.map(lambda x: x[0], x))
        return jax.lax.scan(step, state, x)[1]

    return on_workers(run, (None, 0))


def repeated(x, steps):
    return jax.tree.map(lambda x: jnp.stack([x] * steps, 1), x)


def error(mean, x):
    """Relative to the exact mean, by Frobenius norm."""
    exact = np.asarray(x, np.float64).mean(0)
    return np.linalg.norm(mean - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("rank", [1, 2])
def test_matrices_in_one_common_space_of_that_rank_come_through_exactly(rank):
    columns = normal(0, 12, rank)
    x = columns @ normal(1, WORKERS, rank, 9)
    mean, left = steps_of(rank)(repeated(x, 1))
    assert error(mean[0], x) < 1e-6
    np.testing.assert_allclose(left, 0, atol=1e-5)


@pytest.mark.report("powersgd orthogonalization.py")
def test_matrices_of_one_shape_and_very_different_scale_are_each_accurate():
    scales = {"tiny": 1e-20, "small": 1e-4, "one": 1.0, "large": 1e20}
    column = normal(2, 8, 1)
    x = {
        name: np.float32(scale) * (column @ normal(i, WORKERS, 1, 6))
        for i, (name, scale) in enumerate(scales.items())
    }
    mean, _ = steps_of(1)(repeated(x, 1))
    for name in scales:
        assert error(np.float64(mean[name][0]), x[name]) < 1e-5, name


@pytest.mark.report("distributed-diffusion#14", "GRACE memory/powersgd.py")
@pytest.mark.parametrize("rank", [1, 3])
def test_a_warm_start_finds_the_best_approximation_of_a_matrix_that_stays(rank):
    left, right = np.linalg.qr(normal(3, 20, 20))[0], np.linalg.qr(normal(4, 15, 15))[0]
    spectrum = 0.7 ** np.arange(15)
    matrix = (left[:, :15] * spectrum) @ right
    # The workers' differences from the mean cancel: 1, -1, 2, -2.
    other = normal(5, 20, 15) / 50
    x = np.stack([matrix + s * other for s in (1, -1, 2, -2)]).astype(np.float32)
    mean, _ = steps_of(rank)(repeated(x, 20))
    errors = [np.linalg.norm(m - matrix) for m in np.asarray(mean)]
    best = np.linalg.norm(spectrum[rank:])
    assert errors[0] > 1.05 * best  # or there was nothing to improve
    assert errors[-1] < 1.01 * best
    assert errors[-1] <= errors[4] <= errors[0]


@pytest.mark.report("powersgd#3", "powersgd@1707180")
def test_left_is_what_a_worker_gave_less_its_own_part_and_so_the_sums_agree():
    x = {"m": normal(6, WORKERS, 9, 7), "t": normal(7, WORKERS, 3, 4, 5)}
    mean, left = steps_of(2)(repeated(x, 3))
    for name in x:
        sent = x[name][:, None] - left[name]
        np.testing.assert_allclose(sent.mean(0), mean[name], atol=1e-5)
        # Every worker's own part has the rank, so it is no share of the common mean.
        flat = np.reshape(sent, (WORKERS, 3, -1, x[name].shape[-1]))
        values = np.linalg.svd(flat, compute_uv=False)
        assert (values[..., 2] < 1e-4 * values[..., 0]).all()
        assert np.abs(np.diff(sent, axis=0)).max() > 0.1
        # And it is a projection: what is left is orthogonal to it.
        inner = np.einsum(
            "nsij,nsij->ns",
            flat,
            flat - x[name].reshape(WORKERS, 1, -1, x[name].shape[-1]),
        )
        np.testing.assert_allclose(inner, 0, atol=1e-3)


def test_vectors_scalars_and_small_matrices_are_averaged_as_they_are():
    shapes = {"v": (50,), "s": (), "small": (2, 2), "row": (1, 30), "thin": (2, 1, 1)}
    x = {name: normal(8, WORKERS, *shape) for name, shape in shapes.items()}
    mean, left = steps_of(1)(repeated(x, 1))
    for name in shapes:
        np.testing.assert_allclose(mean[name][0], x[name].mean(0), atol=1e-6)
        np.testing.assert_array_equal(left[name], 0)


@pytest.mark.report("powersgd@7159ac2", "powersgd@46448f5")
@pytest.mark.parametrize("rank", [1, 2])
def test_after_zero_gradients_it_recovers(rank):
    x = np.zeros((WORKERS, 4, 10, 8), np.float32)
    x[:, 2:] = normal(9, 10, 1) @ normal(10, WORKERS, 1, 1, 8)
    mean, _ = steps_of(rank)(jnp.asarray(x))
    np.testing.assert_array_equal(mean[:2], 0)
    assert error(mean[2], x[:, 2]) < 1e-6


@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_orthogonal_to_all_before_do_not_wait_for_ever(rank):
    # First only entry (0, 0), then only (9, 7): the one's Q is orthogonal to the other.
    x = np.zeros((WORKERS, 4, 10, 8), np.float32)
    x[:, 0, 0, 0] = 1
    x[:, 1:, 9, 7] = 1
    mean, left = steps_of(rank)(jnp.asarray(x))
    assert error(mean[0], x[:, 0]) < 1e-6
    assert error(mean[3], x[:, 3]) < 1e-6
    np.testing.assert_allclose(left[:, 3], 0, atol=1e-6)


@pytest.mark.parametrize("value", [1.0, 1e-40, 1e38, 3.4e38])
def test_constant_matrices_of_any_scale_give_finite_means(value):
    x = np.full((WORKERS, 10, 8), value, np.float32)
    mean, left = steps_of(2)(repeated(x, 2))
    assert np.isfinite(mean).all() and np.isfinite(left).all()


def test_the_seed_changes_the_first_factors_and_not_a_mean_of_that_rank():
    x = normal(11, 10, 1) @ normal(12, WORKERS, 1, 8)
    reducers = [js.low_rank(1, axis_name=AXIS, seed=seed) for seed in (0, 1)]
    one = lambda r: lambda x: r.reduce(x, r.init(x))[0]  # noqa: E731
    mean = [on_workers(one(r), None)(jnp.asarray(x)) for r in reducers]
    np.testing.assert_allclose(mean[0], mean[1], atol=1e-5)
    first, second = (r.init(x[0]).factors for r in reducers)
    assert (first != second).any()


@pytest.mark.report("hivemind#545")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_exact_as_it_can_be(dtype):
    # A product of powers of two has no rounding error of its own.
    column = 2.0 ** np.arange(-3, 3)[:, None]
    x = jnp.asarray(np.stack([column * column.T] * WORKERS), dtype)
    mean, left = steps_of(1)(repeated(x, 1))
    assert mean.dtype == left.dtype == dtype
    exact = np.asarray(x[0], np.float32)
    np.testing.assert_allclose(np.float32(mean[0]), exact, rtol=2**-7)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "2", None])
def test_a_rank_that_is_no_positive_int_is_refused(rank):
    with pytest.raises(ValueError, match=r"`low_rank\(rank=...\)` must be a whole"):
        js.low_rank(rank, axis_name=AXIS)


@pytest.mark.parametrize("shape", [(8, 10), (10, 9), (80,), (10, 2, 4, 3)])
def test_updates_of_another_shape_than_at_init_are_refused(shape):
    reducer = js.low_rank(2, axis_name=AXIS)
    state = reducer.init(jnp.ones((10, 8)))
    with pytest.raises(ValueError, match=r"state of `low_rank`.*float32\[16\].*`init`"):
        jax.vmap(lambda x: reducer.reduce(x, state), axis_name=AXIS)(
            jnp.ones((2, *shape))
        )


def test_factors_are_float32_where_float64_is_enabled():
    with jax.enable_x64(True):
        reducer = js.low_rank(1, axis_name=AXIS)
        x = jnp.ones((2, 6, 7), jnp.float32)
        state = reducer.init(x[0])
        step = jax.vmap(reducer.reduce, (0, None), (None, 0, None), axis_name=AXIS)
        _, _, after = jax.eval_shape(step, x, state)
    assert state.factors.dtype == after.factors.dtype == jnp.float32
