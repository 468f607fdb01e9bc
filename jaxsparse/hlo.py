"""The grammar of HLO text: computations, their instructions, shapes.

Nothing here knows what an instruction means; ``compiled.py`` does.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple, TypeAlias


class Instruction(NamedTuple):
    """One line of HLO: ``ROOT %name = shape op(operands), attributes``."""

    root: bool
    name: str
    shape: str
    op: str
    operands: str
    attributes: str

    @property
    def inputs(self) -> list[str]:
        """Names of the operands, which may be printed with shapes or without."""
        if "%" in self.operands:
            return re.findall(r"%([\w.\-]+)", self.operands)
        return re.findall(r"([\w.\-]+)(?:,|$)", self.operands)

    def attribute(self, pattern: str) -> str:
        """The group of a pattern in the attributes, ``""`` where there is none."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    def called(self, *keys: str) -> list[str]:
        """Names of the computations under any of these attributes."""
        key = rf"\b(?:{'|'.join(keys)})="
        found = re.findall(key + r"(?:\{([^}]*)\}|%?([\w.\-]+))", self.attributes)
        return re.findall(r"[\w.\-]+", " ".join(many or one for many, one in found))


Computation: TypeAlias = dict[str, Instruction]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)[ (].*\{$")
_INSTRUCTION = re.compile(
    r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\d\-]*)"
    # Shapes and layouts bring brackets into the operands, nested at most twice.
    r"\(((?:[^()]++|\((?:[^()]++|\([^()]*\))*+\))*+)\)(.*)"
)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Takes HLO text apart.

    Args:
      text: as printed by ``compiled.as_text()``.

    Returns:
      Instructions by computation and name, and the name of the entry computation,
      ``""`` where there is none.

    Example:
      >>> program, entry = parse('''
      ... ENTRY %main.1 (x: u32[8]) -> u32[8] {
      ...   %x = u32[8]{0} parameter(0)
      ...   ROOT %y = u32[8]{0} add(%x, %x), metadata={op_name="jit(f)/add"}
      ... }''')
      >>> entry, program[entry]["y"].op, program[entry]["y"].inputs
      ('main.1', 'add', ['x', 'x'])
    """
    program: dict[str, Computation] = {}
    entry = name = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            entry = name if header[1] else entry
            program[name] = {}
        elif name and (match := _INSTRUCTION.match(line)):
            root, *fields = match.groups()
            instruction = Instruction(bool(root), *fields)
            program[name][instruction.name] = instruction
    return program, entry


_ARRAY = re.compile(r"\b(pred|bf|[fsuc](?=\d))(\d*)(\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_KINDS = {"pred": "bool", "bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
_KINDS["c"] = "complex"


def arrays(shape: str) -> list[tuple[str, int]]:
    """The arrays in a shape: their dtypes as NumPy spells them, their bytes.

    An entry of less than a byte takes a byte, unless its layout says that entries are
    packed.

    Example:
      >>> arrays("(bf16[2,3]{1,0}, pred[], f8e4m3fn[5], s4[3]{0:E(4)}, token[])")
      [('bfloat16', 12), ('bool', 1), ('float8_e4m3fn', 5), ('int4', 2)]
    """
    found = []
    for kind, bits, variant, dims, layout in _ARRAY.findall(shape):
        entries = math.prod(int(dim.strip("<=")) for dim in dims.split(",") if dim)
        packed = re.search(r"E\((\d+)\)", layout)
        width = int(packed[1]) if packed else max(8, int(bits or 8))
        name = _KINDS[kind] + bits + (f"_{variant}" if variant else "")
        found.append((name, -(-entries * width // 8)))
    return found
