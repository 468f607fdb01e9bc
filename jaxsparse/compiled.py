"""Reads the collectives of a compiled program."""

from __future__ import annotations

import re

from .hlo import Computation, Instruction, arrays, parse
from .program import Collective, Conditional, Node, innermost_scope, unresolved_loop

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


def read_compiled(text: str) -> list[Node]:
    """Lists what a compiled program sends, following it from its entry.

    Args:
      text: ``jitted.lower(...).compile().as_text()``, HLO.

    Returns:
      The collectives, and the conditionals that hold some.

    Raises:
      ValueError: no HLO (what was lowered has still to be compiled); a collective in
        a loop of unknown length.

    Example:
      >>> read_compiled('''
      ... ENTRY %main (x: u32[8]) -> u32[4,8] {
      ...   %x = u32[8]{0} parameter(0)
      ...   ROOT %y = u32[4,8]{1,0} all-gather(%x), dimensions={0}
      ... }''')
      [Collective(op='all-gather', dtype='uint32', bytes=32, times=1)]
    """
    program, entry = parse(text)
    if not entry:
        raise ValueError(
            "`traffic(program)` found no ENTRY computation in the program's text. "
            "Compile what was lowered: `jitted.lower(...).compile()`."
        )
    return _read(program, entry, "", 1)


def _read(
    program: dict[str, Computation], name: str, scope: str, times: int
) -> list[Node]:
    """What one computation sends that runs ``times`` times inside a named scope."""
    computation = program[name]
    nodes: list[Node] = []
    for line in computation.values():
        inner = _scope(line) or scope
        if line.op.removesuffix("-start") in _COLLECTIVES:
            nodes += _read_collective(computation, line, times)
        elif line.op == "conditional":
            branches = [_read(program, b, "", times) for b in _branches(line)]
            if any(branches):
                nodes.append(Conditional(inner or "cond", branches))
        elif line.op == "while":
            (body,), (condition,) = line.called("body"), line.called("condition")
            count = _trip_count(program, computation, line)
            runs = times * (count or 0)
            loop = _read(program, body, inner, runs)
            loop += _read(program, condition, inner, runs + times)
            if loop and count is None:
                raise unresolved_loop(f"the loop `{line.name}` (scope {inner!r})", loop)
            nodes += loop
        elif not line.op.endswith(("-update", "-done")):  # their -start was counted
            for callee in line.called("calls", "to_apply", "called_computations"):
                nodes += _read(program, callee, inner, times)
    return nodes


def _scope(line: Instruction) -> str:
    # Scopes before the last branch name its conditional, not what is in the branch.
    # In calls that were not inlined names are relative: the caller's scope holds.
    name = line.attribute(r'op_name="((?:[^"\\]|\\.)*)"')
    return innermost_scope(re.split(r"\bbranch_\d+_fun\b", name)[-1])


def _branches(conditional: Instruction) -> list[str]:
    """Names of the branches; of a predicate's branches, false is the first."""
    return conditional.called("branch_computations") or conditional.called(
        "false_computation"
    ) + conditional.called("true_computation")


def _read_collective(
    computation: Computation, line: Instruction, times: int
) -> list[Collective]:
    """One entry for each operand: XLA combines small collectives into one."""
    op = line.op.removesuffix("-start")
    found = [array for name in line.inputs for array in arrays(computation[name].shape)]
    if op == "all-to-all":  # here operands are the parts for each receiver
        parts: dict[str, int] = {}
        for dtype, size in found:
            parts[dtype] = parts.get(dtype, 0) + size
        found = list(parts.items())
    return [Collective(op, dtype, size, times) for dtype, size in found if size]


def _trip_count(
    program: dict[str, Computation], caller: Computation, loop: Instruction
) -> int | None:
    """How often a loop runs, None where it is not known."""
    if known := loop.attribute(r"known_trip_count\W+n\W+(\d+)"):
        return int(known)
    # XLA's optimiser notes the count. Before it, the loops of `lax.scan` can be read:
    # element i of the carry starts at a constant, is added a constant to, and compared.
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    test, carry = _root(program[condition]), _root(program[body])
    start = caller[loop.inputs[0]]
    if test.op != "compare" or "direction=LT" not in test.attributes:
        return None
    index = _carried(program[condition], test.inputs[0])
    if index is None or carry.op != "tuple" or start.op != "tuple":
        return None
    add = program[body][carry.inputs[index]]
    if add.op != "add" or _carried(program[body], add.inputs[0]) != index:
        return None
    first = _constant(caller, start.inputs[index])
    step = _constant(program[body], add.inputs[1])
    limit = _constant(program[condition], test.inputs[1])
    if first is None or limit is None or not step or step < 0:
        return None
    return max(0, -((first - limit) // step))


def _root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.root)


def _carried(computation: Computation, name: str) -> int | None:
    """Which element of the computation's parameter this is, None for anything else."""
    line = computation[name]
    index = line.attribute(r"\bindex=(\d+)")
    from_parameter = index and computation[line.inputs[0]].op == "parameter"
    return int(index) if from_parameter else None


def _constant(computation: Computation, name: str) -> int | None:
    line = computation[name]
    if line.op == "copy":
        return _constant(computation, line.inputs[0])
    whole = line.op == "constant" and re.fullmatch(r"-?\d+", line.operands)
    return int(line.operands) if whole else None
