"""Selections that agree: union and accuracy of the priorities (thesis, 6.3.1 to 6.3.3).

scripts/study selection                        Fashion-MNIST, 8 and 16 workers, 5 seeds
scripts/study selection --workers 8 --seeds 0 1 2 --variants topk ema:weight=256

The fair question is not "same k, smaller union?" but "same bytes up and down, better
accuracy?": so plain top-k stands beside the others at ever lower densities.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from study import plots, runs
from study.results import markdown, publish
from study.runs import Run
from study.variants import moved, sent_down

VARIANTS = [
    "topk",
    "frequency:weight=16",
    "ema:weight=16,of=support",
    "ema:weight=64",
    "ema:weight=256",
    "ema:weight=1024",
    "ema:weight=256,exploration=0.25",
    "penalty:factor=0.3",
    "penalty:factor=0.1",
    "leader",
]
CURVE = [0.01, 0.005, 0.0025, 0.00125, 0.0006, 0.0003, 0.0001]  # of plain top-k


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--curve", type=float, nargs="*", default=CURVE)


def run(arguments: argparse.Namespace) -> None:
    """Trains all variants, then tables and draws them."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.variants = ["topk", "ema:weight=256", "penalty:factor=0.1"]
        arguments.curve = [0.01, 0.0025]
    n = runs.entries_of_model(kept.task, kept.splits)
    found: list[dict[str, Any]] = []
    for workers in arguments.workers:
        wanted = [("dense", 1.0)]
        wanted += [("topk", density) for density in arguments.curve]
        wanted += [
            (variant, density)
            for density in arguments.densities
            for variant in arguments.variants
        ]
        for variant, density in dict.fromkeys(wanted):
            figures = kept.mean(Run(variant, density, workers, 0), arguments.seeds)
            found.append({**figures, **moved(figures, n)})
    (arguments.workdir / "data.json").write_text(json.dumps(found, indent=2) + "\n")
    picture(arguments.workdir / "frontier.png", found, arguments)
    text = "\n\n".join(table(found, workers) for workers in arguments.workers)
    title = f"`{arguments.data}`, {n:,} parameters, {arguments.steps} steps, "
    title += (
        f"{len(arguments.seeds)} seeds; bytes are payload of one worker and step.\n\n"
    )
    publish("selection", title + text, arguments.workdir, write=arguments.write)


def table(found: list[dict[str, Any]], workers: int) -> str:
    """One table for a number of workers."""
    mine = [f for f in found if f["workers"] == workers]
    dense = next(f["accuracy"] for f in mine if f["variant"] == "dense")
    header = ["variant", "density", "u/k", "down/k", "overlap of pairs", "captured"]
    header += ["accuracy", "deviation", "against dense", "up", "down", "up + down"]
    rows = []
    for f in mine:
        sparse = f["variant"] != "dense"
        deviation = statistics.stdev(f["accuracies"]) if len(f["accuracies"]) > 1 else 0
        rows.append(
            [
                f["variant"],
                f"{f['density']:.2%}",
                f"{f['aggregated'] / f['selected']:.2f}" if sparse else "",
                f"{sent_down(f) / f['selected']:.2f}" if sparse else "",
                f"{f['jaccard']:.3f}" if sparse else "",
                f"{f['captured']:.3f}" if sparse else "",
                f"{f['accuracy']:.2%}",
                f"{100 * deviation:.2f}",
                f"{100 * (f['accuracy'] - dense):+.2f}",
                f"{f['up']:,.0f}",
                f"{f['down']:,.0f}",
                f"{f['up'] + f['down']:,.0f}",
            ]
        )
    return f"{workers} workers:\n\n{markdown(header, rows)}"


def picture(path, found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Accuracy against bytes: plain top-k a line with its band, variants points."""
    figure, axes = plots.panels(len(arguments.workers))
    for ax, workers in zip(axes, arguments.workers, strict=True):
        mine = [f for f in found if f["workers"] == workers]
        plain = [f for f in mine if f["variant"] == "topk"]
        plain.sort(key=lambda f: f["density"])
        samples = [f["accuracies"] for f in plain]
        label = f"top-k, {plain[0]['density']:.2%} to {plain[-1]['density']:.2%}"
        plots.band(ax, total(plain), samples, label, color="k", marker=".")
        for i, variant in enumerate(v for v in arguments.variants if v != "topk"):
            group = [f for f in mine if f["variant"] == variant]
            samples = [f["accuracies"] for f in group]
            mark = plots.MARKS[i % len(plots.MARKS)]
            plots.points(ax, total(group), samples, variant, marker=mark)
        dense = next(f["accuracy"] for f in mine if f["variant"] == "dense")
        ax.axhline(dense, color="k", ls=":", label="dense")
        ax.set(xscale="log", xlabel="payload up + down (bytes per worker and step)")
        ax.set_title(f"{arguments.data}, {workers} workers, {arguments.steps} steps")
    axes[0].set_ylabel("test accuracy (mean, lowest, highest of the seeds)")
    plots.finish(figure, axes, path)


def total(found: list[dict[str, Any]]) -> list[float]:
    """Bytes up and down of each run."""
    return [f["up"] + f["down"] for f in found]
