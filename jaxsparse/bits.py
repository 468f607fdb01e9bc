"""Integers and sorted indices in as few bits as they need.

`pack` lays codes of equal width end to end in ``uint32`` words. `compact` finds the
set entries of a mask. `encode_indices` writes k sorted indices below n in the
Elias-Fano code: with l = floor(log2(n / k)),

* the l low bits of every index are packed as they are;
* the remaining high bits, a non-decreasing sequence of k numbers up to ``n >> l``, are
  kept in unary: entry i of the sequence sets bit ``(index_i >> l) + i`` of a bitmap of
  ``k + (n >> l)`` bits.

That is ``k (l + 1) + n / 2**l`` bits, about 2 + log2(n / k) per index, where the
entropy is 1.44 + log2(n / k). Where more than about a quarter of all indices are set, a
plain bitmap of n bits is smaller and takes its place. Which one is known from k and n.

All sizes are static, no scatter writes a place twice, and bit offsets are taken
modulo the repeat of the pattern, so that no product can overflow.

References:
  Peter Elias, "Efficient Storage and Retrieval by Content and Address of Static
  Files", Journal of the ACM 21(2), 1974. Robert Fano, "On the Number of Bits Required
  to Implement an Associative Memory", MIT Project MAC Memorandum 61, 1971.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

# Words whose bits are counted together when set bits are looked for: a larger row
# has fewer sums to scan, and a longer walk from the row's start to each bit.
_ROW = 4


def pack(codes: Array, width: int) -> Array:
    """Lays codes end to end, the lowest bits first; no bit is left between them.

    Args:
      codes: uint32[k], each below ``2**width``.
      width: bits per code, 1 to 32.

    Returns:
      uint32[ceil(k * width / 32)].

    Raises:
      ValueError: for a width outside 1 to 32.

    >>> [f"{word:08x}" for word in pack(jnp.array([1, 2, 3], jnp.uint32), 12).tolist()]
    ['03002001', '00000000']
    """
    size = codes.shape[0]
    period, words = _pattern(width)
    groups = -(-size // period)
    codes = jnp.pad(codes, (0, groups * period - size)).reshape(groups, 1, period)
    # From the first bit of each word to the first bit of each code, in one period.
    shape = (1, words, period)
    shift = width * lax.broadcasted_iota(jnp.int32, shape, 2)
    shift -= 32 * lax.broadcasted_iota(jnp.int32, shape, 1)
    # Codes share no bits, so their sum is their union; a shift past the word gives 0.
    left = codes << jnp.maximum(shift, 0).astype(jnp.uint32)
    right = codes >> jnp.maximum(-shift, 0).astype(jnp.uint32)
    packed = jnp.where(shift >= 0, left, right).sum(axis=2, dtype=jnp.uint32)
    return packed.reshape(-1)[: _ceil_words(size * width)]


def unpack(words: Array, count: int, width: int) -> Array:
    """The inverse of `pack`.

    Args:
      words: uint32[ceil(count * width / 32)].
      count: how many codes there are.
      width: bits per code, 1 to 32.

    Returns:
      uint32[count].

    Raises:
      ValueError: for a width outside 1 to 32.

    >>> unpack(pack(jnp.array([1, 2, 3], jnp.uint32), 12), 3, 12).tolist()
    [1, 2, 3]
    """
    period, repeat = _pattern(width)
    if count == 0:
        return jnp.zeros(0, jnp.uint32)
    place = lax.iota(jnp.uint32, count)
    bit = place % period * width
    word = place // period * repeat + bit // 32
    bit %= 32
    # A code ends in its first word or the next. What a clipped read returns is dropped.
    low = words.at[word].get(mode="clip") >> bit
    high = words.at[word + 1].get(mode="clip") << (32 - bit)
    return (low | high) & jnp.uint32(2**width - 1)


def compact(mask: Array, capacity: int, fill: int | None = None) -> Array:
    """Indices of the first set entries of a mask, in ascending order.

    One pass over the mask; the rest depends on ``n / 128`` and the capacity only.

    Args:
      mask: bool[n].
      capacity: places in the result.
      fill: what empty places hold; n by default.

    Returns:
      int32[capacity].

    >>> compact(jnp.array([False, True, True, False, True]), 4).tolist()
    [1, 2, 4, 5]
    """
    fill = mask.shape[0] if fill is None else fill
    words = pack(mask.astype(jnp.uint32), 1)
    # A negative fill survives as its two's complement.
    return positions(words, capacity, fill % 2**32).astype(jnp.int32)


def index_words(k: int, n: int) -> int:
    """Words that `encode_indices` takes for k indices below n.

    >>> index_words(1000, 1_000_000) * 32 / 1000  # bits per index; the entropy is 11.4
    12.0
    """
    low = _low_bits(k, n)
    if low is None:
        return _ceil_words(n)
    return _ceil_words(k * low) + _ceil_words(k + (n >> low))


def encode_indices(sorted_indices: Array, n: int) -> Array:
    """Writes sorted indices in the Elias-Fano code, or as a bitmap if that is smaller.

    Args:
      sorted_indices: int32[k], ascending and distinct below n; n, at the end, as often
        as there are empty places.
      n: what lies beyond the last index, at most ``2**31 - 2``.

    Returns:
      uint32[index_words(k, n)].

    >>> words = encode_indices(jnp.array([3, 7, 900, 1000]), 1000)
    >>> decode_indices(words, 4, 1000).tolist()
    [3, 7, 900, 1000]
    """
    k = sorted_indices.shape[0]
    indices = sorted_indices.astype(jnp.uint32)
    place = lax.iota(jnp.uint32, k)
    low = _low_bits(k, n)
    if low is None:
        return pack(_mark(jnp.where(indices < n, indices, n + place), n), 1)
    high = pack(_mark((indices >> low) + place, k + (n >> low)), 1)
    if low == 0:
        return high
    return jnp.concatenate([pack(indices & jnp.uint32(2**low - 1), low), high])


def decode_indices(words: Array, k: int, n: int) -> Array:
    """The inverse of `encode_indices`.

    Args:
      words: uint32[index_words(k, n)]; may come from anywhere.
      k: how many indices there are.
      n: the bound they were written with.

    Returns:
      int32[k], each in [0, n] whatever the words are.
    """
    low = _low_bits(k, n)
    if low is None:
        return jnp.minimum(positions(words, k, n), jnp.uint32(n)).astype(jnp.int32)
    lows = _ceil_words(k * low)
    place = lax.iota(jnp.uint32, k)
    high = positions(words[lows:], k, k + (n >> low)) - place
    # Clamped before the shift, which could overflow, and after it.
    indices = jnp.minimum(high, jnp.uint32(n >> low)) << jnp.uint32(low)
    if low:
        indices |= unpack(words[:lows], k, low)
    return jnp.minimum(indices, jnp.uint32(n)).astype(jnp.int32)


def _pattern(width: int) -> tuple[int, int]:
    """The codes and the words after which the layout of `pack` repeats."""
    if not 1 <= width <= 32:
        raise ValueError(f"`pack(width=...)` must lie in 1 to 32, got {width}.")
    divisor = math.gcd(width, 32)
    return 32 // divisor, width // divisor


def _ceil_words(bits: int) -> int:
    return -(-bits // 32)


def _low_bits(k: int, n: int) -> int | None:
    """Low bits per index, or None where a bitmap of n bits is at least as small."""
    if k == 0:
        return 0
    low = max((n // k).bit_length() - 1, 0)
    words = _ceil_words(k * low) + _ceil_words(k + (n >> low))
    return low if words < _ceil_words(n) else None


def _mark(positions: Array, size: int) -> Array:
    """uint32[size] with ones at strictly increasing positions; others are dropped."""
    return (
        jnp.zeros(size, jnp.uint32)
        .at[positions]
        .set(1, mode="drop", indices_are_sorted=True, unique_indices=True)
    )


def positions(words: Array, count: int, fill: int) -> Array:
    """Positions of the first ``count`` one bits, uint32; ``fill`` where there are none.

    >>> positions(jnp.array([5, 1], jnp.uint32), 4, 99).tolist()
    [0, 2, 32, 99]

    Rows that hold a bit start at distinct ranks. Each writes its number at its rank;
    the running maximum then tells every rank its row: no search is needed.
    """
    if count == 0:
        return jnp.zeros(0, jnp.uint32)
    rows = max(-(-words.shape[0] // _ROW), 1)
    words = jnp.pad(words, (0, rows * _ROW - words.shape[0]))
    ones = lax.population_count(words).astype(jnp.int32).reshape(rows, _ROW).sum(1)
    ends = jnp.cumsum(ones)
    starts = ends - ones
    number = lax.iota(jnp.int32, rows)
    row = lax.cummax(
        jnp.zeros(count, jnp.int32)
        .at[jnp.where(ones > 0, starts, count + number)]
        .set(number, mode="drop", unique_indices=True)
    )
    rank = lax.iota(jnp.int32, count)
    found = rank < ends[-1]
    word, rank = _walk(words, row * _ROW, rank - starts[row])
    position = word.astype(jnp.uint32) * 32 + _select(words[word], rank)
    return jnp.where(found, position, jnp.uint32(fill))


def _walk(words: Array, word: Array, rank: Array) -> tuple[Array, Array]:
    """From a row's first word to the word with the row's bit number ``rank``."""
    first, going = word, jnp.ones(word.shape, bool)
    for step in range(_ROW - 1):
        ones = lax.population_count(words[first + step]).astype(jnp.int32)
        going &= rank >= ones
        word += going.astype(jnp.int32)
        rank = jnp.where(going, rank - ones, rank)
    return word, rank


def _select(word: Array, rank: Array) -> Array:
    """The position, uint32, of bit number ``rank`` among the one bits of a word."""
    position = jnp.zeros(word.shape, jnp.uint32)
    for half in (16, 8, 4, 2, 1):
        part = (word >> position) & jnp.uint32(2**half - 1)
        ones = lax.population_count(part).astype(jnp.int32)
        beyond = rank >= ones
        rank = jnp.where(beyond, rank - ones, rank)
        position += beyond.astype(jnp.uint32) * half
    return position
