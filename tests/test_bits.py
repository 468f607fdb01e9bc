import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import bits

HUGE = 2**31 - 2  # the largest n there is
pack = jax.jit(bits.pack, static_argnums=1)
unpack = jax.jit(bits.unpack, static_argnums=(1, 2))
compact = jax.jit(bits.compact, static_argnums=(1, 2))
encode = jax.jit(bits.encode_indices, static_argnums=1)
decode = jax.jit(bits.decode_indices, static_argnums=(1, 2))


def to_words(bit_list) -> np.ndarray:
    """Bits, the lowest first, as little-endian 32-bit words."""
    padded = np.pad(np.asarray(bit_list, np.uint8), (0, -len(bit_list) % 32))
    return np.packbits(padded, bitorder="little").view("<u4")


def random_indices(rng, n, k, real) -> np.ndarray:
    """``real`` sorted distinct indices below n, then ``k - real`` times n."""
    chosen = np.full(k, n)
    chosen[:real] = np.sort(rng.choice(n, real, replace=False))
    return chosen.astype(np.int32)


def elias_fano(indices, n) -> np.ndarray:
    """Bit by bit, from the definition."""
    k = len(indices)
    low = int(math.log2(n // k)) if n >= k else 0
    lows = [index >> bit & 1 for index in indices for bit in range(low)]
    highs = [0] * (k + (n >> low))
    for place, index in enumerate(indices):
        highs[(index >> low) + place] = 1
    return np.concatenate([to_words(lows), to_words(highs)])


@pytest.mark.parametrize("width", [1, 3, 8, 9, 16, 31, 32])
@pytest.mark.parametrize("size", [1, 97])
def test_pack_is_contiguous_little_endian(width, size):
    codes = np.random.default_rng(width).integers(0, 2**width, size, dtype=np.uint32)
    as_bits = codes[:, None] >> np.arange(width, dtype=np.uint32) & 1
    words = pack(codes, width)
    np.testing.assert_array_equal(words, to_words(as_bits.reshape(-1)))
    unpacked = unpack(words, size, width)
    np.testing.assert_array_equal(unpacked, codes)
    assert words.dtype == unpacked.dtype == jnp.uint32


def test_pack_of_nothing():
    assert bits.pack(jnp.zeros(0, jnp.uint32), 7).shape == (0,)
    assert bits.unpack(jnp.zeros(0, jnp.uint32), 0, 7).shape == (0,)


def test_pack_up_to_two_to_the_32_bits():
    codes = jax.ShapeDtypeStruct((2**27,), jnp.uint32)
    for width in (31, 32):
        words = jax.eval_shape(functools.partial(bits.pack, width=width), codes)
        assert words.shape == (2**22 * width,)


@pytest.mark.parametrize("width", [0, 33, -1])
def test_pack_refuses_other_widths(width):
    with pytest.raises(ValueError, match=rf"width=.*got {width}\."):
        bits.pack(jnp.zeros(4, jnp.uint32), width)


@pytest.mark.parametrize("n", [1, 128, 10_007])
@pytest.mark.parametrize("capacity", [1, 300, 10_100])
def test_compact_is_nonzero(n, capacity):
    rng = np.random.default_rng(n)
    for density in (0, 1e-4, 1e-2, 0.3, 1):
        mask = rng.random(n) < density
        expected = np.full(capacity, n)
        found = np.flatnonzero(mask)[:capacity]
        expected[: found.size] = found
        np.testing.assert_array_equal(compact(mask, capacity), expected)


def test_compact_finds_lone_entries_anywhere():
    masks = jnp.eye(300, dtype=bool).at[7].set(False)
    found = jax.vmap(lambda mask: compact(mask, 2, -5))(masks)
    expected = np.where(np.arange(300) == 7, -5, np.arange(300))
    np.testing.assert_array_equal(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1], np.full(300, -5))


def test_compact_of_nothing():
    assert compact(jnp.ones(5, bool), 0).shape == (0,)
    assert compact(jnp.zeros(0, bool), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    "n, k", [(1, 1), (2, 1), (97, 5), (997, 97), (997, 249), (997, 997), (10_007, 10)]
)
def test_indices_round_trip(n, k):
    rng = np.random.default_rng(k)
    for real in {0, 1, k // 2, k}:
        indices = random_indices(rng, n, k, real)
        words = encode(indices, n)
        bitmap = to_words(np.isin(np.arange(n), indices))
        # The shorter of the two; a bitmap, which is simpler, where they are even.
        expected = min(bitmap, elias_fano(indices.tolist(), n), key=len)
        np.testing.assert_array_equal(words, expected)
        assert words.shape == (bits.index_words(k, n),)
        decoded = decode(words, k, n)
        np.testing.assert_array_equal(decoded, indices)
        assert decoded.dtype == jnp.int32


def test_indices_at_both_ends():
    ends = [np.r_[:100], np.r_[9_907:10_007], np.r_[:50, 9_957:10_007]]
    for indices in ends:
        words = encode(indices.astype(np.int32), 10_007)
        np.testing.assert_array_equal(decode(words, 100, 10_007), indices)


@pytest.mark.parametrize("k, n", [(0, 0), (0, 100), (3, 0)])
def test_indices_of_nothing(k, n):
    words = encode(jnp.full(k, n, jnp.int32), n)
    assert words.shape == (bits.index_words(k, n),)
    assert decode(words, k, n).tolist() == [n] * k


@pytest.mark.parametrize(
    "indices",
    [
        [0, 1, 2, HUGE - 2, HUGE - 1],
        [2**30 - 1, 2**30, HUGE - 1, HUGE, HUGE],
        [HUGE] * 5,
    ],
)
def test_indices_of_the_largest_vector(indices):
    words = encode(np.array(indices, np.int32), HUGE)
    assert words.shape == (bits.index_words(5, HUGE),)
    assert decode(words, 5, HUGE).tolist() == indices


@pytest.mark.parametrize("n, k", [(97, 5), (97, 60), (HUGE, 1), (HUGE, 5)])
def test_no_words_decode_outside(n, k):
    size = bits.index_words(k, n)
    words = np.random.default_rng(k).integers(0, 2**32, (20, size), dtype=np.uint32)
    words[:3] = np.array([[0], [2**32 - 1], [2**31]])
    indices = jax.vmap(lambda row: decode(row, k, n))(words)
    assert (indices >= 0).all() and (indices <= n).all()


def test_vmap_and_scan_give_the_same_bits():
    rng = np.random.default_rng(0)
    batch = np.stack([random_indices(rng, 10_007, 100, real) for real in (100, 60, 0)])
    single = np.stack([encode(indices, 10_007) for indices in batch])
    batched = jax.vmap(lambda indices: encode(indices, 10_007))(batch)
    np.testing.assert_array_equal(batched, single)
    _, scanned = jax.lax.scan(
        lambda carry, words: (carry, decode(words, 100, 10_007)), 0, single
    )
    np.testing.assert_array_equal(scanned, batch)


@pytest.mark.parametrize(
    "density, overhead",
    [(1e-4, 1.06), (1e-3, 1.05), (1e-2, 1.07), (0.1, 1.13), (0.5, 1.01)],
)
def test_size_is_near_the_entropy(density, overhead):
    n = 25_557_032
    k = math.ceil(density * n)
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    entropy = ways / math.log(2)
    assert entropy <= 32 * bits.index_words(k, n) <= overhead * entropy


def test_size_is_never_above_a_bitmap():
    for n in (0, 1, 31, 97, 1000):
        for k in range(n + 1):
            assert bits.index_words(k, n) <= -(-n // 32) + 1
    assert bits.index_words(HUGE, HUGE) == 2**26
