"""A size limit at the server: what it saves and what it costs (thesis, 6.3.4).

scripts/study limit                    Fashion-MNIST, 8 workers, two densities, 2 seeds

The server sends the ``L`` largest entries of the aggregate only, L from k to N k. It
remembers the rest, or, for comparison, forgets it.
"""

from __future__ import annotations

import argparse
from typing import Any

from study import plots, runs
from study.results import markdown, publish
from study.runs import Run
from study.variants import moved, sent_down
from train.report import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=[8], seeds=[0, 1], densities=[0.01, 0.001])


def limits(workers: int) -> list[int]:
    """L / k: powers of two below the number of workers, which is no limit.

    >>> limits(8)
    [1, 2, 4]
    """
    return [2**i for i in range(workers.bit_length()) if 2**i < workers]


def run(arguments: argparse.Namespace) -> None:
    """Trains with every limit, with and without the server's memory."""
    kept = runs.open_runs(arguments)
    n = runs.entries_of_model(kept.task, kept.splits)
    workers = arguments.workers[0]
    found: list[dict[str, Any]] = []
    for density in arguments.densities:
        for residual in (True, False):
            for limit in limits(workers):
                variant = f"topk:limit={limit}" + ("" if residual else ",residual=0")
                figures = kept.mean(Run(variant, density, workers, 0), arguments.seeds)
                found.append({**figures, "limit": limit, "residual": residual})
        figures = kept.mean(Run("topk", density, workers, 0), arguments.seeds)
        found.append({**figures, "limit": workers, "residual": None})
    write_json(arguments.workdir / "data.json", found)
    picture(found, arguments)
    names = {True: "remembered", False: "lost", None: "no limit"}
    rows = []
    for f in found:
        bytes_ = moved(f, n)
        rows.append(
            [
                f"{f['density']:.2%}",
                names[f["residual"]],
                f"{f['limit']} k" if f["residual"] is not None else "",
                f"{sent_down(f) / f['selected']:.2f}",
                f"{f['accuracy']:.2%}",
                f"{100 * min(f['accuracies']):.2f} to {100 * max(f['accuracies']):.2f}",
                f"{bytes_['up']:,.0f}",
                f"{bytes_['down']:,.0f}",
            ]
        )
    header = ["density", "above the limit", "L", "down / k", "accuracy", "seeds"]
    header += ["bytes up", "bytes down"]
    title = f"`{arguments.data}`, {workers} workers, {arguments.steps} steps, "
    title += f"{len(arguments.seeds)} seeds; bytes are payload of one worker and step."
    text = f"{title}\n\n{markdown(header, rows)}"
    publish("limit", text, arguments.workdir, write=arguments.write)


def picture(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Accuracy against L, one panel per density."""
    figure, axes = plots.panels(len(arguments.densities), sharey=False)
    for ax, density in zip(axes, arguments.densities, strict=True):
        mine = [f for f in found if f["density"] == density]
        for residual, label in ((True, "server remembers"), (False, "server forgets")):
            line = [f for f in mine if f["residual"] in (residual, None)]
            samples = [f["accuracies"] for f in line]
            plots.band(ax, [f["limit"] for f in line], samples, label, marker=".")
        ticks = [*limits(arguments.workers[0]), arguments.workers[0]]
        ax.set(xscale="log", xlabel="size limit L (multiples of k)")
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.set_title(f"{arguments.data}, k = {density:g} of the entries")
    axes[0].set_ylabel("test accuracy (mean, lowest, highest of the seeds)")
    plots.finish(figure, axes, arguments.workdir / "limit.png")
