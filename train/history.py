"""A run's figures over time: one JSON line for each evaluation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax

# What every row has, besides its task's score.
ROW = {"step", "loss", "payload_up_bytes", "payload_down_bytes"}


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
            # Another process may be reading it: it sees all of it or all of the old.
            unfinished = self._path.with_suffix(".unfinished")
            unfinished.write_text("".join(_line(row) for row in self.rows))
            os.replace(unfinished, self._path)

    def reaches(self, step: int) -> bool:
        """Whether the last row is of this step."""
        return bool(self.rows) and self.rows[-1]["step"] == step

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row; it has a ``step``."""
        self.rows.append(row)
        if jax.process_index() == 0:
            with self._path.open("a") as file:
                file.write(_line(row))


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's history; a line that is cut short or damaged is left out."""
    path = folder / "history.jsonl"
    if not path.exists():
        return []
    rows = [_row(line) for line in path.read_text(errors="replace").split("\n")]
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not ROW <= row.keys():
        return None
    # Of a damaged line's figures none is to be believed.
    return row if all(isinstance(row[key], (int, float)) for key in ROW) else None


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
