"""Orders: in which order and with which signs a code sees the chosen values.

Values in the order of their coordinates have random signs, and no code can be learned
for them (NMSE 0.8 to 1). Two ways out, each with its price in bits an entry:

==============  ===================================  ================================
order           the code sees                        bits an entry, k of n
==============  ===================================  ================================
`signed`        a rising curve: the paper's          log2 n: a list, not a set
`flipped`       magnitudes, by coordinate            2 + log2(n / k), and 1 of sign
`coordinate`    the values, by coordinate            2 + log2(n / k)
==============  ===================================  ================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .. import bits


class Order(NamedTuple):
    """How a support is laid out and written.

    Attributes:
      name: for error messages.
      words: ``(k, n) -> w``: words of a written support.
      arrange: ``(indices[k], values[k]) -> (indices[k], values[k], signs[k])``, in the
        order of the code; signs are 1 or -1. Empty places hold n and 0.
      write: ``(indices, signs, n) -> uint32[w]``, of what `arrange` returned.
      read: ``(words, k, n) -> (indices, signs)``, the inverse.
      mergeable: whether the supports of several workers can be merged.
    """

    name: str
    words: Callable[[int, int], int]
    arrange: Callable[[Array, Array], tuple[Array, Array, Array]]
    write: Callable[[Array, Array, int], Array]
    read: Callable[[Array, int, int], tuple[Array, Array]]
    mergeable: bool = True


def signed() -> Order:
    """Ascending by value, as the paper's authors have it."""

    def arrange(indices, values):
        # Empty places would lie between negative and positive values: to the end.
        empty = (values == 0).astype(jnp.int32)
        _, values, indices = lax.sort((empty, values, indices), num_keys=2)
        return indices, values, jnp.ones_like(values)

    def write(indices, signs, n):
        del signs
        return bits.pack(indices.astype(jnp.uint32), n.bit_length())

    def read(words, k, n):
        found = jnp.minimum(bits.unpack(words, k, n.bit_length()), jnp.uint32(n))
        return found.astype(jnp.int32), jnp.ones(k, jnp.float32)

    return Order(
        "signed",
        lambda k, n: -(-k * n.bit_length() // 32),
        arrange,
        write,
        read,
        mergeable=False,
    )


def coordinate() -> Order:
    """Ascending by coordinate: for codes that do not mind the signs."""

    def arrange(indices, values):
        indices, values = lax.sort((indices, values), num_keys=1)
        return indices, values, jnp.ones_like(values)

    def read(words, k, n):
        return bits.decode_indices(words, k, n), jnp.ones(k, jnp.float32)

    return Order(
        "coordinate",
        bits.index_words,
        arrange,
        lambda indices, signs, n: bits.encode_indices(indices, n),
        read,
    )


def flipped() -> Order:
    """Ascending by coordinate, each value times its sign, which goes along as a bit."""
    plain = coordinate()

    def arrange(indices, values):
        indices, values, _ = plain.arrange(indices, values)
        return indices, values, jnp.where(values < 0, -1.0, 1.0).astype(values.dtype)

    def write(indices, signs, n):
        negative = bits.pack((signs < 0).astype(jnp.uint32), 1)
        return jnp.concatenate([plain.write(indices, signs, n), negative])

    def read(words, k, n):
        split = bits.index_words(k, n)
        indices, _ = plain.read(words[:split], k, n)
        negative = bits.unpack(words[split:], k, 1)
        return indices, jnp.where(negative == 1, -1.0, 1.0)

    return Order(
        "flipped",
        lambda k, n: bits.index_words(k, n) + -(-k // 32),
        arrange,
        write,
        read,
    )


def merge(indices: Array, signs: Array, n: int) -> tuple[Array, Array]:
    """Several workers' supports as one, ascending; what is there twice only once.

    Of an entry that several workers brought the first one's sign holds.

    >>> indices, signs = merge(jnp.array([[1, 7], [4, 7]]), jnp.ones((2, 2)), 9)
    >>> indices.tolist()
    [1, 4, 7, 9]
    """
    indices, signs = lax.sort((indices.reshape(-1), signs.reshape(-1)), num_keys=1)
    again = jnp.concatenate([jnp.zeros(1, bool), indices[1:] == indices[:-1]])
    indices, signs = lax.sort((jnp.where(again, n, indices), signs), num_keys=1)
    return indices, signs
