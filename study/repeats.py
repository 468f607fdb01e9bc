"""How often large entries are large again within a few steps (thesis, 6.2).

scripts/study repeats                  Fashion-MNIST, 8 workers, 1 %, 2 seeds

An entry is large in a step if it is among the ``density`` largest of one worker: of its
gradient in training without compression, or of what it sent under top-k with momentum
correction, where what was sent starts again from nothing. If the large entries were
drawn anew at every step, ``1 - (1 - density)**W`` of them would come again within W.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from study import plots, runs
from study.results import markdown, publish
from study.simulation import AXIS, Simulation
from train.report import write_json

WINDOWS = (1, 2, 4, 8, 16, 31)  # steps; a history is one word of 32 bits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, workers=[8], seeds=[0, 1], densities=[0.01])


class History(NamedTuple):
    """Of each entry: bit w says whether it was large w steps ago."""

    words: js.WorkerLocal  # uint32, like the parameters


def remember(density: float) -> optax.GradientTransformation:
    """Passes gradients on, and remembers which entries of all layers were largest."""

    def update(updates, state, params=None):
        del params
        flat = jnp.concatenate([jnp.abs(g).ravel() for g in jax.tree.leaves(updates)])
        bound = jnp.min(jax.lax.top_k(flat, round(density * flat.size))[0])
        words = jax.tree.map(
            lambda word, g: (word << 1) | (jnp.abs(g) >= bound).astype(jnp.uint32),
            state.words.value,
            updates,
        )
        return updates, History(js.WorkerLocal(words))

    def init(params):
        words = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.uint32), params)
        return History(js.WorkerLocal(words))

    return optax.GradientTransformation(init, update)


def again(words: np.ndarray, window: int) -> tuple[int, int]:
    """Of the entries that were large ``window`` steps ago: how many were since; all.

    >>> again(np.array([0b101, 0b100, 0b001], np.uint32), 2)
    (1, 2)
    """
    before = (words >> np.uint32(window)) & np.uint32(1) == 1
    since = words & np.uint32(2**window - 1) != 0
    return int((before & since).sum()), int(before.sum())


def observed(kept: runs.Runs, kind: str, density: float, workers: int, seeds) -> dict:
    """Per layer: the share of large entries that come again within each window."""
    momentum = kept.setting.momentum
    if kind == "gradient":
        inner = js.momentum_correction(js.dense(axis_name=AXIS), momentum)
        exchange = optax.chain(remember(density), inner)
    else:
        history = js.frequency(window=32, weight=0.0, local=True)
        selection = js.top_k(density, history)
        reducer = js.sparse(selection, js.all_gather(), axis_name=AXIS)
        exchange = js.momentum_correction(reducer, momentum)
    setting = kept.setting._replace(workers=workers)
    simulation = Simulation(kept.task, exchange, kept.splits, setting)
    shares = []
    for seed in seeds:
        counts: dict[str, np.ndarray] = {}

        def watch(step: int, state: Any, counts=counts) -> None:
            if step <= 32:
                return
            for layer, words in layers(state, kind).items():
                found = np.array([again(words, w) for w in WINDOWS])
                counts[layer] = counts.get(layer, 0) + found

        simulation.run(seed, watch)
        print(f"{kind} at {density:g}, seed {seed}", flush=True)
        counts["all layers"] = np.sum(list(counts.values()), axis=0)
        shares.append(
            {k: (v[:, 0] / np.maximum(v[:, 1], 1)).tolist() for k, v in counts.items()}
        )
    return {layer: [share[layer] for share in shares] for layer in shares[0]}


def layers(state: Any, kind: str) -> dict[str, np.ndarray]:
    """All workers' histories, split into the model's layers: its kernels."""
    found = jax.tree.leaves(
        state.opt_state, is_leaf=lambda node: isinstance(node, js.WorkerLocal)
    )
    params = jax.tree_util.tree_flatten_with_path(state.params)[0]
    names = ["/".join(str(k.key) for k in path) for path, _ in params]
    if kind == "gradient":
        words = [x for x in found if isinstance(x, js.WorkerLocal)][0].value
        flat = [np.asarray(leaf) for leaf in jax.tree.leaves(words)]
    else:
        (word,) = (
            np.asarray(x.value)
            for x in found
            if isinstance(x, js.WorkerLocal)
            and getattr(x.value, "dtype", None) == jnp.uint32
        )
        sizes = [leaf.size for _, leaf in params]
        flat = np.split(word, np.cumsum(sizes)[:-1], axis=-1)
    return {n: w for n, w in zip(names, flat, strict=True) if n.endswith("kernel")}


def run(arguments: argparse.Namespace) -> None:
    """Trains, counts, and draws."""
    kept = runs.open_runs(arguments)
    workers = arguments.workers[0]
    found = {}
    for density in arguments.densities:
        for kind in ("gradient", "sent"):
            file = runs.kept_file(arguments, f"{kind}-{workers}-{density!r}")
            if not file.exists():
                shares = observed(kept, kind, density, workers, arguments.seeds)
                write_json(file, shares)
            found[kind, density] = json.loads(file.read_text())
    figure, axes = plots.panels(len(found))
    rows = []
    for ax, ((kind, density), shares) in zip(axes, found.items(), strict=True):
        for layer, samples in shares.items():
            style = {"color": "k", "lw": 2} if layer == "all layers" else {}
            plots.band(ax, WINDOWS, list(zip(*samples)), layer, **style)  # noqa: B905
            means = np.mean(samples, axis=0)
            rows.append([kind, f"{density:.2%}", layer, *(f"{m:.1%}" for m in means)])
        chance = [1 - (1 - density) ** w for w in WINDOWS]
        ax.plot(WINDOWS, chance, "k:", label="chance")
        rows.append([kind, f"{density:.2%}", "chance", *(f"{c:.1%}" for c in chance)])
        ax.set(xscale="log", xlabel="window W (steps)", ylim=(0, 1))
        ax.set_xticks(WINDOWS, [str(w) for w in WINDOWS])
        what = "largest of the gradient" if kind == "gradient" else "sent by top-k"
        ax.set_title(f"{what}, {density:g} of the entries")
    axes[0].set_ylabel("large again within W steps (share; seeds as bands)")
    plots.finish(figure, axes, arguments.workdir / "repeats.png")
    header = ["large", "density", "layer", *(f"W = {w}" for w in WINDOWS)]
    title = f"`{arguments.data}`, {workers} workers, {arguments.steps} steps, "
    title += f"{len(arguments.seeds)} seeds.\n\n"
    text = title + markdown(header, rows)
    publish("repeats", text, arguments.workdir, write=arguments.write)
