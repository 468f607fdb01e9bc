"""Accuracy and bytes of several methods, mean over seeds, against dense.

scripts/study seeds                                        digits, seeds 0 1 2
scripts/study seeds --config=configs/fashion_mnist.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from study.results import markdown, publish


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--config", default="configs/digits.py", help="FILE[:METHODS]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def run(arguments: argparse.Namespace) -> None:
    """Trains every method with every seed; finished runs are not repeated."""
    setup = Path(arguments.config.split(":")[0]).stem
    folder = arguments.workdir / setup
    summaries = [
        summary
        for seed in arguments.seeds
        for summary in train(arguments.config, seed, folder, arguments.quick)
    ]
    methods = list(dict.fromkeys(s["method"] for s in summaries))
    by_method = {m: [s for s in summaries if s["method"] == m] for m in methods}
    rows = [row(by_method[m], by_method.get("dense", [])) for m in methods]
    header = ["method", "accuracy", "seeds", "against dense", "up per step", "fewer"]
    title = (
        f"`{setup}`, {summaries[0]['workers']} workers, {summaries[0]['steps']} steps"
    )
    text = f"{title}; bytes of one worker.\n\n{markdown(header, rows)}"
    publish(f"seeds-{setup}", text, folder, write=arguments.write)


def train(config: str, seed: int, folder: Path, quick: bool) -> list[dict]:
    """One run of the trainer; its summaries."""
    workdir = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "train.main", f"--config={config}"]
    command += [f"--config.seed={seed}", f"--workdir={workdir}"]
    if quick:
        command.append("--config.steps=60")
    subprocess.run(command, check=True)
    return json.loads((workdir / "summary.json").read_text())


def row(runs: list[dict], dense: list[dict]) -> list[str]:
    """One method's line of the table."""
    accuracies = [run["accuracy"] for run in runs]
    mean = statistics.mean(accuracies)
    against = ""
    if dense:
        points = 100 * (mean - statistics.mean(run["accuracy"] for run in dense))
        against = f"{points:+.2f} points"
    return [
        runs[0]["method"],
        f"{mean:.2%}",
        " ".join(f"{a:.2%}" for a in accuracies),
        against,
        f"{runs[0]['payload_up_bytes_per_step']:,} B",
        f"{runs[0]['ratio_per_step']:.1f} x",
    ]
