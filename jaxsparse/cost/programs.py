"""What the library's own exchanges move in a step, to the byte.

Unlike the models, these have the headers, the padding and the ladder of the programs:
``js.payload_bytes`` and ``js.link_bytes`` of a compiled step say the same. Arguments
are named as in the exchanges.
"""

from __future__ import annotations

import math

from .. import bits
from ..codec import Codec
from ..exchange import ownership, shards
from ..exchange.server import capacities, down_capacity, part_capacity
from .sizes import coded_bytes
from .steps import Step, check, deal, gather, reduce


def all_gather(
    num_workers: int,
    k: int,
    n: int,
    *,
    codec: Codec | None = None,
    agreed: bool = False,
) -> Step:
    """The step of ``js.all_gather()``: a word of header in each message.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      n: parameters.
      codec: how values are written; bfloat16 by default.
      agreed: all workers know the selection, as with ``js.random_k``.

    >>> all_gather(8, 1000, 1_000_000).link
    24528
    """
    check("all_gather", num_workers, k, n)
    message = coded_bytes(k, n, codec, header=1, agreed=agreed)
    return Step(num_workers, (gather(num_workers, message),))


def server(
    num_workers: int,
    k: int,
    union: float,
    n: int,
    *,
    busiest: int | None = None,
    codec: Codec | None = None,
    limit: float | None = None,
    ladder: bool = True,
    slack: float = 1.0,
    downlink: Codec | None = None,
) -> Step:
    """The step of ``js.server()``: padded parts up, a rung of the ladder down.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      union: u, entries sent by any worker; the limit not yet applied.
      n: parameters.
      busiest: entries of the union with the owner that has most: it decides on the
        rung. By default `expected_busiest`.
      codec: how values are written; bfloat16 by default.
      limit: as in ``js.server``.
      ladder: as in ``js.server``.
      slack: as in ``js.server``.
      downlink: as in ``js.server``.

    Raises:
      ValueError: an argument out of its range.

    >>> step = server(8, 1000, 4000, 1_000_000)
    >>> step.link, [transfer.link for transfer in step.transfers]
    (16163, [3360, 7, 12796])
    """
    check("server", num_workers, k, n, union)
    rows = ownership.rows(n, num_workers)
    places = part_capacity(k, n, num_workers, slack)
    most = down_capacity(k, n, num_workers, slack, limit)
    rungs = capacities(min(most, math.ceil(k / num_workers)), most)
    if not ladder:
        rungs = [most]
    used = expected_busiest(num_workers, union, n) if busiest is None else busiest
    capacity = next((rung for rung in rungs if rung >= used), most)
    part = coded_bytes(places, rows, codec, header=1)
    down = coded_bytes(capacity, rows, downlink or codec, header=shards.COUNTS)
    transfers = [deal(num_workers, part), gather(num_workers, down)]
    if len(rungs) > 1:
        transfers.insert(1, reduce(num_workers, 4))  # the scalar they agree on
    return Step(num_workers, tuple(transfers))


def expected_busiest(num_workers: int, union: float, n: float) -> float:
    """Entries of a union with the owner that has most of them, on average.

    ``u / N + (sqrt(2 ln N) - 0.6) sqrt(u / N (1 - u / n))``: the largest part where
    chance deals the entries out; a fit, to a third of the root for 2 to 32 workers.

    >>> [round(expected_busiest(N, 4000, 1_000_000)) for N in (1, 2, 4, 8, 16)]
    [4000, 2026, 1034, 532, 278]
    """
    share = union / num_workers
    if num_workers == 1:
        return share
    above = math.sqrt(2 * math.log(num_workers)) - 0.6
    return share + above * math.sqrt(share * max(1 - union / max(n, 1), 0))


def shared_support(num_workers: int, k: int, n: int, *, agreed: bool = False) -> Step:
    """The step of ``js.shared_support()``: indices and float32 sums, all-reduced.

    Args:
      num_workers: N.
      k: entries that the leader selects.
      n: parameters.
      agreed: all workers know the selection, as with ``js.random_k``.

    >>> shared_support(8, 1000, 1_000_000).up
    5500
    """
    check("shared_support", num_workers, k, n)
    transfers = [reduce(num_workers, 4 * k)]
    if not agreed:
        transfers.insert(0, reduce(num_workers, 4 * bits.index_words(k, n)))
    return Step(num_workers, tuple(transfers))
