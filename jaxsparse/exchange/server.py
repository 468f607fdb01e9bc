"""The parameter server, its role shared out among the workers.

Every entry has an owner (``ownership.py``). One step:

1. *up*: each worker sends the owners what it selected of theirs: one ``all_to_all``;
2. the owner adds worker by worker, on top of what it held back before;
3. *down*: the owners send what was touched to all: one ``all_gather``, of a size that
   follows the largest union through a ladder of capacities.

With k entries up and u in the union, a worker sends and receives ``(N - 1)(k + u) / N``
entries, where `all_gather` moves ``(N - 1) k``: the smaller the union, the better.
A size limit keeps the largest entries of the union only; the server remembers the rest.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import codec as codec_lib
from ..arguments import check_number
from ..base import Exchange, ExchangeMetrics, Selected, WorkerLocal
from ..codec import Codec
from . import collectives, ownership, shards
from .tally import from_counts

# What a codec's rounding leaves is smaller, relative to the largest entry: it waits
# until the entry is touched again.
ROUNDING = 2.0**-7
# One rung of the ladder holds so many times what the one below holds.
STEP = 1.1


class ServerState(NamedTuple):
    """State of `server`."""

    # float32[rows]: what this worker, as a server, holds back; in units of the mean
    residual: WorkerLocal


def server(
    limit: float | None = None,
    *,
    ladder: bool = True,
    residual: bool = True,
    slack: float = 1.0,
    downlink: Codec | None = None,
) -> Exchange:
    """Exchanges by owners: k entries up, only their union down.

    Args:
      limit: at most ``limit * k`` entries come down, the largest of the union and of
        what was held back; None for no limit. It tells between 1 and the number of
        workers.
      ladder: agree on the largest union by one scalar and send the smallest message
        that holds it; without, always one for the largest possible union.
      residual: the server holds back what it did not send down, by limit until it is
        among the largest, by codec until the entry is touched again. Without, that is
        lost.
      slack: capacity of an uplink part beyond ``k / N`` entries, in standard
        deviations. What overflows stays in ``left``, the least important first, and is
        counted.
      downlink: codec of the way down; by default that of the way up.

    Returns:
      An `Exchange`. Its state depends on the number of workers; `reshard` lays it out
      for another.

    Raises:
      ValueError, TypeError: an argument out of its range; at ``init``, the number of
        workers is not known.

    Example:
      >>> import jaxsparse as js
      >>> reducer = js.sparse(js.top_k(0.5), js.server(), axis_name="w", num_workers=2)
      >>> step = lambda x: reducer.reduce(x, reducer.init(x))[0]
      >>> x = jnp.array([[4.0, 0.0, 0.0, 1.0], [6.0, 0.0, 2.0, 1.0]])
      >>> jax.jit(jax.vmap(step, axis_name="w", out_axes=None))(x)
      Array([5. , 0. , 1. , 0.5], dtype=float32)

    References:
      Wang, Liu, Wu, "Communication Usage Optimization of Gradient Sparsification with
      Aggregation", 2018 (the central server and its size limit).
    """
    if limit is not None:
        check_number(
            "server(limit=...)",
            limit,
            "be positive and finite",
            lambda x: 0 < x < math.inf,
            static=True,
        )
    check_number(
        "server(slack=...)",
        slack,
        "be finite and not negative",
        lambda x: 0 <= x < math.inf,
        static=True,
    )
    if not isinstance(downlink, Codec | None):
        raise TypeError(
            "`server(downlink=...)` must be made by a call such as "
            f"`js.codec.bfloat16()`, got {downlink!r}."
        )

    def init(n: int, k: int, num_workers: int | None) -> ServerState:
        del k
        if num_workers is None:
            raise ValueError(
                "`sparse(num_workers=...)` is needed with `server()`: its state is "
                "made outside the mapped axis and depends on the number of workers."
            )
        zeros = jnp.zeros(ownership.rows(n, num_workers), jnp.float32)
        return ServerState(
            WorkerLocal(zeros, reshard="shard", size=jnp.array(n, jnp.int32))
        )

    def send(
        x: Array,
        selected: Selected,
        state: ServerState,
        axis_name: str,
        codec: Codec,
    ) -> tuple[Array, Array, ServerState, ExchangeMetrics]:
        n, k = x.shape[0], selected.indices.shape[0]
        workers = collectives.axis_size(axis_name)
        size = ownership.rows(n, workers)
        places = part_capacity(k, n, workers, slack)
        most = down_capacity(k, n, workers, slack, limit)

        parts, missed = shards.by_owner(selected.indices, n, workers, places)
        missed = missed.at[0].add(selected.overflow)
        messages, sent = shards.write(x, parts, missed, workers, codec)
        left = x.at[parts].add(-sent, mode="drop")
        received = collectives.all_to_all(messages, axis_name)
        shard, tally = shards.add_up(
            received, state.residual.value, places, workers, codec
        )
        waiting = tally.hits > 0
        if limit is not None:  # what was held back competes at every step
            size_of = jnp.abs(shard)
            waiting |= size_of > jnp.max(size_of, initial=0.0) * ROUNDING
        listed = shards.largest(shard, waiting, most)

        listed = lax.sort(listed, is_stable=False)
        values = shard.at[listed].get(mode="fill", fill_value=0)

        def down(capacity: int):
            """Sends the first so many; what comes back has the size of the largest."""

            def run(listed, values, counts):
                message, sent = codec_lib.write(
                    listed[:capacity],
                    values[:capacity],
                    size,
                    downlink or codec,
                    header=counts,
                )
                messages = collectives.gather(message, axis_name)
                return shards.read(
                    messages, sent, size, capacity, most, downlink or codec
                )

            return run

        least = min(most, math.ceil(k / workers))
        rungs = capacities(least, most) if ladder else [most]
        rung = jnp.zeros((), jnp.int32)
        if len(rungs) > 1:
            used = collectives.maximum(jnp.sum(listed < size), axis_name)
            rung = jnp.sum(used > jnp.array(rungs[:-1]), dtype=jnp.int32)
        with jax.named_scope("ladder"):
            sent_down, received_down = lax.switch(
                rung,
                [down(capacity) for capacity in rungs],
                listed,
                values,
                tally.counts(),
            )
        held = shard.at[listed].add(-sent_down, mode="drop")
        mean, totals = shards.join(received_down, n, size)
        if not residual:
            held = jnp.zeros_like(held)
        metrics = from_counts(totals, workers, sent, rung)
        after = dataclasses.replace(state.residual, value=held)
        return mean, left, ServerState(after), metrics

    return Exchange(init, send)


def part_capacity(k: int, n: int, num_workers: int, slack: float) -> int:
    """Places for one owner's entries in the message of one worker."""
    share = k / num_workers
    spread = math.sqrt(share * (1 - 1 / num_workers))
    return min(k, ownership.rows(n, num_workers), math.ceil(share + slack * spread))


def down_capacity(
    k: int, n: int, num_workers: int, slack: float, limit: float | None
) -> int:
    """The most entries that one owner may send down."""
    most = num_workers * part_capacity(k, n, num_workers, slack)
    if limit is not None:
        # Exact in decimals: 1.1 * 100 is more than 110 in floating point.
        exact = Fraction(repr(float(limit))) * k / num_workers
        most = min(most, math.ceil(exact))
    return min(most, ownership.rows(n, num_workers))


def capacities(least: int, most: int) -> list[int]:
    """Rungs of the ladder: a tenth more each, from about ``least`` up to ``most``.

    >>> capacities(50, 100)
    [50, 54, 59, 64, 70, 76, 83, 91, 100]
    """
    rungs = [most]
    while (below := min(math.ceil(rungs[0] / STEP), rungs[0] - 1)) >= max(least, 1):
        rungs.insert(0, below)
    return rungs
