"""Learned gradient compression: accuracy, error and bytes, with controls at equal bits.

scripts/study lgc                                Fashion-MNIST, 8 and 4 workers
scripts/study lgc --data digits --steps 400
scripts/study lgc --steps 400 --batch 1024    gradients of larger batches
scripts/study lgc --workers 8 --controls lgc_ring:channels=8@0.01

What a claim rests on is run with all seeds and for every number of workers; controls
with the first few seeds for the first number of workers. ``VARIANT@=OTHER`` is VARIANT
at the density at which it says as many bytes as OTHER does at a density of 1 %.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from jaxsparse.arguments import entries
from jaxsparse.codec import message_words
from study import learned, plots, runs
from study.results import markdown, publish
from study.runs import Run
from study.variants import exchange_of, parse
from train.report import write_json

DENSITY = 0.01
CLAIM = ["dense@1", "topk@0.01", "lgc_server@0.01", "lgc_ring@0.01"]
CONTROLS = [
    "lgc_server:code=mean@0.01",
    "lgc_server:code=linear@0.01",
    "lgc_server:code=identity,latent=bfloat16,innovation=0@0.01",
    "lgc_server:innovation_codec=int8@0.01",
    "lgc_server:channels=4,innovation=0.1@0.01",
    "lgc_server:dense=0@0.01",
    "lgc_server:preset=paper@0.01",
    "lgc_ring:code=mean,latent_bits=16@0.01",
    "lgc_ring:code=linear@0.01",
    "lgc_ring:code=identity@0.01",
    "lgc_ring:code=identity,latent_bits=16@0.01",
    "lgc_ring:code=identity,latent_bits=16,support=leader@0.01",
    "lgc_ring:preset=paper@0.01",
    "topk:start=0.1@0.00125",
    "topk:codec=sign_mean,start=0.1@0.00125",
    "topk:start=0.1@=lgc_server",
    "topk:codec=sign_mean,start=0.1@=lgc_server",
    "topk:start=0.1@=lgc_ring",
    "topk:codec=sign_mean,start=0.1@=lgc_ring",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=(8, 4))
    for name, default in (("claim", CLAIM), ("controls", CONTROLS)):
        parser.add_argument(f"--{name}", nargs="*", default=default)
    parser.add_argument(
        "--control-seeds", type=int, default=2, help="how many of the seeds"
    )


def codec_of(variant: str) -> js.Codec:
    """How a variant of plain top-k writes its values."""
    return getattr(js.codec, parse(variant)[1].get("codec", "bfloat16"))()


def resolved(item: str, workers: int, n: int) -> tuple[str, float]:
    """Variant and density of ``VARIANT@DENSITY`` or ``VARIANT@=OTHER``."""
    variant, _, density = item.rpartition("@")
    parse(variant)
    if not density.startswith("="):
        try:
            return variant, float(density)
        except ValueError as error:
            raise ValueError(
                f"{item!r} must be VARIANT@DENSITY or @=VARIANT."
            ) from error
    name, settings = parse(density[1:])
    k = entries(DENSITY, n)
    most = learned.payload(name, settings, workers, k, n).mean / 4
    codec = codec_of(variant)
    fitting = [k for k in range(1, n) if message_words(n, k, codec) <= most]
    if not fitting:
        raise ValueError(f"{item!r}: {density[1:]} says less than one entry takes.")
    return variant, (fitting[-1] - 0.5) / n  # rounded up to entries


def wanted(arguments: argparse.Namespace, workers: int, n: int) -> dict[Run, list[int]]:
    """The runs for a number of workers, and the seeds of each."""
    seeds = arguments.seeds
    asked = [(item, seeds) for item in arguments.claim]
    if workers == arguments.workers[0]:
        asked += [
            (item, seeds[: arguments.control_seeds]) for item in arguments.controls
        ]
    return {Run(*resolved(i, workers, n), workers, 0): s for i, s in asked}


def said(figures: dict[str, Any], setting: Any, n: int) -> dict[str, float]:
    """Bytes of one worker: payload up in a steady step, on its link, in a mean step."""
    variant, workers = figures["variant"], figures["workers"]
    name, settings = parse(variant)
    k = entries(figures["density"], n)
    setting = setting._replace(workers=workers)
    if name == "dense":
        step = js.cost.dense(workers, n)
        return {"up": step.up, "link": step.link, "run": step.up}
    if name not in learned.SETTINGS:
        step = js.cost.all_gather(workers, k, n, codec=codec_of(variant))
        start = settings.get("start", 0.0)
        run = start * 4 * n + (1 - start) * step.up
        return {"up": step.up, "link": step.link, "run": run}
    exchange = exchange_of(variant, figures["density"], setting)
    model = jax.ShapeDtypeStruct((n,), "float32")
    payload = learned.payload(name, settings, workers, k, n)
    opened = figures["late"]["gate"]

    def on_average(latent: float, plain: float) -> float:
        return opened * latent + (1 - opened) * plain

    first, second = settings.get("dense", learned.DENSE), learned.TRAINED
    last = 2 if first else 1  # of the stages; there may be no dense one
    links = [
        learned.link(exchange, model, workers, phases=last, gate=gate)
        for gate in (1, 0)
    ]
    up = on_average(payload.mean, payload.plain_mean)
    training = learned.training_bytes(name, settings, workers, k, n)
    run = first * 4 * n + (second - first) * training + (1 - second) * up
    return {"up": up, "link": on_average(*links), "run": run}


def run(arguments: argparse.Namespace) -> None:
    """Trains all variants, then tables and draws them."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.controls = ["topk:start=0.1@=lgc_server"]
    n = runs.entries_of_model(kept.task, kept.splits)
    found: list[dict[str, Any]] = []
    for workers in arguments.workers:
        for each, seeds in wanted(arguments, workers, n).items():
            figures = kept.mean(each, seeds)
            found.append({**figures, **said(figures, kept.setting, n)})
    place = f"lgc-{kept.name}"
    write_json(arguments.workdir / f"{place}.json", found)
    picture(arguments.workdir / f"{place}.png", found, arguments)
    title = f"`{arguments.data}`, {n:,} parameters, {arguments.steps} steps of "
    title += f"{kept.setting.examples} examples.\n\n"
    text = "\n\n".join(table(found, workers) for workers in arguments.workers)
    publish(place, title + text, arguments.workdir, write=arguments.write)


