import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, index_words, on_workers, sparse
from jax.sharding import PartitionSpec

import jaxsparse as js

N, K = 60, 6


def gradients(workers, seed=0, n=N):
    """Multiples of 1/64, distinct in magnitude, alike on the workers but not equal."""
    rng = np.random.default_rng(seed)
    common = rng.integers(-200, 200, n)
    return (common + rng.integers(-150, 150, (workers, n))) / np.float32(64)


def reducer(codec=None, selection=None):
    selection = js.top_k(K / N) if selection is None else selection
    return sparse(selection, codec, exchange=js.g_top_k())


@functools.cache
def compiled(codec=None, selection=None):
    made = reducer(codec, selection)

    def run(x):
        mean, left, state = made.reduce(x, made.init(x))
        metrics = state.metrics
        return mean, left, metrics._replace(sent_norm=None), metrics.sent_norm.value

    return on_workers(run, (None, 0, None, 0))


def largest(x, k):
    """The k largest entries as {index: value}; ties go to the lower index."""
    order = sorted(x, key=lambda j: (-abs(x[j]), j))
    return {j: x[j] for j in order[:k]}


def simulated(x, k):
    """The mean, what is left, and the workers in each entry, by dictionaries."""
    workers = len(x)
    lists = [largest(dict(enumerate(row)), k) for row in x]
    parts = [{j: {i} for j in chosen} for i, chosen in enumerate(lists)]
    distance = 1
    while distance < workers:
        pairs = [(i, i ^ distance) for i in range(workers)]
        added = [
            {j: lists[a].get(j, 0) + lists[b].get(j, 0) for j in lists[a] | lists[b]}
            for a, b in pairs
        ]
        merged = [largest(sums, k) for sums in added]
        parts = [
            {j: parts[a].get(j, set()) | parts[b].get(j, set()) for j in merged[a]}
            for a, b in pairs
        ]
        lists, distance = merged, 2 * distance
    assert all(chosen == lists[0] for chosen in lists)
    mean, left = np.zeros(x.shape[1]), np.array(x, np.float64)
    for j, value in lists[0].items():
        mean[j] = value / workers
        left[sorted(parts[0][j]), j] = 0
    return mean, left, parts[0]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_merges_are_numpys(workers, seed):
    x = gradients(workers, seed)
    mean, left, metrics, norms = compiled()(x)
    wanted, rest, parts = simulated(x, K)
    np.testing.assert_array_equal(mean, wanted)
    np.testing.assert_array_equal(left, rest)
    hits = np.array([len(workers) for workers in parts.values()])
    assert metrics.aggregated == K == len(hits)
    assert metrics.selected == hits.sum() / workers
    assert metrics.overflow == K - hits.sum() / workers  # merged away
    np.testing.assert_allclose(metrics.overlap, hits.mean(), rtol=1e-6)
    pairs = max(workers * (workers - 1) / 2, 1)
    common = (hits * (hits - 1) / 2).sum() / pairs
    np.testing.assert_allclose(metrics.common, common, rtol=1e-6)
    np.testing.assert_allclose(norms, np.linalg.norm(x - rest, axis=1), rtol=1e-6)


def test_a_part_merged_away_stays_left_though_others_bring_the_entry_in_again():
    # Entry 0 loses among workers 0 and 1, and wins among workers 2 and 3.
    x = np.zeros((4, N), np.float32)
    x[0, [0, *range(10, 15)]] = [1, 2, 3, 4, 5, 6]
    x[1, [0, *range(20, 25)]] = [1, 7, 8, 9, 10, 11]
    x[2:, 0] = 100
    mean, left, metrics, _ = compiled()(x)
    assert mean[0] == 200 / 4
    np.testing.assert_array_equal(left[:, 0], [1, 1, 0, 0])
    np.testing.assert_array_equal((x - left).sum(0), 4 * mean)
    # Of the zeros of workers 2 and 3, the list holds what it has places for.
    assert metrics.aggregated == K


@pytest.mark.parametrize("codec", [js.codec.bfloat16, js.codec.int8])
def test_a_codec_writes_the_values_once_and_its_loss_is_left(codec):
    x = (gradients(8) * np.float32(1 + 2**-10)).astype(np.float32)
    mean, left, _, _ = compiled(codec())(x)
    sent = np.asarray(x, np.float64) - left
    np.testing.assert_allclose(sent.sum(0), 8 * np.float64(mean), atol=1e-5)
    lost = (np.abs(left) < 0.05) & (np.asarray(left) != 0) & (sent != 0)
    assert lost.any()


