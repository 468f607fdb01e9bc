"""Records of `scripts/bench` as a plan's costs."""

from __future__ import annotations

import json
from pathlib import Path

from bench.prediction import Cost
from train.errors import SetupError


def recorded(file: Path, model: str, workers: int, density: float) -> list[Cost]:
    """From the records of `scripts/bench`, of runs without a limited link.

    Raises:
      SetupError: the file has no such records.
    """
    # No limited link, and no gradient: --batch measures whole training steps.
    wanted = (model, workers, density, None, None)
    keys = ("model", "workers", "density", "batch_size", "rate")
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found = {
            r["method"]: Cost(r["method"], r["step_ms"], r["link_bytes"])
            for r in records
            if tuple(r[key] for key in keys) == wanted
        }
    except (OSError, ValueError) as error:
        raise SetupError(f"--measured={file}: {error}") from error
    except (KeyError, TypeError) as error:
        raise SetupError(
            f"--measured={file} holds other things than records of scripts/bench: "
            f"{type(error).__name__}: {error}. Name its bench.jsonl."
        ) from error
    if "dense" not in found:
        raise SetupError(
            f"--measured={file} has no record of dense averaging of {model} with "
            f"{workers} workers, density {density:g} and no --rate. Make some: "
            f"scripts/bench --models {model} --hosts {workers} --density {density:g}"
        )
    return list(found.values())
