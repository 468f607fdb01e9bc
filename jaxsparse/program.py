"""A program seen as its collectives: what always runs, and what its conditionals hold.

Compiled programs (``hlo.py``) and jaxprs (``jaxpr.py``) are read into the same small
tree, and only `branch_paths` knows how its branches are named. So that both readers
give the same names, they also share `innermost_scope`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias


class Collective(NamedTuple):
    """One array that one worker brings to one collective.

    Attributes:
      op: HLO spelling: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``,
        ``"all-to-all"``, ``"collective-permute"``.
      dtype: NumPy spelling: ``"uint32"``, ``"bfloat16"``, ...
      bytes: of the operand, on one worker.
      times: how often it runs per step, loops counted.
    """

    op: str
    dtype: str
    bytes: int
    times: int


class Conditional(NamedTuple):
    """A ``lax.cond`` (false is branch 0) or ``lax.switch`` with collectives in it.

    Attributes:
      label: the innermost named scope around it, ``"cond"`` where there is none.
      branches: what each branch runs.
    """

    label: str
    branches: list[list[Node]]


Node: TypeAlias = "Collective | Conditional"


def branch_paths(nodes: list[Node]) -> dict[str, list[Collective]]:
    """Lists collectives by the branches that lead to them.

    Conditionals that share a label at the same place are told apart by a suffix:
    ``phases``, ``phases.1``. They are numbered in the order of what they send and not
    of where they stand, because XLA reorders conditionals that are independent.

    Example:
      >>> gather = Collective("all-gather", "uint32", 8, 1)
      >>> branch_paths([gather, Conditional("finite", [[], [gather]])])
      {'': [Collective(op='all-gather', dtype='uint32', bytes=8, times=1)],
       'finite[0]': [],
       'finite[1]': [Collective(op='all-gather', dtype='uint32', bytes=8, times=1)]}
    """
    # Sorted, since the order in a schedule means nothing: equal traffic, equal dicts.
    paths = {"": sorted(node for node in nodes if isinstance(node, Collective))}
    conditionals = [
        (node.label, [branch_paths(branch) for branch in node.branches])
        for node in nodes
        if isinstance(node, Conditional)
    ]
    conditionals.sort(key=lambda c: (c[0], [sorted(branch.items()) for branch in c[1]]))
    names: set[str] = set()
    for label, branches in conditionals:
        name, suffix = label, 0
        while name in names:
            suffix += 1
            name = f"{label}.{suffix}"
        names.add(name)
        for index, branch in enumerate(branches):
            for path, collectives in branch.items():
                paths[f"{name}[{index}]" + ("/" + path if path else "")] = collectives
    return paths


def unresolved_loop(loop: str, nodes: list[Node]) -> ValueError:
    """The error for collectives in a loop of unknown length."""
    ops = ", ".join(sorted({collective.op for collective in _collectives(nodes)}))
    return ValueError(
        f"{ops} in {loop}, whose number of iterations is not known before it runs: "
        "the bytes of a step have no fixed number. Use `lax.scan`, `lax.fori_loop` "
        "with constant bounds, or move the collective out of the loop."
    )


def _collectives(nodes: list[Node]) -> Iterator[Collective]:
    for node in nodes:
        if isinstance(node, Collective):
            yield node
        else:
            for branch in node.branches:
                yield from _collectives(branch)


# What lowering adds to a name: primitives with a body, and the parts of their bodies.
# Dropped from the name stacks of jaxprs too, so that both readers agree.
_STRUCTURE = re.compile(
    r"shard_map|while|body|cond|closed_call|eval_jaxpr|core_call|branch_\d+_fun"
    r"|checkpoint|remat2?|rematted_computation|custom_(jvp|vjp|vmap)_call"
)


def innermost_scope(name: str) -> str:
    """The innermost ``jax.named_scope`` in a name stack, ``""`` where there is none.

    Names of jitted functions are not scopes; transformations wrap scopes.

    Example:
      >>> innermost_scope("jit(step)/shard_map/transpose(jvp(phases))/jit(f)/cond")
      'phases'
    """
    for part in reversed(name.split("/")):
        scope = part.rstrip(")").rpartition("(")[2]
        if scope and "jit(" not in part and not _STRUCTURE.fullmatch(scope):
            return scope
    return ""
