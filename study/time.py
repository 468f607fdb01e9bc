"""Time of a step and time to an accuracy at given link rates (thesis, 6.4).

scripts/study time                     Fashion-MNIST, 8 workers, 10 and 100 Mbit/s, ...

Accuracy over steps is from the trained runs, bytes from the cost model. The times of
the gradient and of selecting, coding and decoding are measured on this machine, for one
worker: they calibrate the model. Links are full duplex; the central server has a
worker's link.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse as js
from study import plots, runs
from study.clock import median_seconds
from study.results import markdown, publish
from study.runs import Run
from study.simulation import AXIS, Setting
from study.variants import exchange_of, moved_step, sent_down
from train.report import write_json

RATES = (1e7, 1e8, 1e9)  # bits per second
LATENCY = 1e-4  # seconds per transfer
VARIANTS = ["dense", "topk", "ema:weight=64,limit=2.5", "topk:limit=1", "leader"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=[8], seeds=[0, 1], densities=[0.01])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--target", type=float, default=0.87, help="test accuracy")


def compute_seconds(kept: runs.Runs, workers: int) -> float:
    """The gradient of one worker's batch."""
    size = kept.setting.examples // workers
    split = kept.splits["train"]
    batch = {"image": split.images[:size], "label": split.labels[:size]}
    params, model_state = kept.task.init(jax.random.key(0), batch)
    grad = jax.jit(jax.grad(lambda p: kept.task.loss(p, model_state, batch)[0]))
    return median_seconds(lambda: grad(params))


def exchange_seconds(variant: str, density: float, workers: int, n: int) -> float:
    """Memory, selection, coding and decoding of one worker: those of N, over N."""
    exchange = exchange_of(variant, density, Setting(workers))
    grads = jax.random.normal(jax.random.key(0), (workers, n))
    state = exchange.init(jnp.zeros(n))
    is_local = js.local_leaves(
        lambda state, g: exchange.update(g, state)[::-1],
        state,
        grads[0],
        axis_name=AXIS,
        num_workers=workers,
        params=lambda state: (),  # there are none here
    )
    shared, own = js.split(state, is_local)
    own = js.stack_workers(own, workers)

    def step(shared, own, g):
        return exchange.update(g, js.merge(shared, own))

    run = jax.jit(jax.vmap(step, (None, 0, 0), axis_name=AXIS))
    return median_seconds(lambda: run(shared, own, grads)) / workers


def first_reached(curve: list[list[float]], target: float) -> float | None:
    """The first step of a curve of (step, accuracy) at or above a target.

    >>> first_reached([[100, 0.5], [200, 0.9]], 0.8)
    200
    """
    return next((step for step, accuracy in curve if accuracy >= target), None)


def run(arguments: argparse.Namespace) -> None:
    """Measures, models, tables and draws."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.target = 0.3
    n = runs.entries_of_model(kept.task, kept.splits)
    workers, density = arguments.workers[0], arguments.densities[0]
    compute = compute_seconds(kept, workers)
    found = []
    for variant in arguments.variants:
        at = 1.0 if variant == "dense" else density
        figures = kept.mean(Run(variant, at, workers, 0), arguments.seeds)
        step = moved_step(figures, n)
        down = sent_down(figures)
        central = js.cost.central(workers, round(figures["selected"]), down, n)
        if variant == "dense":
            central = step
        select = exchange_seconds(variant, at, workers, n)
        seconds = {}
        for rate in arguments.rates:
            given: dict[str, Any] = {
                "bits_per_second": rate,
                "compute_seconds": compute,
            }
            given |= {"latency_seconds": LATENCY, "select_seconds": select}
            seconds[rate] = [js.cost.seconds(s, **given) for s in (step, central)]
        steps = first_reached(figures["curve"], arguments.target)
        found.append({**figures, "select": select, "times": seconds, "reached": steps})
    write_json(arguments.workdir / "data.json", found)
    header = ["variant", "selection and coding", "steps to the target"]
    for rate in arguments.rates:
        name = named(rate)
        header += [f"step, {name}", f"central, {name}", f"to the target, {name}"]
    rows = []
    for f in found:
        row = [
            f["variant"],
            f"{1e3 * f['select']:.2f} ms",
            f"{f['reached']:.0f}" if f["reached"] else "never",
        ]
        for sharded, central in f["times"].values():
            whole = f"{f['reached'] * sharded:.1f} s" if f["reached"] else "never"
            row += [f"{1e3 * sharded:.2f} ms", f"{1e3 * central:.2f} ms", whole]
        rows.append(row)
    title = f"`{arguments.data}`, {workers} workers, density {density:.2%}, target "
    title += f"{arguments.target:.0%}, gradient {1e3 * compute:.2f} ms, latency "
    title += f"{1e3 * LATENCY:g} ms, {len(arguments.seeds)} seeds.\n\n"
    picture(found, arguments)
    text = title + markdown(header, rows)
    publish("time", text, arguments.workdir, write=arguments.write)


def named(rate: float) -> str:
    """A link rate in words.

    >>> named(1e7), named(1e9)
    ('10 Mbit/s', '1 Gbit/s')
    """
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def picture(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Accuracy against modelled time, one panel per link rate."""
    figure, axes = plots.panels(len(arguments.rates))
    for ax, rate in zip(axes, arguments.rates, strict=True):
        for f in found:
            steps, accuracies = np.transpose(f["curve"])
            ax.plot(steps * f["times"][rate][0], accuracies, ".-", label=f["variant"])
        ax.axhline(arguments.target, color="k", ls=":", label="target")
        ax.set(xscale="log", xlabel="modelled time (s)")
        ax.set_title(f"{arguments.data}, {arguments.workers[0]} workers, {named(rate)}")
    axes[0].set_ylabel("test accuracy (mean of the seeds)")
    plots.finish(figure, axes, arguments.workdir / "time.png")
