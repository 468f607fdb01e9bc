"""How many bytes a step sends, read off the program and not off a formula.

Two questions, two columns, never mixed:

* *payload*: what the method needs to say and to hear (`payload_bytes`);
* *link traffic*: what the collective's algorithm moves over a worker's link for that
  (`link_bytes`).

Both count on the host in Python ints: a counter on the device overflows at 2 GB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend import core

from .arguments import check_axis_name, check_positive_int
from .base import AxisGroups
from .compiled import read_compiled
from .jaxpr import read_jaxpr
from .program import Collective, branch_paths

_Traffic = dict[str, list[Collective]]


def traffic(program: Any, *, axis_name: str | AxisGroups | None = None) -> _Traffic:
    """Lists the collectives of a program by the branches that lead to them.

    A key is a path of branches: ``""`` for what always runs, ``"finite[1]"`` for what
    runs where ``lax.cond`` under ``jax.named_scope("finite")`` finds true,
    ``"finite[1]/phases[2]"`` for a ``lax.switch`` in that branch. Without a scope the
    label is ``cond``; scopes outside a conditional do not name what is in its branches.
    Conditionals with the same label and place become ``phases``, ``phases.1``, numbered
    by what they send. Branches of a conditional without any collective are left out;
    if one branch has a collective, all are listed.

    A compiled program is the truth and a jaxpr the intention. Where they differ, a
    collective is dead, duplicated or widened: XLA:CPU runs bfloat16 collectives in
    float32, which is why messages are bit-cast to unsigned integers. Under
    ``vmap(axis_name=...)`` nothing is sent.

    Args:
      program: a compiled executable, ``jitted.lower(...).compile()``, of ``jit`` or
        ``pmap``; or a jaxpr, ``jax.make_jaxpr(f, axis_env=[("workers", 8)])(...)``.
      axis_name: lists only what goes over this axis, or in these groups of one
        (`axis_groups`), alone or with others; for a jaxpr, which has the names.

    Returns:
      ``{path: [Collective(op, dtype, bytes, times), ...]}``, sorted, with bytes of the
      operand on one worker; ``{"": []}`` if nothing is sent. Of a mesh with several
      axes the collectives over all of them are listed, unless one is named.

    Raises:
      ValueError: a collective in a loop whose length is not known before it runs (in a
        jaxpr, in any ``lax.while_loop``); a lowered program that is not compiled;
        ``axis_name`` for a compiled program.
      TypeError: neither a program nor a jaxpr.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> def step(x, finite):
      ...     total = jax.lax.psum(x, "workers")
      ...     with jax.named_scope("finite"):
      ...         gather = lambda x: jax.lax.all_gather(x, "workers").sum(0)
      ...         return jax.lax.cond(finite, gather, lambda x: x, total)
      >>> jaxpr = jax.make_jaxpr(step, axis_env=[("workers", 8)])(jnp.ones(4), True)
      >>> for path, collectives in traffic(jaxpr).items():
      ...     print(repr(path), [tuple(collective) for collective in collectives])
      '' [('all-reduce', 'float32', 16, 1)]
      'finite[0]' []
      'finite[1]' [('all-gather', 'float32', 16, 1)]
    """
    if axis_name is not None:
        check_axis_name("traffic(axis_name=...)", axis_name)
    if hasattr(program, "as_text"):
        if axis_name is not None:
            raise ValueError(
                f"`traffic(axis_name=...)` got {axis_name!r} for a compiled program, "
                "which has no names of axes. Pass the jaxpr, "
                "`jax.make_jaxpr(step, axis_env=[...])(...)`."
            )
        return branch_paths(read_compiled(program.as_text()))
    if isinstance(program, (core.Jaxpr, core.ClosedJaxpr)):
        return branch_paths(read_jaxpr(program, axis_name=axis_name))
    raise TypeError(
        "`traffic(program)` must be a compiled executable or a jaxpr, got "
        f"{type(program).__name__}. Pass `jitted.lower(...).compile()`."
    )


def payload_bytes(
    traffic: _Traffic, num_workers: int, **branches: int
) -> tuple[int, int]:
    """What one worker has to say and has to hear in one step.

    For B bytes on each of N workers:

    ==================  ==============  ==============
    collective          up              down
    ==================  ==============  ==============
    all-reduce          B               B
    all-gather          B               (N - 1) B
    reduce-scatter      B               B / N
    all-to-all          (N - 1) / N B   (N - 1) / N B
    collective-permute  B               B
    ==================  ==============  ==============

    This is no link traffic (`link_bytes`); the two are not to be added or compared.

    Args:
      traffic: from `traffic`.
      num_workers: N.
      **branches: the branch taken for each label on the way, as ``phases=2, finite=1``
        (false is 0, true is 1). ``phases`` also stands for ``phases.1``, unless that is
        given itself. Labels that the program lacks are ignored, so that one call serves
        many methods.

    Returns:
      Bytes up and down; fractions are rounded up, collective by collective.

    Raises:
      ValueError: a label is missing or its index too large (the error lists what is
        needed); a collective that the table lacks.

    Example:
      >>> gather = Collective("all-gather", "uint32", 100, times=1)
      >>> step = {"": [gather], "phases[0]": [], "phases[1]": [gather]}
      >>> payload_bytes(step, 8, phases=1)
      (200, 1400)
    """
    up = down = 0
    for collective, cost in _costs(traffic, num_workers, branches):
        up += cost.up * collective.times
        down += cost.down * collective.times
    return up, down


def link_bytes(traffic: _Traffic, num_workers: int, **branches: int) -> int:
    """What one worker sends on its link in one step, with ring algorithms.

    For B bytes on each of N workers: all-reduce 2 (N - 1) / N B, all-gather (N - 1) B,
    reduce-scatter and all-to-all (N - 1) / N B, collective-permute B. A worker receives
    as much. This is no payload (`payload_bytes`): an all-gather's message goes round
    N - 1 links, and each of them counts it.

    Args:
      traffic: from `traffic`.
      num_workers: N.
      **branches: as for `payload_bytes`.

    Returns:
      Bytes, without the headers of packets; fractions are rounded up.

    Raises:
      ValueError: as for `payload_bytes`.

    Example:
      >>> link_bytes({"": [Collective("all-reduce", "float32", 100, times=3)]}, 4)
      450
    """
    costs = _costs(traffic, num_workers, branches)
    return sum(cost.link * collective.times for collective, cost in costs)


class _Cost(NamedTuple):
    """Bytes of one worker for one collective."""

    up: int
    down: int
    link: int


def _cost(op: str, size: int, n: int) -> _Cost:
    others = _ceil(size * (n - 1), n)
    match op:
        case "all-reduce":
            return _Cost(size, size, _ceil(2 * size * (n - 1), n))
        case "all-gather":
            return _Cost(size, size * (n - 1), size * (n - 1))
        case "reduce-scatter":
            return _Cost(size, _ceil(size, n), others)
        case "all-to-all":
            return _Cost(others, others, others)
        case "collective-permute":
            return _Cost(size, size, size)
    raise ValueError(f"It is not known what a worker sends in a {op}.")


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _costs(
    traffic: _Traffic, num_workers: int, branches: dict[str, int]
) -> Iterator[tuple[Collective, _Cost]]:
    n = check_positive_int("num_workers", num_workers)
    for collective in _taken(traffic, branches):
        yield collective, _cost(collective.op, collective.bytes, n)


def _taken(traffic: _Traffic, branches: dict[str, int]) -> list[Collective]:
    """The collectives on paths that agree with the branches given."""
    taken: list[Collective] = []
    reached: dict[str, int | None] = {}  # conditionals, and the branch given for each
    sizes: dict[str, int] = {}
    for path, collectives in traffic.items():
        agrees = True
        for component in re.finditer(r"([^/]*)\[(\d+)\](?:/|$)", path):
            label, index = component[1], int(component[2])
            conditional = path[: component.end(1)]
            sizes[conditional] = max(sizes.get(conditional, 0), index + 1)
            if agrees:
                alias = re.sub(r"\.\d+$", "", label)
                given = branches.get(label, branches.get(alias))
                reached[conditional] = given
                agrees = given == index
        taken += collectives if agrees else []
    wrong = [
        f"{conditional.rpartition('/')[2]}=0..{sizes[conditional] - 1}"
        for conditional, given in reached.items()
        if given not in range(sizes[conditional])
    ]
    if wrong:
        raise ValueError(
            f"Which branches are taken? Give {', '.join(wrong)} as keyword arguments, "
            f"got {branches}."
        )
    return taken
