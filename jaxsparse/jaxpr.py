"""Reads the collectives of a jaxpr."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from .base import AxisGroups
from .program import Collective, Conditional, Node, innermost_scope, unresolved_loop

# Primitives by the HLO that they become. Casts between varying and invariant
# (`pvary`, `pcast`) move no data.
_HLO_OPS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
    "ragged_all_to_all": "ragged-all-to-all",
}
# What `psum_invariant`, `unreduced_psum`, `psum2`, `psum_start`, ... have beside that.
_VARIANT = re.compile(r"^unreduced_|_invariant|_reduced|_dynamic|_start$|2$")


def read_jaxpr(
    jaxpr: core.Jaxpr | core.ClosedJaxpr,
    scope: str = "",
    times: int = 1,
    axis_name: str | AxisGroups | None = None,
) -> list[Node]:
    """Lists what a jaxpr and all jaxprs inside it send.

    Dead equations count too: nothing has been optimised yet.

    Args:
      jaxpr: traced with the worker axis bound.
      scope: the named scope around it.
      times: how often it runs.
      axis_name: only what goes over this axis; all axes for None.

    Returns:
      The collectives, and the conditionals that hold some.

    Raises:
      ValueError: a collective in a ``lax.while_loop``.

    Example:
      >>> import jax
      >>> f = lambda x: jax.lax.psum(x, "workers")
      >>> read_jaxpr(jax.make_jaxpr(f, axis_env=[("workers", 8)])(1.0))
      [Collective(op='all-reduce', dtype='float32', bytes=4, times=1)]
    """
    if isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    nodes: list[Node] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = innermost_scope(str(eqn.source_info.name_stack)) or scope
        if _VARIANT.sub("", name) in _HLO_OPS:
            if axis_name is None or _goes_over(eqn, axis_name):
                nodes += _read_collective(eqn, times)
        elif name == "cond":
            # Scopes outside a conditional name the conditional, not what is inside.
            branches = [
                read_jaxpr(b, "", times, axis_name) for b in eqn.params["branches"]
            ]
            if any(branches):
                nodes.append(Conditional(inner or "cond", branches))
        elif name == "while":
            body = [
                node
                for sub in _subjaxprs(eqn)
                for node in read_jaxpr(sub, inner, 1, axis_name)
            ]
            if body:
                raise unresolved_loop(f"a while loop (scope {inner!r})", body)
        else:
            runs = times * eqn.params["length"] if name == "scan" else times
            for sub in _subjaxprs(eqn):
                nodes += read_jaxpr(sub, inner, runs, axis_name)
    return nodes


def _read_collective(eqn: core.JaxprEqn, times: int) -> Iterator[Collective]:
    op = _HLO_OPS[_VARIANT.sub("", eqn.primitive.name)]
    if all(isinstance(axis, int) for axis in _axes(eqn)):
        return  # axes of a vmap are axes of the array: nothing is sent
    # A psum over array axes and workers adds up the array axes before it sends.
    for operand in eqn.outvars if op == "all-reduce" else eqn.invars:
        aval: Any = operand.aval
        if aval.size:
            size = aval.size * aval.dtype.itemsize
            yield Collective(op, str(aval.dtype), size, times)


def _axes(eqn: core.JaxprEqn) -> tuple:
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _goes_over(eqn: core.JaxprEqn, axis_name: str | AxisGroups) -> bool:
    if not isinstance(axis_name, AxisGroups):
        return axis_name in _axes(eqn)
    if axis_name.axis not in _axes(eqn):
        return False
    members = axis_name.members
    if "perm" in eqn.params:  # of the whole axis: does it lead from one to another?
        pairs = [set(pair) for pair in eqn.params["perm"]]
        return any(
            len(pair) > 1 and pair <= set(group) for group in members for pair in pairs
        )
    groups = eqn.params.get("axis_index_groups")
    return groups is None or [list(group) for group in groups] == members


def _subjaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
                yield item
