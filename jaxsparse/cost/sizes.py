"""Bytes of a message of m of n entries, by different ways to say which they are.

All take ``(m, n, codec)`` and code values alike, as bfloat16 by default: they differ in
the indices only. ``m`` may be a mean, such as a union over many steps.

>>> for size in (coded_bytes, ideal_bytes, int32_bytes, bitmap_bytes, dense_bytes):
...     print(f"{size.__name__:12} {size(1000, 1_000_000):9.0f}")
coded_bytes       3500
ideal_bytes       3425
int32_bytes       6000
bitmap_bytes    127000
dense_bytes    2000000
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from .. import codec as codec_lib
from ..codec import Codec

# (m, n) -> what m of n entries take.
Size: TypeAlias = Callable[[float, float], float]


def entries(m: float, n: float, codec: Codec | None = None) -> float:
    """``m``: one entry is the unit, indices and values are not looked into."""
    del n, codec
    return m


def coded_bytes(
    m: float,
    n: float,
    codec: Codec | None = None,
    *,
    header: int = 0,
    agreed: bool = False,
) -> int:
    """The library's own message: Elias-Fano or a bitmap, whole words (``codec.py``).

    Args:
      m: entries; rounded up, for a message has room for whole entries.
      n: entries of the vector; rounded up.
      codec: how values are written.
      header: words of counters before the indices.
      agreed: the receivers know the indices, which are not sent.
    """
    codec = codec_lib.bfloat16() if codec is None else codec
    m, n = math.ceil(m), math.ceil(n)
    return 4 * codec_lib.message_words(n, m, codec, agreed=agreed, header=header)


def ideal_bytes(m: float, n: float, codec: Codec | None = None) -> float:
    """Indices at the entropy of a random choice, ``log2 binomial(n, m)`` bits.

    No code does better without knowing which entries are likely.
    """
    ways = math.lgamma(n + 1) - math.lgamma(m + 1) - math.lgamma(n - m + 1)
    return ways / math.log(2) / 8 + _values(m, codec)


def int32_bytes(m: float, n: float, codec: Codec | None = None) -> float:
    """Each index as an int32: ``4 m`` bytes and the values."""
    del n
    return 4 * m + _values(m, codec)


def bitmap_bytes(m: float, n: float, codec: Codec | None = None) -> float:
    """A bit for every entry, set or not: ``n / 8`` bytes and the values."""
    return n / 8 + _values(m, codec)


def dense_bytes(m: float, n: float, codec: Codec | None = None) -> float:
    """The values of all n entries, whatever m is."""
    del m
    return _values(n, codec)


def smallest_bytes(m: float, n: float, codec: Codec | None = None) -> float:
    """The least of int32 indices, entropy, bitmap and dense.

    >>> from jaxsparse.codec import float32
    >>> smallest_bytes(10, 100, float32()), smallest_bytes(100, 100, float32())
    (45.5, 400.0)
    """
    ways = (int32_bytes, ideal_bytes, bitmap_bytes, dense_bytes)
    return min(way(m, n, codec) for way in ways)


def _values(m: float, codec: Codec | None) -> float:
    """Bytes of m values and their scales."""
    codec = codec_lib.bfloat16() if codec is None else codec
    return m * codec.width / 8 + 4 * codec.num_scales(math.ceil(m))
