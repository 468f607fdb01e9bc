"""A global top-k by merging pairs of lists, gTop-k: as many entries come out as go in.

In round r worker i swaps its list with worker ``i xor 2**r``; both add the two lists up
and keep the k entries of largest ``|sum|``. After ``log2 N`` rounds all have the same
list of k entries::

    L = C_i / N
    for r in 0 .. log2 N - 1:    L = top_k(L + L of worker (i xor 2**r))
    mean = L

An entry counts as sent if it stayed in the lists of all rounds on this worker's path;
otherwise it stays in ``left``, and its part is in no list further up: nothing is lost.

In the last round the two halves of the workers hold one list each, every worker of a
half the same. There each worker sends its share of the list, ``2 / N`` of it, to all:
an ``all_gather``, which makes the agreement on the result true by construction. For a
message of m words that is ``4 m (log2 N - 1 + 2 / N)`` bytes up and
``4 m (log2 N + 1 - 2 / N)`` down, and as many in sum as ``log2 N`` swaps.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .. import bits
from .. import codec as codec_lib
from ..base import Exchange, ExchangeMetrics, PyTree, Selected
from ..codec import Codec
from . import collectives
from .tally import from_counts


class Entries(NamedTuple):
    """A list of entries of a flat vector, by rising index; n in empty places."""

    indices: Array  # int32[k]
    values: Array  # float32[k]; the sum so far, in units of the mean
    hits: Array  # uint32[k]; workers whose part is in the sum


def g_top_k() -> Exchange:
    """Exchanges lists of k entries in ``log2 N`` rounds of pairwise merges.

    The aggregate has k entries at most, as with `shared_support`, and no worker leads;
    the traffic grows with ``log N``. The number of workers is a power of two.

    In the first round values are written by the codec, and its loss stays in ``left``.
    Sums travel as float32 from the second round on: rounding them again would lose what
    no worker could account for. A list of round r > 0 also has r bits an entry, which
    count the workers in the sum.

    In the metrics, what was merged away counts as overflow: ``selected``,
    ``aggregated`` and the overlap are of what is in the mean.

    Returns:
      An `Exchange`.

    Raises:
      ValueError: at ``init`` or in the step, N is not a power of two.

    Differences from the paper:
      There the merges are a tree to one worker, whose list is broadcast; here all
      workers merge, which takes half the rounds. The last one is an ``all_gather`` of
      parts of the lists. Indices are coded by Elias-Fano, values by the codec in the
      first round. The paper keeps a worker's values at indices that are not in the
      result; what was merged away in an early round, at an index that came in again by
      other workers' parts, is lost there and kept here.

    Example:
      >>> import jax, jaxsparse as js
      >>> reducer = js.sparse(js.top_k(0.5), js.g_top_k(), axis_name="w")
      >>> step = lambda x: reducer.reduce(x, reducer.init(x))[:2]
      >>> x = jnp.array([[4.0, 3.0, 0.0, 1.0], [-2.0, 0.0, 2.5, 1.0]])
      >>> mean, left = jax.jit(jax.vmap(step, axis_name="w", out_axes=(None, 0)))(x)
      >>> print(mean, left[1])
      [0.   1.5  1.25 0.  ] [-2.  0.  0.  1.]

    References:
      Shi, Wang, Zhao, Tang, Wang, Huang, Chu, "A Distributed Synchronous SGD Algorithm
      with Global Top-k Sparsification for Low Bandwidth Networks", 2019, arXiv
      1901.04359.
    """

    def init(n: int, k: int, num_workers: int | None) -> PyTree:
        del n, k
        if num_workers is not None:
            _check_power_of_two(num_workers)
        return ()

    def send(
        x: Array, selected: Selected, state: PyTree, axis_name: str, codec: Codec
    ) -> tuple[Array, Array, PyTree, ExchangeMetrics]:
        n, k = x.shape[0], selected.indices.shape[0]
        workers = collectives.axis_size(axis_name)
        _check_power_of_two(workers)
        message, own, sent = codec_lib.encode(
            x,
            selected.indices,
            codec,
            agreed=selected.agreed,
            header=_header(selected, n),
        )
        known = own if selected.agreed else None

        def read(message: Array) -> tuple[Array, Entries]:
            """The list of a group of workers, of one at first."""
            if group > 1:
                return _read_sums(message, n, k, group, known)
            header, indices, values = codec_lib.decode(
                message, n, k, codec, indices=known, header=1
            )
            hits = (indices < n).astype(jnp.uint32)
            return header, Entries(indices, values / workers, hits)

        counted, group = own < n, 1
        offered, entries = read(message)
        while 2 * group < workers:
            more, others = read(collectives.swap(message, group, axis_name))
            entries = _merged(entries, others, n)
            counted &= _is_among(own, entries.indices)
            offered, group = offered + more, 2 * group
            message = _write_sums(entries, offered, n, group, selected.agreed)
        # All workers of a half hold the same list now, and hear the parts of both.
        halves = collectives.gather_halves(message, axis_name)
        offered, entries = read(halves[0])
        for half in halves[1:]:  # none where there is one worker
            more, others = read(half)
            offered, entries = offered + more, _merged(entries, others, n)
        counted &= _is_among(own, entries.indices)

        sent = jnp.where(counted, sent, 0)
        left = x.at[own].add(-sent, mode="drop")
        mean = jnp.zeros(n, jnp.float32)
        mean = mean.at[entries.indices].set(entries.values, mode="drop")
        metrics = from_counts(_counts(entries, offered, n), workers, sent)
        return mean, left, state, metrics

    return Exchange(init, send)


def _check_power_of_two(workers: int) -> None:
    if workers & (workers - 1):
        raise ValueError(
            "`g_top_k()` merges pairs of workers: their number must be a power of two, "
            f"got {workers}. `server()` and `all_gather()` take any number."
        )


def _header(selected: Selected, n: int) -> Array:
    """How many entries wanted to be sent, uint32[1]."""
    found = jnp.sum(selected.indices < n, dtype=jnp.int32) + selected.overflow
    return found.astype(jnp.uint32)[None]


def _write_sums(
    entries: Entries, header: Array, n: int, group: int, agreed: bool
) -> Array:
    """A list of sums of so many workers: ``[message | hits, packed]``."""
    indices, values, hits = entries
    message, _ = codec_lib.write(
        indices, values, n, codec_lib.float32(), agreed=agreed, header=header
    )
    counts = jnp.where(indices < n, hits - 1, 0)
    return jnp.concatenate([message, bits.pack(counts, _width(group))])


def _read_sums(
    message: Array, n: int, k: int, group: int, known: Array | None
) -> tuple[Array, Entries]:
    """The inverse of `_write_sums`: the header and the list."""
    float32, agreed = codec_lib.float32(), known is not None
    words = codec_lib.message_words(n, k, float32, agreed=agreed, header=1)
    header, indices, values = codec_lib.decode(
        message[:words], n, k, float32, indices=known, header=1
    )
    counts = bits.unpack(message[words:], k, _width(group))
    return header, Entries(indices, values, jnp.where(indices < n, counts + 1, 0))


def _width(group: int) -> int:
    """Bits for a number of workers from 1 to ``group``, a power of two, less one."""
    return group.bit_length() - 1


def _merged(a: Entries, b: Entries, n: int) -> Entries:
    """The k largest of the sum of two lists; ties go to the lower index.

    It does not matter which list is which, as a sum of two does not depend on their
    order: both partners get the same bits.
    """
    k = a.indices.shape[0]
    joined = (jnp.concatenate(pair) for pair in zip(a, b, strict=True))
    indices, values, hits = lax.sort(tuple(joined), num_keys=1)
    # An entry of both lists now stands in two neighbouring places.
    twice = (indices[1:] == indices[:-1]) & (indices[1:] < n)
    first, second = jnp.append(twice, False), jnp.append(False, twice)
    values = jnp.where(first, values + jnp.roll(values, -1), values)
    hits = jnp.where(first, hits + jnp.roll(hits, -1), hits)
    indices = jnp.where(second, n, indices)
    scores = jnp.where(jnp.isnan(values), jnp.inf, jnp.abs(values))
    _, kept = lax.top_k(jnp.where(indices < n, scores, -1.0), k)
    return Entries(*lax.sort((indices[kept], values[kept], hits[kept]), num_keys=1))


def _is_among(indices: Array, rising: Array) -> Array:
    """Which of the indices are among others, which rise; bool[k]."""
    at = jnp.searchsorted(rising, indices)
    return rising.at[at].get(mode="fill", fill_value=-1) == indices


def _counts(entries: Entries, offered: Array, n: int) -> Array:
    """As `Tally.counts`: the union, what is in it, pairs, and what is not in it."""
    hits = jnp.where(entries.indices < n, entries.hits, 0)
    union, received = jnp.sum(hits > 0, dtype=jnp.uint32), jnp.sum(hits)
    pairs = jnp.sum(hits * hits - hits) // 2
    return jnp.stack([union, received, pairs, offered[0] - received])
