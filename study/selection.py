"""Selections that agree: union and accuracy of the priorities (thesis, 6.3.1 to 6.3.3).

scripts/study selection                        Fashion-MNIST, 8, 16 and 4 workers
scripts/study selection --workers 8 --search frequency:weight=32@0.01
scripts/study selection --steps 3000 --place selection-long --curve --search --claim \
  topk@0.001 ema:weight=16,limit=3.5@0.001/8 ema:weight=16,limit=6.5@0.001/16

The fair question is not "same k, smaller union?" but "same bytes up and down, better
accuracy?": so plain top-k stands beside the others at ever lower densities. What a
claim rests on is run with all seeds; what was searched through, with the first two, for
the first number of workers.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from study import plots, runs
from study.results import markdown, publish
from study.runs import Run
from study.variants import moved, parse, sent_down
from train.report import write_json

CLAIM = [
    "dense@1/8",
    "topk@0.01/8",
    "topk@0.01/16",
    "topk:limit=1@0.01/8",
    "topk:limit=1@0.01/16",
    "ema:weight=64,limit=2.5@0.01/8",
    "ema:weight=64,limit=4.5@0.01/16",
    "ema:weight=256@0.01/8",
    "topk:limit=2@0.01/8",
    "topk:limit=3.5@0.01/8",
    "topk@0.001/8",
]
CURVE = [
    "dense@1/16",
    "dense@1/4",
    *(f"topk@{d}/{n}" for n in (8, 16) for d in (0.0025, 0.001, 0.0003)),
    "topk@0.01/4",
    "ema:weight=64,limit=1.5@0.01/4",
]
SEARCH = [
    "topk@0.0001",
    "frequency:weight=4@0.01",
    "frequency:weight=16@0.01",
    "frequency:weight=64@0.01",
    "ema:weight=16@0.01",
    "ema:weight=64@0.01",
    "ema:weight=16,of=support@0.01",
    "ema:weight=64,of=support@0.01",
    "ema:weight=256,exploration=0.25@0.01",
    "penalty:factor=0.5@0.01",
    "penalty:factor=0.1@0.01",
    "penalty:factor=0.02@0.01",
    "penalty:factor=0.02,exploration=0.25@0.01",
    "regtopk@0.01",
    "leader@0.01",
    "topk:limit=1@0.02",
    "topk:limit=1@0.004",
    "ema:weight=64,limit=2.5@0.004",
    "regtopk@0.001",
    "ema:weight=64@0.001",
    "ema:weight=256@0.001",
    "topk:limit=1@0.001",
    "topk:limit=2@0.001",
    "topk:limit=3.5@0.001",
    "ema:weight=4,limit=3.8@0.001",
    "ema:weight=16,limit=3.5@0.001",
    "ema:weight=16,limit=3.8@0.001",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=(8, 16, 4))
    parser.add_argument(
        "--place", default="selection", help="of the table in docs/results.md"
    )
    for name, default in (("claim", CLAIM), ("curve", CURVE), ("search", SEARCH)):
        parser.add_argument(
            f"--{name}",
            nargs="*",
            default=default,
            help="VARIANT@DENSITY[/WORKERS] ...",
        )


def wanted(arguments: argparse.Namespace, workers: int) -> dict[Run, list[int]]:
    """The runs for a number of workers, and the seeds of each."""
    seeds = arguments.seeds
    few = list(arguments.curve)
    if workers == arguments.workers[0]:
        few += arguments.search
    asked = [(item, seeds) for item in arguments.claim]
    asked += [(item, seeds[:2]) for item in few]
    found: dict[Run, list[int]] = {}
    for item, its_seeds in asked:
        each, _, only = item.partition("/")
        variant, _, density = each.rpartition("@")
        parse(variant)  # so that a wrong name is told before anything is trained
        if only in ("", str(workers)):
            found.setdefault(Run(variant, float(density), workers, 0), its_seeds)
    return found


def run(arguments: argparse.Namespace) -> None:
    """Trains all variants, then tables and draws them."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.claim = ["dense@1", "topk@0.01", "ema:weight=256@0.01"]
        arguments.curve, arguments.search = ["topk@0.0025"], ["topk:limit=2@0.01"]
    n = runs.entries_of_model(kept.task, kept.splits)
    found: list[dict[str, Any]] = []
    for workers in arguments.workers:
        for each, seeds in wanted(arguments, workers).items():
            figures = kept.mean(each, seeds)
            found.append({**figures, **moved(figures, n)})
    write_json(arguments.workdir / f"{arguments.place}.json", found)
    picture(arguments.workdir / f"{arguments.place}.png", found, arguments)
    text = "\n\n".join(table(found, workers) for workers in arguments.workers)
    title = f"`{arguments.data}`, {n:,} parameters, {arguments.steps} steps of "
    title += f"{kept.setting.examples} examples; bytes are payload of one worker and "
    title += "step.\n\n"
    publish(arguments.place, title + text, arguments.workdir, write=arguments.write)


