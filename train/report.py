"""What is left of a run: summary.json, a table, a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file that is never seen half-written."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, path)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None where there is none, or it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# What the table shows of a summary, besides its score.
SUMMARY = {
    "method",
    "workers",
    "loss",
    "payload_up_bytes",
    "payload_down_bytes",
    "ratio",
    "payload_up_bytes_per_step",
    "ratio_per_step",
    "step_ms",
}


def table(summaries: Sequence[dict[str, Any]], score: str) -> Table:
    """One row for each method; bytes are those of one worker.

    Args:
      summaries: what ``summary.json`` has of each; the first names the setup if it is
        one of generated data.
      score: the figure that they are compared by.
    """
    first = summaries[0]
    title = f"{first['workers']} workers; bytes of one of them"
    out = Table(
        title=f"{first['setup']}, {title}" if "setup" in first else title,
        box=box.SIMPLE_HEAD,
        collapse_padding=True,  # it is to fit into 80 columns
        pad_edge=False,
    )
    out.add_column("method", no_wrap=True)
    for column in (words(score), "loss", "up", "down", "ratio"):
        out.add_column(column, justify="right", no_wrap=True)
    for column in ("up", "ratio", "ms"):  # of a step after any warm-up
        out.add_column(f"{column}\n/step", justify="right", no_wrap=True)
    for s in summaries:
        out.add_row(
            s["method"],
            f"{s[score]:.2%}",
            f"{s['loss']:.3f}",
            human_bytes(s["payload_up_bytes"]),
            human_bytes(s["payload_down_bytes"]),
            f"{s['ratio']:.1f}",
            human_bytes(s["payload_up_bytes_per_step"]),
            f"{s['ratio_per_step']:.1f}",
            "-" if s["step_ms"] is None else f"{s['step_ms']:.1f}",
        )
    return out


def picture(
    path: Path, title: str, histories: dict[str, list[dict[str, Any]]], score: str
) -> None:
    """Loss and score, against steps and against bytes, a line for each method."""
    # Not pyplot: it keeps global state and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for method, rows in histories.items():
        # The first point is at 0 bytes, which a logarithm has no place for.
        sent = [row for row in rows if row["payload_up_bytes"] > 0]
        for column, (x, shown) in enumerate(
            (("step", rows), ("payload_up_bytes", sent))
        ):
            for line, y in enumerate(("loss", score)):
                axes[line, column].plot(
                    [row[x] for row in shown], [row[y] for row in shown], label=method
                )
    for line in axes:
        for ax in line:
            ax.grid(alpha=0.3)
    axes[0, 0].set(ylabel="test loss", yscale="log")
    axes[1, 0].set(ylabel=f"test {words(score)}", xlabel="steps")
    axes[1, 1].set(xlabel="bytes sent by one worker")
    if any(row["payload_up_bytes"] > 0 for rows in histories.values() for row in rows):
        axes[1, 1].set(xscale="log")
    axes[0, 0].legend()
    figure.savefig(path, dpi=120)


def words(figure: str) -> str:
    """A figure's name for people.

    >>> words("mean_iou")
    'mean IoU'
    """
    return figure.replace("_", " ").replace("iou", "IoU")


def human_bytes(count: int) -> str:
    """A count of bytes for people, in powers of 1000.

    >>> human_bytes(1234567)
    '1.23 MB'
    """
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
