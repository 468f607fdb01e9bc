"""What two workers' gradients have in common: mutual information, layer by layer.

scripts/study information                Fashion-MNIST, dense training, 300 steps

The gradients of two workers' batches at the same parameters are cut into ``BINS`` bins
between quantiles, X and Y; the plug-in estimate is ``I = H(X) + H(Y) - H(X, Y)``, in
bits an entry, given as its share of H(Y). It is biased upwards, by about
``(BINS - 1)**2 / (2 n ln 2)`` bits for n entries: so the same is measured with Y
shuffled, where nothing is shared, and told beside it. ``correlation`` is Pearson's.

References:
  Abrahamyan et al., "Learned Gradient Compression for Distributed Deep Learning", 2021,
  whose case for a shared code is such an estimate. Miller, "Note on the Bias of
  Information Estimates", 1955.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from jaxsparse.tree import name
from study import plots, runs
from study.results import markdown, publish
from study.simulation import CHUNK, Simulation
from study.variants import exchange_of
from train.data import Batches
from train.report import write_json

BINS = 16
LARGEST = 0.01  # of a layer, seen apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=[8], seeds=[0])
    parser.set_defaults(steps=300)
    parser.add_argument(
        "--examples", type=int, nargs="+", default=[16, 128, 1024], help="of a worker"
    )


def entropy(codes: np.ndarray) -> float:
    """Of the empirical distribution, in bits.

    >>> entropy(np.array([0, 1, 2, 3]))
    2.0
    """
    counts = np.unique(codes, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-np.sum(share * np.log2(share)))


def binned(x: np.ndarray) -> np.ndarray:
    """The bin of each entry, between quantiles; equal entries share one."""
    edges = np.quantile(x, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.searchsorted(edges, x, side="right")


def shared_information(x: np.ndarray, y: np.ndarray) -> float:
    """``I(X; Y) / H(Y)`` of the binned entries, 0 to 1.

    >>> x = np.arange(64.0)
    >>> shared_information(x, x), shared_information(np.repeat(x, 64), np.tile(x, 64))
    (1.0, 0.0)
    """
    x, y = binned(x), binned(y)
    of_y = entropy(y)
    together = entropy(x * BINS + y)
    return max(0.0, entropy(x) + of_y - together) / of_y if of_y else 0.0


def compared(
    x: np.ndarray, y: np.ndarray, rng: np.random.Generator
) -> dict[str, float]:
    """The figures of one layer in one step."""
    spread = x.std() * y.std()
    count = max(1, round(LARGEST * len(x)))
    largest = np.argpartition(np.abs(x), -count)[-count:]
    energy = float(np.sum(x[largest] ** 2))
    return {
        "shared": shared_information(x, y),
        "shuffled": shared_information(x, rng.permutation(y)),
        "correlation": float(np.mean((x - x.mean()) * (y - y.mean())) / spread)
        if spread
        else 0.0,
        # What the other has where this one is largest, in its direction.
        "followed": float(np.sum(x[largest] * y[largest]) / energy) if energy else 0.0,
    }


def measure(kept: runs.Runs, workers: int, seed: int, sizes: list[int]) -> list[dict]:
    """Trains densely, and compares two workers' gradients on the way."""
    setting = kept.setting._replace(workers=workers)
    exchange = exchange_of("dense", 1.0, setting)
    simulation = Simulation(kept.task, exchange, kept.splits, setting)
    batches = {
        size: Batches(kept.splits["train"], seed=seed, num_workers=2, batch_size=size)
        for size in sizes
    }
    gradient = jax.jit(
        jax.grad(lambda params, state, batch: kept.task.loss(params, state, batch)[0])
    )
    rng, found = np.random.default_rng(seed), []

    def watch(step: int, state: Any) -> None:
        state = simulation.worker_zero(state)
        for size, of_size in batches.items():
            pair = of_size.at(step, [0, 1])
            first, second = (
                gradient(
                    state.params,
                    state.model_state,
                    jax.tree.map(lambda x, i=i: x[i], pair),
                )
                for i in range(2)
            )
            for (path, x), y in zip(
                jax.tree_util.tree_leaves_with_path(first),
                jax.tree.leaves(second),
                strict=True,
            ):
                x, y = np.asarray(x).ravel(), np.asarray(y).ravel()
                if x.size >= 100:  # of less there is no estimate
                    row = {"layer": name(path), "entries": x.size, "step": step}
                    found.append({**row, "examples": size, **compared(x, y, rng)})

    simulation.run(seed, watch)
    return found


def run(arguments: argparse.Namespace) -> None:
    """Measures, then tables and draws."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.examples = [16, 64]
    seed, workers = arguments.seeds[0], arguments.workers[0]
    found = measure(kept, workers, seed, arguments.examples)
    write_json(arguments.workdir / "information.json", found)
    picture(arguments.workdir / "information.png", found, arguments)
    title = f"`{arguments.data}`, dense training of {arguments.steps} steps; mean over "
    title += f"its steps, every {CHUNK}th.\n\n"
    publish(
        "information", title + table(found), arguments.workdir, write=arguments.write
    )


def table(found: list[dict[str, Any]]) -> str:
    """One row for a layer and a batch size."""
    header = ["layer", "entries", "examples", "I / H", "shuffled", "correlation"]
    header.append(f"followed, {LARGEST:.0%} largest")
    rows = []
    for layer in dict.fromkeys(f["layer"] for f in found):
        for examples in dict.fromkeys(f["examples"] for f in found):
            mine = [
                f for f in found if (f["layer"], f["examples"]) == (layer, examples)
            ]
            figures = ("shared", "shuffled", "correlation", "followed")
            means = [f"{np.mean([f[key] for f in mine]):.3f}" for key in figures]
            rows.append([layer, f"{mine[0]['entries']:,}", str(examples), *means])
    return markdown(header, rows)


def picture(path, found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Shared information of each layer over the steps, its control dotted."""
    figure, axes = plots.panels(len(arguments.examples))
    for ax, examples in zip(axes, arguments.examples, strict=True):
        for layer in dict.fromkeys(f["layer"] for f in found):
            mine = [
                f for f in found if (f["layer"], f["examples"]) == (layer, examples)
            ]
            steps = [f["step"] for f in mine]
            (line,) = ax.plot(steps, [f["shared"] for f in mine], label=layer)
            control = [f["shuffled"] for f in mine]
            ax.plot(steps, control, ls=":", color=line.get_color())
        ax.set(xlabel="step", title=f"{examples} examples a worker")
    axes[0].set_ylabel("I / H of two workers' gradients (dotted: shuffled)")
    plots.finish(figure, axes, path)