def table(found: list[dict[str, Any]], workers: int) -> str:
    """One table for a number of workers."""
    mine = [f for f in found if f["workers"] == workers]
    dense = [f["accuracy"] for f in mine if f["variant"] == "dense"]
    header = ["variant", "density", "u/k", "down/k", "jaccard", "seeds", "accuracy"]
    header += ["deviation", "against dense", "up", "down", "up + down"]
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
                str(len(f["accuracies"])),
                f"{f['accuracy']:.2%}",
                f"{100 * deviation:.2f}",
                f"{100 * (f['accuracy'] - dense[0]):+.2f}" if dense else "",
                f"{f['up']:,.0f}",
                f"{f['down']:,.0f}",
                f"{f['up'] + f['down']:,.0f}",
            ]
        )
    return f"{workers} workers:\n\n{markdown(header, rows)}"


def picture(path, found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Accuracy against bytes: plain top-k a line with its band, variants points."""
    figure, axes = plots.panels(len(arguments.workers))
    # A run that diverged would press all others together: it is named, not drawn.
    curve = [f["accuracies"] for f in found if f["variant"] == "topk"]
    curve = [min(sample) for sample in curve if min(sample) > 0.5]
    lowest, best = (
        min(curve, default=0.0) - 0.02,
        max(max(f["accuracies"]) for f in found),
    )
    others = [f["variant"] for f in found if f["variant"] not in ("topk", "dense")]
    numbers = {variant: i for i, variant in enumerate(dict.fromkeys(others))}
    for ax, workers in zip(axes, arguments.workers, strict=True):
        mine = [f for f in found if f["workers"] == workers]
        plain = [f for f in mine if f["variant"] == "topk"]
        plain.sort(key=lambda f: f["density"])
        samples = [f["accuracies"] for f in plain]
        plots.band(ax, total(plain), samples, "topk", color="k", marker=".")
        for variant, i in numbers.items():
            group = [f for f in mine if f["variant"] == variant]
            samples = [f["accuracies"] for f in group]
            below = any(min(sample) < lowest for sample in samples)
            label = variant + (" (one below the figure)" if below else "")
            style = {"marker": plots.MARKS[i % len(plots.MARKS)], "color": f"C{i % 10}"}
            if group:
                plots.points(ax, total(group), samples, label, **style)
        for f in mine:
            if f["variant"] == "dense":
                ax.axhline(f["accuracy"], color="k", ls=":", label="dense")
        ax.set(
            xscale="log",
            ylim=(lowest, best + 0.003),
            xlabel="payload up + down (bytes per worker and step)",
        )
        ax.set_title(f"{arguments.data}, {workers} workers, {arguments.steps} steps")
    axes[0].set_ylabel("test accuracy (mean, lowest, highest of the seeds)")
    plots.finish(figure, axes, path)


def total(found: list[dict[str, Any]]) -> list[float]:
    """Bytes up and down of each run."""
    return [f["up"] + f["down"] for f in found]
