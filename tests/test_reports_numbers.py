"""What users of other libraries reported of numbers and shapes: docs/reports.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, on_workers, sparse

import jaxsparse as js

report = pytest.mark.report
WORKERS = 4

METHODS = {
    "dense": lambda: js.dense(axis_name=AXIS),
    "top_k": lambda: sparse(js.top_k(0.3)),
    "random_k": lambda: sparse(js.random_k(0.3)),
    "shared_support": lambda: sparse(js.top_k(0.3), exchange=js.shared_support()),
    "low_rank": lambda: js.low_rank(1, axis_name=AXIS),
    "sign_mean": lambda: js.sign_mean(axis_name=AXIS),
}
every_method = pytest.mark.parametrize("name", METHODS)


def one_step(tx, x):
    """The mean of gradients [workers, ...], and every worker's state after it."""
    zeros = jax.tree.map(lambda v: v[0] * 0, x)
    return on_workers(lambda g: tx.update(g, tx.init(zeros)), (None, 0))(x)


@report("pytorch#59522", "pytorch#59576", "horovod#278")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "top_k"])
def test_a_mean_in_half_precision_neither_overflows_nor_vanishes(name, dtype):
    info = jnp.finfo(dtype)
    least = float(info.smallest_subnormal if dtype == "float16" else 4 * info.tiny)
    row = jnp.array([float(info.max), -float(info.max), least, -least, 1, 0], dtype)
    reducer = METHODS[name]() if name == "dense" else sparse(js.top_k(1.0))
    mean, _ = one_step(js.stateless(reducer), jnp.stack([row] * WORKERS))
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean.astype(jnp.float32), row.astype(jnp.float32))


@report("jax#27496")
@pytest.mark.parametrize("density", [None, 1.0])
def test_half_precision_gradients_are_added_up_in_float32(density):
    """In bfloat16, 1 + 1/256 is 1: the small ones would add up to nothing."""
    x = jnp.array([[1], [2**-8], [2**-8], [2**-8]], jnp.bfloat16)
    reducer = js.dense(axis_name=AXIS) if density is None else sparse(js.top_k(density))
    mean, _ = one_step(js.stateless(reducer), x)
    expected = np.asarray(x, np.float32).mean(0).astype(jnp.bfloat16)
    assert float(expected[0]) != 0.25
    assert mean.tolist() == expected.tolist()


@report("PaddlePaddle/models#3145")
def test_what_is_held_stays_bounded_over_thousands_of_steps():
    """With gradients of norm 1 and a contraction by 1 - k/n, by a geometric series."""
    n, k, steps = 64, 4, 3000
    tx = js.error_feedback(sparse(js.top_k(k / n)))

    def run(key):
        def step(carry, key):
            state, largest = carry
            g = jax.random.normal(key, (n,))
            _, state = tx.update(g / jnp.linalg.norm(g), state)
            held = jnp.linalg.norm(state.residual.value)
            return (state, jnp.maximum(largest, held)), None

        start = (tx.init(jnp.zeros(n)), jnp.zeros(()))
        return jax.lax.scan(step, start, jax.random.split(key, steps))[0][1]

    largest = on_workers(run)(jax.random.split(jax.random.key(0), 2))
    factor = np.sqrt(1 - k / n)
    assert (largest > 1).all() and (largest < factor / (1 - factor)).all()


@report("Paddle#20708", "templar#537")
@every_method
def test_a_skipped_bad_number_does_not_live_on_in_the_memory(name):
    tx = js.skip_nonfinite(js.error_feedback(METHODS[name]()), axis_name=AXIS)
    x = jnp.arange(1.0, 1 + WORKERS * 10).reshape(WORKERS, 10)

    def run(x):
        state = tx.init(x)
        bad = jnp.where(jax.lax.axis_index(AXIS) == 2, jnp.nan, x)
        for given in (x, bad, x):
            mean, state = tx.update(given, state)
        return mean, state.skipped, state.inner.residual.value

    mean, skipped, residual = on_workers(run, (None, None, 0))(x)
    assert skipped == 1
    assert np.isfinite(mean).all() and np.isfinite(residual).all()
    assert np.any(mean != 0)


ODD_SHAPES = {
    "scalar": (),
    "one": (1,),
    "empty": (0,),
    "one by one": (1, 1),
    "vector": (7,),
    "matrix": (3, 5),
    "prime": (13, 1),
    "conv": (3, 3, 2, 2),
    "five": (2, 1, 2, 1, 3),
}


@report("grace#2", "DeepSpeed#813", "torchft#203")
@every_method
def test_leaves_of_no_to_five_dimensions_lose_nothing(name):
    """What was given is delivered or held: the method's own loss is in what is held."""
    rng = np.random.default_rng(0)
    x = {
        leaf: jnp.asarray(rng.integers(-99, 99, (WORKERS, *shape)) / 64, jnp.float32)
        for leaf, shape in ODD_SHAPES.items()
    }
    mean, state = one_step(js.error_feedback(METHODS[name]()), x)
    for leaf, shape in ODD_SHAPES.items():
        assert mean[leaf].shape == shape
        owed = np.asarray(x[leaf] - state.residual.value[leaf]).mean(0)
        np.testing.assert_allclose(mean[leaf], owed, atol=1e-5)


@report("grace@b73d7a5")
def test_a_threshold_that_nothing_reaches_sends_nothing_and_keeps_all():
    tx = js.error_feedback(sparse(js.threshold(1e9, max_density=0.3)))
    x = jnp.arange(1.0, 1 + WORKERS * 10).reshape(WORKERS, 10)
    mean, state = one_step(tx, x)
    assert not mean.any()
    np.testing.assert_array_equal(state.residual.value, x)


@report("powersgd#5", "powersgd#6")
def test_every_worker_sends_as_many_entries_whatever_its_number():
    k, rng = 3, np.random.default_rng(1)
    x = jnp.asarray([rng.permutation(10) + 1.0 for _ in range(8)], jnp.float32)
    _, state = one_step(js.error_feedback(sparse(js.top_k(k / 10))), x)
    assert (state.residual.value != x).sum(1).tolist() == [k] * 8
