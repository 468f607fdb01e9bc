"""Time to an accuracy on test hosts behind slow links, trained by `scripts/train`.

scripts/study network                  four hosts, 100 Mbit/s; needs root and iproute2
scripts/study network --rate 1gbit --setup fashion_mnist

The time is that of the steps: the median of a run's steps times the first evaluated
step at or above the target. Beside it stands what `scripts/plan` makes of steps that
were measured without a limit on the links.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from bench import measure, plan
from bench.prediction import Cost, advice, named
from bench.testbed import rate_bits
from study.results import DOCS, markdown, publish
from study.time import first_reached
from train import build, history
from train.report import write_json

ROOT = Path(__file__).parents[1]
TRAIN = ["-m", "train.main", "--coordinator={coordinator}", "--process_id={host}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--setup", default="fashion_mnist_large", help="in configs/")
    parser.add_argument("--methods", nargs="+", default=["dense", "topk"])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit", help="of each host's link")
    parser.add_argument("--target", type=float, default=0.8, help="test accuracy")
    parser.add_argument("--steps", type=int, default=120)


def trained(
    arguments: argparse.Namespace, rate: str | None, steps: int
) -> dict[str, dict[str, Any]]:
    """Summary and curve of each method, trained on the test bed."""
    folder = arguments.workdir / f"{arguments.setup}-{rate or 'no-limit'}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "bench.testbed", "-n", str(arguments.hosts)]
    command += ["--rate", rate] if rate else []
    command += ["--", sys.executable, *TRAIN, "--num_processes={hosts}"]
    command += [
        f"--config=configs/{arguments.setup}.py:{','.join(arguments.methods)}",
        f"--config.num_workers={arguments.hosts}",
        f"--config.steps={steps}",
        f"--config.checkpoint_every={steps}",
        f"--workdir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {method: outcome(folder / method) for method in arguments.methods}


def outcome(folder: Path) -> dict[str, Any]:
    """A run's summary, with its accuracy over the steps."""
    rows = history.read(folder)
    curve = [[row["step"], row["accuracy"]] for row in rows]
    return {**json.loads((folder / "summary.json").read_text()), "curve": curve}


def run(arguments: argparse.Namespace) -> None:
    """Trains, predicts and tables."""
    if arguments.quick:
        arguments.steps, arguments.target, arguments.hosts = 20, 0.2, 2
    rate = rate_bits(arguments.rate)
    free = trained(arguments, None, min(arguments.steps, 20))
    found = trained(arguments, arguments.rate, arguments.steps)
    write_json(arguments.workdir / "data.json", {"free": free, "limited": found})
    costs, rows = [], []
    for method, one in found.items():
        link = link_bytes(arguments.setup, method, arguments.hosts)
        costs.append(Cost(method, free[method]["step_ms"], link))
        reached = first_reached(one["curve"], arguments.target)
        one["seconds"] = reached and reached * one["step_ms"] / 1e3
        rows.append(
            [
                f"`{method}`",
                f"{one['curve'][-1][1]:.2%}",
                f"{reached or 'never'}",
                f"{one['step_ms']:,.0f} ms",
                f"{costs[-1].step_ms(rate):,.0f} ms",
                f"{one['seconds']:,.1f} s" if reached else "never",
                faster(found, method),
            ]
        )
    header = ["method", f"accuracy at {arguments.steps}", "steps to the target", "step"]
    header += ["predicted", "time to the target", "than dense"]
    title = f"`{arguments.setup}`, {arguments.hosts} hosts, {named(rate)}, target "
    title += f"{arguments.target:.0%}, {jax.devices()[0].platform.upper()}s.\n\n"
    said = f"\n\n`scripts/plan`: {advice(costs, rate, 0.0)}"
    text = title + markdown(header, rows) + said
    place = f"network-{arguments.setup}-{arguments.rate}"
    where = {"write": arguments.write, "document": DOCS / "performance.md"}
    publish(place, text, arguments.workdir, **where)


def link_bytes(setup: str, method: str, hosts: int) -> int:
    """Bytes of a step on one host's link, by the method's program."""
    path = ROOT / "configs" / f"{setup}.py"
    config = runpy.run_path(str(path))["get_config"](method)
    config.num_workers = hosts
    shapes, _ = plan.model_of(config)
    return measure.said(build.optimizer(config, method), shapes, hosts)[2]


def faster(found: dict[str, dict[str, Any]], method: str) -> str:
    """How much sooner than dense averaging the target was reached."""
    dense, own = found["dense"].get("seconds"), found[method].get("seconds")
    return f"{dense / own:.1f} x" if dense and own else ""