def test_empty_places_stay_empty():
    select = js.threshold(3.5, max_density=K / N)
    x = gradients(4)
    x[2] = 0
    chosen = np.abs(x) > 3.5
    assert (chosen.sum(1) < K).any()
    mean, left, metrics, _ = compiled(None, select)(x)
    np.testing.assert_array_equal((x - left).sum(0), 4 * np.asarray(mean))
    if chosen.any(0).sum() <= K:
        np.testing.assert_array_equal(mean, np.where(chosen, x, 0).mean(0))
    assert metrics.selected + metrics.overflow == chosen.sum() / 4


def test_an_agreed_selection_sends_no_indices_and_loses_nothing():
    made = reducer(None, js.random_k(K / N))
    x = gradients(4)
    mean, left, metrics, _ = compiled(None, js.random_k(K / N))(x)
    assert np.count_nonzero(mean) == K == metrics.selected and metrics.overlap == 4
    np.testing.assert_array_equal(mean, np.where(mean != 0, x.mean(0), 0))
    np.testing.assert_array_equal(left, np.where(mean != 0, 0, x))
    traced = jax.make_jaxpr(made.reduce, axis_env=[(AXIS, 4)])(x[0], made.init(x[0]))
    found = {c.op: c.bytes for c in js.traffic(traced)[""]}
    hits = -(
        -(1 + K + 1) // 2
    )  # half a list in the last round, of which a word of hits
    assert found == {"collective-permute": 4 * (1 + K), "all-gather": 4 * hits}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_bytes_follow_the_logarithm(workers):
    n, k = 4096, 64
    made = sparse(js.top_k(k / n), js.codec.bfloat16(), exchange=js.g_top_k())
    x = jnp.zeros(n)
    traced = jax.make_jaxpr(made.reduce, axis_env=[(AXIS, workers)])(x, made.init(x))
    first = 1 + index_words(k, n) + k // 2
    sums = [1 + index_words(k, n) + k + r * k // 32 for r in (1, 2)]
    words = [first, *sums][: max(workers.bit_length() - 1, 1)]
    shared = -(-words.pop() // max(workers // 2, 1))
    wanted = [("collective-permute", 4 * m) for m in words]
    wanted.append(("all-gather", 4 * shared))
    traffic = js.traffic(traced)
    assert sorted((c.op, c.bytes) for c in traffic[""]) == sorted(wanted)
    if workers > 1:  # in sum the last round is as dear as a swap, but for padding
        up, down = js.payload_bytes(traffic, workers)
        assert up + down == 2 * 4 * (sum(words) + shared * workers // 2)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_agrees_and_types_the_mean_as_the_same_everywhere(check_vma):
    x = gradients(8)
    made = reducer()
    mesh = jax.sharding.Mesh(jax.devices()[:8], (AXIS,))
    everyone, mine = PartitionSpec(), PartitionSpec(AXIS)

    def run(x):
        mean, left, _ = made.reduce(x[0], made.init(x[0]))
        return mean, left[None]

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=mine, out_specs=(everyone, mine), check_vma=check_vma
    )
    mean, left = jax.jit(mapped)(x)
    wanted, rest, _ = simulated(x, K)
    np.testing.assert_array_equal(mean, wanted)
    np.testing.assert_array_equal(left, rest)


def test_all_workers_of_pmap_have_the_same_bits():
    """Of sums that are not exact, and so depend on their order."""
    made = reducer()
    x = np.random.default_rng(2).normal(size=(8, N)).astype(np.float32)
    means = jax.pmap(lambda x: made.reduce(x, made.init(x))[0], AXIS)(x)
    for mean in np.asarray(means):
        np.testing.assert_array_equal(mean, means[0])


def test_numbers_of_workers_that_are_no_power_of_two_are_refused():
    match = r"`g_top_k\(\)`.*power of two, got 6.*`server\(\)`"
    with pytest.raises(ValueError, match=match):
        sparse(js.top_k(0.1), exchange=js.g_top_k(), workers=6).init(jnp.zeros(N))
    with pytest.raises(ValueError, match=match):
        compiled()(gradients(6))
