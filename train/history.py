"""A run's figures over time: one JSON line for each evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax


class History:
    """Appends to ``history.jsonl``; only process 0 writes."""

    def __init__(self, folder: Path, upto: int):
        """Opens a run's history and drops what comes after the step it resumes from.

        Args:
          folder: of the run.
          upto: the step of the checkpoint, 0 for a fresh start.
        """
        self._path = folder / "history.jsonl"
        # A run that starts at 0 evaluates at 0 again.
        self.rows = [r for r in read(folder) if r["step"] <= upto and upto > 0]
        if jax.process_index() == 0:
            self._path.write_text("".join(_line(row) for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row; it has a ``step``."""
        self.rows.append(row)
        if jax.process_index() == 0:
            with self._path.open("a") as file:
                file.write(_line(row))


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's history; a line cut short by an interrupt is left out."""
    path = folder / "history.jsonl"
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
