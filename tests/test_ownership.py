import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse.exchange import ownership

SIZES = [
    (1, 1),
    (7, 1),
    (24, 2),
    (97, 3),
    (64, 4),
    (101, 7),
    (1009, 8),
    (5, 8),
    (1, 16),
]
SIZES += [(1000, 13), (4099, 16), (300, 256)]
LARGEST = 2**31 - 2  # entries of a vector, see `tree.check_size`


@functools.cache
def placed(n, workers, start=0):
    """Entries, their owners and the entries found back from these, in NumPy."""
    entries = np.arange(start, n, dtype=np.int32)
    owner = ownership.owner(jnp.asarray(entries), workers)
    back = ownership.index(jnp.asarray(entries // workers), owner, workers)
    return entries, np.asarray(owner), np.asarray(back)


@pytest.mark.parametrize(("n", "workers"), SIZES)
def test_owner_and_row_are_a_bijection(n, workers):
    entries, owner, back = placed(n, workers)
    assert owner.dtype == back.dtype == np.int32
    assert owner.min() >= 0 and owner.max() < workers
    assert len({*zip(owner.tolist(), (entries // workers).tolist(), strict=True)}) == n
    np.testing.assert_array_equal(back, entries)
    assert ownership.rows(n, workers) == entries[-1] // workers + 1


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8, 61, 1000])
def test_indices_near_2_to_the_31(workers):
    entries, owner, back = placed(LARGEST, workers, LARGEST - 3000)
    assert owner.min() >= 0 and owner.max() < workers
    np.testing.assert_array_equal(back, entries)


@pytest.mark.parametrize(("n", "workers"), SIZES)
def test_each_row_of_neighbours_goes_to_all_workers(n, workers):
    _, owner, _ = placed(n, workers)
    for row in owner[: n // workers * workers].reshape(-1, workers):
        assert sorted(row) == [*range(workers)]


@pytest.mark.parametrize(("n", "workers"), SIZES)
def test_rising_rows_of_one_owner_are_rising_entries(n, workers):
    row = jnp.arange(n // workers, dtype=jnp.int32)
    for worker in range(workers):
        entries = np.asarray(ownership.index(row, jnp.int32(worker), workers))
        assert (np.diff(entries) > 0).all()


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("channels", [10, 16, 64, 100, 512])
def test_a_hot_output_channel_is_spread_evenly(channels, workers):
    """One column of a kernel, so every so manyeth entry, is large as a whole."""
    entries, owner, _ = placed(512 * 2000, workers)
    hot = entries % channels == 7
    share = np.bincount(owner[hot], minlength=workers) / hot.sum() * workers
    plain = np.bincount(entries[hot] % workers, minlength=workers) / hot.sum() * workers
    assert share.max() < 1.1
    if channels % workers == 0:
        assert plain.max() == workers  # all on one worker


@pytest.mark.parametrize(("n", "workers"), SIZES)
def test_shards_hold_every_entry_once_and_give_it_back(n, workers):
    x = jnp.arange(1.0, n + 1)
    shards = ownership.to_shards(x, workers)
    rows = ownership.rows(n, workers)
    assert shards.shape == (workers, rows) and shards.dtype == x.dtype
    found = np.asarray(shards)
    assert (found == 0).sum() == workers * rows - n  # zeros fill up
    np.testing.assert_array_equal(np.sort(found[found > 0]), x)
    np.testing.assert_array_equal(ownership.from_shards(shards, n), x)
    entries, owner, _ = placed(n, workers)
    np.testing.assert_array_equal(found[owner, entries // workers], x)


def test_a_vector_without_entries_has_shards_without_rows():
    shards = ownership.to_shards(jnp.zeros(0), 4)
    assert shards.shape == (4, 0)
    assert ownership.from_shards(shards, 0).shape == (0,)


def test_the_map_is_the_same_for_a_traced_worker():
    row = jnp.arange(20, dtype=jnp.int32)
    by_worker = jax.vmap(lambda w: ownership.index(row, w, 5))(jnp.arange(5))
    np.testing.assert_array_equal(np.sort(np.ravel(by_worker)), np.arange(100))
