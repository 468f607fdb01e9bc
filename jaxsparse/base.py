"""The vocabulary: what every method, memory and exchange is made of.

Three examples name the axes along which methods differ:

* DGC       = momentum correction + sampled top-k + all-gather of sparse messages
* PowerSGD  = error feedback + low rank + mean of the factors
* signSGD   = error feedback + one bit an entry + all-gather of packed signs

A *memory* (``memory.py``) decides what is kept for later, a `Reducer` decides what
is sent and brings back the mean. Sparse reducers are themselves made of three parts:
a `Selection` says which entries, a codec (``codec.py``) says in how many bits, and an
`Exchange` says over which collective. Any of these can be swapped alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

PyTree = Any


class Reducer(NamedTuple):
    """Averages updates over the workers of a named axis, perhaps lossily.

    Called inside ``pmap``, ``shard_map`` or ``vmap`` with the axis bound:
    ``mean, left, state = reducer.reduce(updates, state)``.

    * ``mean`` is the same on every worker, bit for bit.
    * ``left`` is this worker's updates minus what this worker put into the mean: what
      a memory keeps. Summed over the workers, ``updates - left`` is ``N * mean``.
    * both have the structure, shapes and dtypes of ``updates``.

    Attributes:
      init: ``params -> state``. Called once, outside the mapped axis; arrays may be
        abstract. The state keeps one structure for ever.
      reduce: ``(updates, state) -> (mean, left, state)``.
    """

    init: Callable[[PyTree], PyTree]
    reduce: Callable[[PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


class Priority(NamedTuple):
    """Scores the entries of a flat float32 vector; the largest are selected first.

    Attributes:
      init: ``n -> state``; the same structure for every n.
      score: ``(state, x[n]) -> scores[n]``; only their magnitude counts.
      observe: ``(state, mean[n], sent[n]) -> state``, called after every exchange with
        the aggregated mean and what this worker put into it. State derived from
        ``sent`` differs between workers and must be wrapped in `WorkerLocal`.
      workers: the argument that gave it the number of workers, in call syntax, and
        that number, to be checked against the axis; None where it needs none.
    """

    init: Callable[[int], PyTree]
    score: Callable[[PyTree, Array], Array]
    observe: Callable[[PyTree, Array, Array], PyTree]
    workers: tuple[str, int] | None = None


class Selection(NamedTuple):
    """Chooses entries of a flat float32 vector. No collectives, no pytrees.

    Attributes:
      count: ``n -> k``: the static number of places in a selection, ``k <= n``.
      init: ``n -> state``, the same on all workers.
      select: ``(x[n], state) -> (indices[k], overflow)``: distinct int32 indices,
        the most important first, ``n`` in places left empty; ``overflow`` counts the
        entries that qualified and found no place (int32 scalar).
      observe: ``(state, mean[n], sent[n]) -> state``, called once a step after the
        exchange; see `Priority`.
      agreed: True where all workers choose the same indices without a message.
      workers: of its `Priority`.
    """

    count: Callable[[int], int]
    init: Callable[[int], PyTree]
    select: Callable[[Array, PyTree], tuple[Array, Array]]
    observe: Callable[[PyTree, Array, Array], PyTree]
    agreed: bool = False
    workers: tuple[str, int] | None = None


class Exchange(NamedTuple):
    """Moves the selected entries and averages them: the only place that communicates.

    Attributes:
      init: ``(n, k, num_workers) -> state``.
      send: ``(x[n], selected, state, axis_name, codec)
        -> (mean[n], left[n], state, metrics)``, with `Selected` as the choice and
        `ExchangeMetrics` as the last part.
    """

    init: Callable[[int, int, int | None], PyTree]
    send: Callable[..., tuple[Array, Array, PyTree, ExchangeMetrics]]


class Selected(NamedTuple):
    """A worker's choice, as handed from a `Selection` to an `Exchange`."""

    indices: Array  # shape=(k,), dtype=int32; n in empty places
    overflow: Array  # shape=(), dtype=int32; qualified, but found no place
    agreed: bool  # the same on all workers: the indices need not be sent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkerLocal:
    """Marks state that differs from worker to worker: residuals, momenta, shards.

    Attributes:
      value: any pytree.
      reshard: what a change of the number of workers conserves: ``"mean"`` over the
        workers (an update still owed) or ``"shard"`` (parts of one global vector);
        ``"inner"`` where the marks inside tell: any leaf may differ, as
        `local_leaves` finds out.
      size: of shards, the entries of the global vector, an int32 scalar: their shapes
        tell it up to what fills them up only. No static field, so that state has the
        same structure for every tree of parameters.
    """

    value: PyTree
    reshard: str = dataclasses.field(default="mean", metadata={"static": True})
    size: Array | None = None


@dataclasses.dataclass(frozen=True)
class AxisGroups:
    """Names a mapped axis by groups of its workers, each of which averages alone.

    Takes the place of an axis name. A group is ``size`` workers that are ``stride``
    apart; with strides 1 and G the same axis has hosts of G devices, and the devices
    that have the same place on their hosts.

    Attributes:
      axis: name of the mapped axis.
      num_workers: its size, a multiple of ``size * stride``.
      size: workers in a group.
      stride: from one of them to the next.
    """

    axis: str
    num_workers: int
    size: int
    stride: int

    @property
    def members(self) -> list[list[int]]:
        """The workers of each group, as ``axis_index_groups`` wants them.

        >>> AxisGroups("w", 4, size=2, stride=2).members
        [[0, 2], [1, 3]]
        """
        workers = range(self.num_workers)
        first = [i for i in workers if i // self.stride % self.size == 0]
        return [[i + j * self.stride for j in range(self.size)] for i in first]


class ExchangeMetrics(NamedTuple):
    """What one exchange measured; scalars, for which no collective is added.

    All but ``sent_norm`` are the same on every worker.
    """

    selected: Array  # float32; entries sent, mean over the workers
    aggregated: Array  # int32; entries in the union of what the workers sent
    overlap: Array  # float32; workers that sent an entry, mean over the union
    common: Array  # float32; entries that two workers both sent, mean over the pairs
    overflow: Array  # float32; entries that found no place, mean over the workers
    rung: Array  # int32; rung of the capacity ladder, 0 where there is none
    sent_norm: WorkerLocal  # float32; Euclidean norm of what this worker sent
