"""What a worker does in the server's role: parts in, one shard, parts out.

Array work only: ``server.py`` has the collectives. Counts travel in the headers of the
messages, so that metrics cost no collective of their own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import codec as codec_lib
from ..bits import compact
from ..codec import Codec
from ..largest import sizes
from . import collectives, ownership
from .tally import Tally

# Words of the header on the way down: `Tally.counts`.
COUNTS = 4


def by_owner(
    indices: Array, n: int, num_workers: int, places: int
) -> tuple[Array, Array]:
    """Deals a selection out to the owners, the most important entries first.

    Args:
      indices: int32[k], most important first, n in empty places.
      n: entries of the vector.
      num_workers: N.
      places: capacity of each part.

    Returns:
      * the parts, int32[N, places], each rising, n in empty places;
      * how many of each owner's entries found no place, int32[N].
    """
    owner = jnp.where(indices < n, ownership.owner(indices, num_workers), num_workers)
    order = jnp.argsort(owner, stable=True)  # keeps the order of importance
    dealt = owner[order]
    first = jnp.searchsorted(dealt, jnp.arange(num_workers + 1, dtype=dealt.dtype))
    rank = jnp.arange(dealt.shape[0], dtype=jnp.int32) - first[dealt]
    parts = jnp.full((num_workers, places), n, jnp.int32)
    parts = parts.at[dealt, rank].set(indices[order], mode="drop")
    return jnp.sort(parts, axis=1), jnp.maximum(jnp.diff(first) - places, 0)


def write(
    x: Array, parts: Array, missed: Array, num_workers: int, codec: Codec
) -> tuple[Array, Array]:
    """One message for each owner, and the values as they will be read there.

    Args:
      x: float32[n].
      parts: int32[N, places], from `by_owner`.
      missed: int32[N], counts for the headers.
      num_workers: N.
      codec: how values are written.
    """
    n, size = x.shape[0], ownership.rows(x.shape[0], num_workers)
    values = x.at[parts].get(mode="fill", fill_value=0)
    row = jnp.where(parts < n, parts // num_workers, size)
    return jax.vmap(
        lambda row, values, missed: codec_lib.write(
            row, values, size, codec, header=missed[None]
        )
    )(row, values, missed.astype(jnp.uint32))


def add_up(
    messages: Array, shard: Array, places: int, num_workers: int, codec: Codec
) -> tuple[Array, Tally]:
    """Adds the workers' parts to the shard, one after the other, each divided by N.

    Args:
      messages: uint32[N, words], of all workers.
      shard: float32[rows], what was held back.
      places: capacity of each part.
      num_workers: N.
      codec: how values are written.

    Returns:
      The shard, float32[rows], and the tally of what came in.
    """
    size = shard.shape[0]

    def add(carry, message):
        shard, tally = carry
        header, row, values = codec_lib.decode(message, size, places, codec, header=1)
        shard = shard.at[row].add(values / num_workers, mode="drop")
        return (shard, tally.add(row, missed=header[0])), None

    start = collectives.vary_like((shard, Tally.start(size, num_workers)), messages)
    return lax.scan(add, start, messages)[0]


def largest(shard: Array, waiting: Array, most: int) -> Array:
    """The rows that wait to be sent, at most so many, the largest if there are more.

    Returns:
      int32[most]; the length of the shard in empty places, which come last.
    """
    size = shard.shape[0]

    def by_size():
        scores = jnp.where(waiting, sizes(shard), -1.0)
        values, at = lax.top_k(scores, most)
        return jnp.where(values < 0, size, at).astype(jnp.int32)

    return lax.cond(
        jnp.sum(waiting, dtype=jnp.int32) > most,
        by_size,
        lambda: compact(waiting, most),
    )


def read(
    messages: Array, sent: Array, size: int, places: int, most: int, codec: Codec
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Decodes the messages of all owners into arrays of one size for all ``places``.

    Args:
      messages: uint32[N, words].
      sent: float32[places], this owner's values as the others read them.
      size: rows of a shard.
      places: in a message.
      most: what is returned is filled up to so many places.
      codec: how values are written.

    Returns:
      * ``sent``, float32[most];
      * headers, rows and values: uint32[N, COUNTS], int32[N, most], float32[N, most].
    """
    header, row, values = jax.vmap(
        lambda message: codec_lib.decode(message, size, places, codec, header=COUNTS)
    )(messages)
    extra = (0, most - places)
    row = jnp.pad(row, ((0, 0), extra), constant_values=size)
    return jnp.pad(sent, extra), (header, row, jnp.pad(values, ((0, 0), extra)))


def join(
    received: tuple[Array, Array, Array], n: int, size: int
) -> tuple[Array, Array]:
    """The mean from what `read` returned of all owners, and the sum of their counts."""
    header, row, values = received
    workers = jnp.arange(row.shape[0], dtype=jnp.int32)[:, None]
    at = jnp.where(row < size, ownership.index(row, workers, row.shape[0]), n)
    mean = jnp.zeros(n, jnp.float32).at[at].set(values, mode="drop")
    return mean, jnp.sum(header, axis=0, dtype=jnp.uint32)
