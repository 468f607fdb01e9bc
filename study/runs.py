"""Cached runs of the thesis' studies: a variant, a density, workers, a seed.

Every finished run is a file, so a study that was interrupted goes on, and two studies
share what they have in common.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from study.simulation import CHUNK, Setting, Simulation
from study.variants import exchange_of
from train import data
from train.models.convnet import ConvNet
from train.models.lenet import LeNet
from train.report import write_json
from train.tasks import Task, classification

DATA = {
    "digits": lambda: classification(
        ConvNet(channels=(16, 32), hidden=64, num_classes=10), max_value=16
    ),
    "fashion_mnist": lambda: classification(LeNet(num_classes=10), max_value=255),
}


EXAMPLES = Setting().examples


class Run(NamedTuple):
    """What identifies a run."""

    variant: str
    density: float
    workers: int
    seed: int

    @property
    def file(self) -> str:
        """Name of the run's file."""
        return f"{self.workers}-{self.density:.12g}-{self.variant}-{self.seed}.json"


class Runs:
    """Runs of one data set and setting, kept in a folder.

    Attributes:
      name: of the folder: the data, the steps, and the examples if not the usual.
      setting: what all of them share, but for the number of workers.
      task: the model and its loss.
      splits: the data.
    """

    def __init__(self, folder: Path, name: str, setting: Setting, data_dir: str):
        """Reads the data; trains nothing yet."""
        batch = "" if setting.examples == EXAMPLES else f"-of-{setting.examples}"
        self.name = f"{name}-{setting.steps}{batch}"
        self._folder = folder / self.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self.setting = setting
        self.task: Task = DATA[name]()
        self.splits = data.load(
            name, data_dir=data_dir, source_dir="/usr/share/datasets/fashion-mnist"
        )
        self._simulations: dict[Any, Simulation] = {}

    def get(self, run: Run) -> dict[str, Any]:
        """The figures of a run, trained now if it has not been before."""
        file = self._folder / run.file
        if file.exists():
            return json.loads(file.read_text())
        key = run._replace(seed=0)
        if key not in self._simulations:
            self._simulations.clear()  # one program at a time
            setting = self.setting._replace(workers=run.workers)
            exchange = exchange_of(run.variant, run.density, setting)
            self._simulations[key] = Simulation(
                self.task, exchange, self.splits, setting
            )
        simulation, curve = self._simulations[key], []
        every = max(CHUNK, self.setting.steps // 15)

        def watch(step: int, state: Any) -> None:
            if step % every == 0:
                now = simulation.worker_zero(state)
                curve.append([step, simulation.test(now, most=2000)[1]])

        outcome = simulation.run(run.seed, watch)
        series = {name: float(np.mean(v)) for name, v in outcome.metrics.items()}
        half = self.setting.steps // 2  # behind all stages of learned compression
        late = {name: float(np.mean(v[half:])) for name, v in outcome.metrics.items()}
        figures = {
            **run._asdict(),
            "accuracy": outcome.accuracy,
            "loss": outcome.loss,
            "curve": curve,
            "seconds": outcome.seconds,
            **series,
            "late": late,
            "nmse_curve": outcome.metrics["nmse"][:: max(1, self.setting.steps // 60)],
        }
        write_json(file, figures)
        name = f"{run.variant} at {run.density:g}, {run.workers} workers"
        print(
            f"{name}, seed {run.seed}: accuracy {outcome.accuracy:.4f}, "
            f"union {series['aggregated']:.0f}, {outcome.seconds:.0f} s",
            flush=True,
        )
        return figures

    def mean(self, run: Run, seeds: Iterable[int]) -> dict[str, Any]:
        """The mean figures over seeds; ``accuracies`` has them one by one."""
        found = [self.get(run._replace(seed=seed)) for seed in seeds]
        numbers = [k for k, v in found[0].items() if isinstance(v, float)]
        means = {k: statistics.mean(f[k] for f in found) for k in numbers}
        accuracies = [f["accuracy"] for f in found]
        means["curve"] = np.mean([f["curve"] for f in found], axis=0).tolist()
        if all("late" in f for f in found):
            means["nmse_curve"] = np.mean([f["nmse_curve"] for f in found], 0).tolist()
            late = {k: [f["late"][k] for f in found] for k in found[0]["late"]}
            means["late"] = {k: statistics.mean(v) for k, v in late.items()}
        return {**found[0], **means, "accuracies": accuracies}


def kept_file(arguments: argparse.Namespace, name: str) -> Path:
    """Where a study keeps a result of these data, steps and seeds."""
    seeds = "-".join(map(str, arguments.seeds))
    stem = f"{name}-{arguments.data}-{arguments.steps}-seeds-{seeds}"
    return Path(arguments.workdir, f"{stem}.json")


def entries_of_model(task: Task, splits: dict[str, data.Split]) -> int:
    """Parameters of the model."""
    batch = {"image": splits["test"].images[:1]}
    params, _ = jax.eval_shape(task.init, jax.random.key(0), batch)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def add_arguments(
    parser: argparse.ArgumentParser,
    workers: Iterable[int] = (8, 16),
    seeds: Iterable[int] = (0, 1, 2, 3, 4),
    densities: Iterable[float] | None = None,
) -> None:
    """Options that these studies share, with their defaults; None: no such option."""
    parser.add_argument("--data", choices=DATA, default="fashion_mnist")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument(
        "--runs",
        type=Path,
        help="where finished runs are kept, by default beside the studies; "
        "docs/measured has those of docs/results.md",
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--batch", type=int, default=EXAMPLES, help="of a step, for all workers"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=list(workers))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    if densities is not None:
        parser.add_argument(
            "--densities", type=float, nargs="+", default=list(densities)
        )


def open_runs(arguments: argparse.Namespace) -> Runs:
    """The runs of a study; --quick is digits, four workers, one seed, 100 steps."""
    if arguments.quick:
        arguments.data, arguments.steps = "digits", 100
        arguments.workers, arguments.seeds = [4], [0]
        if hasattr(arguments, "densities"):
            arguments.densities = arguments.densities[:1]
    folder = arguments.runs or arguments.workdir.parent / "runs"
    setting = Setting(steps=arguments.steps, examples=arguments.batch)
    return Runs(folder, arguments.data, setting, arguments.data_dir)
