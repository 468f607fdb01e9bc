"""Another number of workers in mid-run: what is owed kept, dropped, or doubled.

scripts/study reshard                  digits, 8 workers, 4 from step 200 on, 3 seeds

`js.reshard` conserves the mean over the workers of residuals and momenta. Beside it:
all local state made anew, which is what a checkpoint without it amounts to; and the sum
conserved in place of the mean, which delivers what is owed twice. A worker's batch
stays, so that a step has half as many examples from the change on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jax

import jaxsparse as js
from study import plots
from study.results import markdown, publish
from study.runs import DATA
from study.simulation import Setting, Simulation
from study.variants import exchange_of
from train import data
from train.report import write_json

BEFORE = Setting(workers=8, examples=128, steps=400)
AFTER = BEFORE._replace(workers=4, examples=64)
EVERY = 10  # steps between two evaluations
HOWS = {
    "kept": "mean kept",
    "dropped": "dropped",
    "sum": "sum kept",
    "unchanged": "8 workers throughout",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--variant", default="topk", help="as in `scripts/study limit`")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=BEFORE.steps)


def run(arguments: argparse.Namespace) -> None:
    """Trains through the change in every way; what is there is not trained again."""
    if arguments.quick:
        arguments.seeds, arguments.steps = [0], 100
    file = arguments.workdir / (
        f"{arguments.variant}-{arguments.density:g}-{arguments.steps}.json"
    )
    kept = Change(arguments, file)
    found = {how: [kept.get(how, seed) for seed in arguments.seeds] for how in HOWS}
    change = arguments.steps // 2
    picture(found, change, arguments.workdir / "reshard.png")
    rows = [[HOWS[how], *figures(found[how], change)] for how in HOWS]
    header = ["at the change", "loss before", f"after {EVERY} steps"]
    header += [f"highest of {5 * EVERY} steps", "at the end", "accuracy", "seeds"]
    title = (
        f"`digits`, {arguments.variant} at {arguments.density:.2%}, {arguments.steps} "
        f"steps, {BEFORE.workers} workers, {AFTER.workers} from step {change} on, "
        f"{len(arguments.seeds)} seeds; loss on the test split, mean of the seeds."
    )
    text = f"{title}\n\n{markdown(header, rows)}"
    publish("reshard", text, arguments.workdir, write=arguments.write)


class Change:
    """Runs through the change, kept in a file."""

    def __init__(self, arguments: argparse.Namespace, file: Path):
        """Reads the data and what was trained before; trains nothing yet."""
        self._steps, self._file = arguments.steps, file
        self._found = json.loads(file.read_text()) if file.exists() else {}
        splits = data.load("digits", data_dir=arguments.data_dir, source_dir="")
        self._before, self._after = (
            Simulation(
                DATA["digits"](),
                exchange_of(arguments.variant, arguments.density, setting),
                splits,
                setting,
            )
            for setting in (s._replace(steps=arguments.steps) for s in (BEFORE, AFTER))
        )

    def get(self, how: str, seed: int) -> dict[str, Any]:
        """Test loss by the step, and the accuracy at the end."""
        key = f"{how}-{seed}"
        if key not in self._found:
            self._found[key] = self._train(how, seed)
            write_json(self._file, self._found)
            print(f"{key}: accuracy {self._found[key]['accuracy']:.4f}", flush=True)
        return self._found[key]

    def _train(self, how: str, seed: int) -> dict[str, Any]:
        change, curve = self._steps // 2, []

        def test(simulation: Simulation, state: Any, step: int) -> float:
            loss, accuracy = simulation.test(simulation.worker_zero(state))
            curve.append([step, loss])
            return accuracy

        simulation, state = self._before, self._before.start(seed)
        for first in range(0, self._steps, EVERY):
            if first == change and how != "unchanged":
                fresh = self._after.start(seed)
                state = changed(how, state, self._after.is_local, fresh)
                simulation = self._after
            steps = range(first, min(first + EVERY, self._steps))
            state, _ = simulation.advance(state, seed, steps)
            accuracy = test(simulation, state, steps.stop)
        return {"curve": curve, "accuracy": accuracy}


def changed(how: str, state: Any, is_local: Any, fresh: Any) -> Any:
    """The state of 8 workers as that of 4.

    Args:
      how: a key of `HOWS`.
      state: of the 8.
      is_local: which leaves are local.
      fresh: a state of the 4 before their first step.
    """
    if how == "dropped":
        return js.merge(js.split(state, is_local)[0], js.split(fresh, is_local)[1])
    state = js.reshard(state, AFTER.workers, is_local)
    if how == "sum":
        factor = BEFORE.workers // AFTER.workers
        shared, own = js.split(state, is_local)
        state = js.merge(
            shared, jax.tree.map(lambda x: (factor * x).astype(x.dtype), own)
        )
    return state


def figures(runs: list[dict[str, Any]], change: int) -> list[str]:
    """One line of the table."""
    curves = [dict(run["curve"]) for run in runs]
    mean = {step: statistics.mean(c[step] for c in curves) for step in curves[0]}
    near = [mean[change + i * EVERY] for i in range(1, 6) if change + i * EVERY in mean]
    accuracies = [run["accuracy"] for run in runs]
    return [
        f"{mean[change]:.3f}",
        f"{near[0]:.3f}",
        f"{max(near):.3f}",
        f"{mean[max(mean)]:.3f}",
        f"{statistics.mean(accuracies):.2%}",
        f"{100 * min(accuracies):.2f} to {100 * max(accuracies):.2f}",
    ]


def picture(found: dict[str, list[dict[str, Any]]], change: int, path: Path) -> None:
    """The loss by the step: the whole run, and around the change."""
    figure, axes = plots.panels(2, sharey=False)
    for ax, low, high in ((axes[0], 0, None), (axes[1], change - 50, change + 100)):
        for how, runs in found.items():
            points = [
                [(step, loss) for step, loss in run["curve"] if step >= low]
                for run in runs
            ]
            points = [[p for p in c if high is None or p[0] <= high] for c in points]
            steps = [step for step, _ in points[0]]
            losses = [[c[i][1] for c in points] for i in range(len(steps))]
            plots.band(ax, steps, losses, HOWS[how])
        ax.axvline(change, color="grey", lw=0.8, ls=":")
        ax.set(xlabel="step", yscale="log")
    axes[0].set_ylabel("test loss (mean, lowest, highest of the seeds)")
    axes[0].set_title("8 workers, 4 from the dotted line on")
    axes[1].set_title("around the change")
    plots.finish(figure, axes, path)