def table(found: list[dict[str, Any]], workers: int) -> str:
    """One table for a number of workers."""
    mine = [f for f in found if f["workers"] == workers]
    dense = next((f["accuracy"] for f in mine if f["variant"] == "dense"), None)
    top_k = next((f["up"] for f in mine if f["variant"] == "topk"), None)
    header = ["variant", "density", "seeds", "accuracy", "deviation", "against dense"]
    header += ["NMSE", "bytes up", "below top-k", "on the link", "mean of the run"]
    rows = []
    for f in mine:
        several = len(f["accuracies"]) > 1
        deviation = statistics.stdev(f["accuracies"]) if several else 0
        known = f["variant"].startswith("lgc")
        rows.append(
            [
                f"`{f['variant']}`",
                f"{f['density']:.3%}",
                str(len(f["accuracies"])),
                f"{f['accuracy']:.2%}",
                f"{100 * deviation:.2f}",
                "" if dense is None else f"{100 * (f['accuracy'] - dense):+.2f}",
                f"{f['late']['nmse']:.4f}" if known else "",
                f"{f['up']:,.0f}",
                f"{top_k / f['up']:.2f} x" if top_k else "",
                f"{f['link']:,.0f}",
                f"{f['run']:,.0f}",
            ]
        )
    return f"{workers} workers:\n\n{markdown(header, rows)}"


def picture(path, found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Accuracy against bytes, and the code's error over the steps."""
    workers = arguments.workers[0]
    mine = [f for f in found if f["workers"] == workers]
    figure, axes = plots.panels(2, sharey=False)
    dense = [f["accuracy"] for f in mine if f["variant"] == "dense"]
    for i, f in enumerate(f for f in mine if f["variant"] != "dense"):
        label = f["variant"] + (
            "" if f["density"] == DENSITY else f" {f['density']:.2%}"
        )
        mark = plots.MARKS[i % len(plots.MARKS)]
        plots.points(axes[0], [f["up"]], [f["accuracies"]], label, marker=mark)
        if f["variant"].startswith("lgc") and any(f["nmse_curve"]):
            steps = np.linspace(0, 1, len(f["nmse_curve"])) * arguments.steps
            axes[1].plot(steps, f["nmse_curve"], label=f["variant"])
    for accuracy in dense:
        axes[0].axhline(accuracy, color="k", ls=":", label="dense")
    axes[0].set(
        xscale="log",
        xlabel="payload up, later steps (bytes per worker and step)",
        ylabel="test accuracy (mean, lowest, highest of the seeds)",
    )
    axes[1].set(yscale="log", xlabel="step", ylabel="reconstruction error (NMSE)")
    axes[0].set_title(f"{arguments.data}, {workers} workers, {arguments.steps} steps")
    plots.finish(figure, axes, path)
