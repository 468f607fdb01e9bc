import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, on_workers, sparse

import jaxsparse as js

WORKERS, N, K = 4, 40, 6


def vectors(seed=0):
    return np.random.default_rng(seed).normal(size=(WORKERS, N)).astype(np.float32)


OWN = dict.fromkeys(("residual_norm", "captured"))


def parted(metrics):
    """What is the same on all workers, for out_axes None to prove it, and the rest."""
    return metrics._replace(**OWN), {name: getattr(metrics, name) for name in OWN}


@functools.cache
def compiled(tx, steps):
    """Metrics of the last step."""

    def run(x):
        state = tx.init(x)
        for _ in range(steps):
            _, state = tx.update(x, state)
        return parted(js.metrics(state))

    return on_workers(run, (None, 0))


def measured(tx, x, steps=1):
    shared, own = compiled(tx, steps)(x)
    return shared._replace(**own)


TOP_K = js.error_feedback(sparse(js.top_k(K / N)))


def test_without_anything_measured_all_is_zero():
    tx = optax.adam(0.1)
    metrics = js.metrics(tx.init(jnp.ones(3)))
    assert all(x.shape == () and x == 0 for x in metrics)
    integers = {"aggregated", "phase", "rung", "skipped", "consecutive"}
    integers |= {"gate", "measured", "fallbacks"}
    for name, x in metrics._asdict().items():
        assert x.dtype == (jnp.int32 if name in integers else jnp.float32)


@pytest.mark.report("pytorch#54647", "horovod#2906")
def test_entries_the_union_and_the_residuals_norm():
    metrics = measured(TOP_K, vectors())
    sent = simulation.top_k(vectors(), K)
    assert metrics.selected == K
    assert metrics.aggregated == (sent != 0).any(0).sum()
    assert metrics.overflow == 0
    expected = np.linalg.norm(vectors() - sent, axis=1)
    np.testing.assert_allclose(metrics.residual_norm, expected, rtol=1e-6)


@pytest.mark.report("DGC#3", "singa#1140")
def test_how_far_the_selections_overlap():
    # Workers that lean towards one common vector choose alike, but not the same.
    x = vectors() + 2 * vectors(1)[:1]
    metrics = measured(TOP_K, x)
    chosen = simulation.top_k(x, K) != 0
    union = chosen.any(0).sum()
    assert metrics.aggregated == union < WORKERS * K
    np.testing.assert_allclose(metrics.overlap, WORKERS * K / union, rtol=1e-6)
    pairs = [*itertools.combinations(chosen, 2)]
    common = np.mean([(a & b).sum() for a, b in pairs])
    either = np.mean([(a | b).sum() for a, b in pairs])
    np.testing.assert_allclose(metrics.jaccard, common / either, rtol=1e-6)


def test_entries_that_cancel_are_in_the_union_all_the_same():
    x = np.zeros((WORKERS, N), np.float32)
    x[:, :K] = np.array([[1], [-1], [2], [-2]])
    assert measured(TOP_K, x).aggregated == K


def test_the_share_of_the_energy_that_was_sent():
    metrics = measured(TOP_K, vectors())
    sent = simulation.top_k(vectors(), K)
    expected = (sent**2).sum(1) / (vectors() ** 2).sum(1)
    np.testing.assert_allclose(metrics.captured, expected, rtol=1e-5)


def test_entries_that_found_no_place_are_counted_on_average():
    limit, capacity = 0.5, 10
    tx = js.error_feedback(sparse(js.threshold(limit, max_density=capacity / N)))
    x = vectors() * np.array([[0.1], [1], [1], [2]], np.float32)
    metrics = measured(tx, x)
    found = (np.abs(x) > limit).sum(1)
    assert found.min() < capacity < found.max()  # both happen
    np.testing.assert_allclose(metrics.selected, np.minimum(found, capacity).mean())
    np.testing.assert_allclose(metrics.overflow, np.maximum(found - capacity, 0).mean())


def test_the_norm_is_of_the_velocity_under_momentum_correction():
    tx = js.momentum_correction(sparse(js.top_k(K / N)), 0.9)
    metrics = measured(tx, vectors(), steps=3)
    _, v, _ = simulation.momentum_correction(
        np.stack([vectors()] * 3), K, 0.9, False, True
    )
    np.testing.assert_allclose(
        metrics.residual_norm, np.linalg.norm(v, axis=1), rtol=1e-5
    )


@pytest.mark.parametrize("scale", [2e-38, 1e-20, 1.0, 1e30])
def test_the_norm_neither_overflows_nor_vanishes(scale):
    x = np.float32(scale) * np.sign(vectors())
    metrics = measured(TOP_K, x)
    # N - K entries of equal magnitude are left.
    np.testing.assert_allclose(
        metrics.residual_norm, np.sqrt(np.float64(N - K)) * np.float64(scale), rtol=1e-5
    )


def test_several_reducers_add_up():
    params = {"a": jnp.zeros(N), "b": jnp.zeros(N)}
    memory = lambda k: js.error_feedback(sparse(js.top_k(k / N)))  # noqa: E731
    tx = optax.partition({"a": memory(3), "b": memory(5)}, {"a": "a", "b": "b"})
    x = {"a": jnp.asarray(vectors(0)), "b": jnp.asarray(vectors(1))}

    def run(x):
        return parted(js.metrics(tx.update(x, tx.init(params))[1]))

    metrics, own = on_workers(run, (None, 0))(x)
    sent = [simulation.top_k(vectors(0), 3), simulation.top_k(vectors(1), 5)]
    assert metrics.selected == 8
    assert metrics.aggregated == sum((s != 0).any(0).sum() for s in sent)
    left = np.concatenate([vectors(i) - s for i, s in enumerate(sent)], axis=1)
    norm = np.linalg.norm(left, axis=1)
    np.testing.assert_allclose(own["residual_norm"], norm, rtol=1e-6)
    total = np.linalg.norm(np.concatenate([vectors(0), vectors(1)], axis=1), axis=1)
    np.testing.assert_allclose(own["captured"], 1 - (norm / total) ** 2, rtol=1e-5)


def test_wrappers_of_all_kinds_are_looked_into():
    reducer = js.phases([(1, js.dense(axis_name=AXIS)), (None, sparse(js.top_k(0.5)))])
    tx = js.skip_nonfinite(
        optax.MultiSteps(optax.chain(js.error_feedback(reducer), optax.adam(0.1)), 1),
        axis_name=AXIS,
    )
    good = jnp.asarray(vectors())
    bad = good.at[1, 2].set(jnp.nan)

    def run(good, bad):
        state = tx.init(good)
        for x in (good, bad, good):
            _, state = tx.update(x, state, good)
        return parted(js.metrics(state))[0]

    metrics = jax.jit(jax.vmap(run, out_axes=None, axis_name=AXIS))(good, bad)
    assert (metrics.phase, metrics.skipped, metrics.selected) == (1, 1, N // 2)
