"""Every method of the trainer: are the workers' copies the same after many steps?

scripts/study replicas              1000 steps, 4 workers
scripts/study replicas --methods topk dgc --quick

A small net on digits, in all stages of each method. At the end the copies of all that
workers share (parameters, moments, the reducers' counters and codes) are compared, bit
for bit, and so are the parameters with those at the start: they must have moved.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxsparse as js
from configs.methods import all_methods
from jaxsparse import tree
from study.results import markdown, publish
from train import build
from train.data import Batches
from train.parallel import AXIS, Workers, start
from train.state import create
from train.step import train_step

ROOT = Path(__file__).parents[1]
WORKERS = 4
SMALL = {
    "model.channels": (2,),
    "model.hidden": 4,
    "num_workers": WORKERS,
    "batch_size": 4,
    "density": 0.1,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=1000)


def settings(method: str, steps: int) -> Any:
    """The setup of digits with a small net."""
    config = runpy.run_path(str(ROOT / "configs" / "digits.py"))["get_config"](method)
    config.update_from_flattened_dict({**SMALL, "steps": steps})
    return config


def trained(method: str, steps: int, data_dir: Path) -> tuple[Any, Any]:
    """What the workers share at the start, and after all steps."""
    config = settings(method, steps)
    config.data.data_dir = str(data_dir)
    workers = Workers(WORKERS)
    task, tx = build.task(config), build.optimizer(config, method)
    batches = Batches(
        build.splits(config)["train"],
        seed=0,
        num_workers=WORKERS,
        batch_size=config.batch_size,
    )
    of_one = jax.tree.map(lambda x: x[0], batches.at(0, workers.numbers))
    state, step = create(task, tx, 0, of_one), train_step(task, tx)
    is_local = js.local_leaves(step, state, of_one, axis_name=AXIS, num_workers=WORKERS)
    train = workers.map_train(step, is_local)
    shared, local = workers.place(*js.split(state, is_local))
    before = jax.device_get(shared)
    for i in range(steps):
        shared, local, _ = train(shared, local, batches.at(i, workers.numbers))
        jax.block_until_ready(local)  # many devices on few cores
    return before, shared


def differing(shared: Any) -> list[str]:
    """The leaves whose copies are not the same bits on all devices.

    >>> differing({"a": jax.numpy.zeros(3)})
    []
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(shared):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        copies = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        if any(copy != copies[0] for copy in copies):
            found.append(tree.name(path))
    return found


def run(arguments: argparse.Namespace) -> None:
    """All methods, one after another."""
    steps = 40 if arguments.quick else arguments.steps
    start(WORKERS)
    methods = arguments.methods or list(all_methods(settings("dense", steps)))
    rows = []
    for method in methods:
        before, after = trained(method, steps, arguments.workdir / "data")
        leaves, bad = len(jax.tree.leaves(after)), differing(after)
        moved = any(
            np.any(a != b)
            for a, b in zip(
                jax.tree.leaves(before.params),
                jax.tree.leaves(jax.device_get(after.params)),
                strict=True,
            )
        )
        words = "none" if moved and not bad else ", ".join(bad) or "did not train"
        rows.append([f"`{method}`", f"{leaves}", words])
        print(f"{method}: {words}", flush=True)
    text = f"{WORKERS} workers, {steps} steps.\n\n"
    text += markdown(["method", "shared leaves", "differ"], rows)
    publish("replicas", text, arguments.workdir, write=arguments.write)
    if any(row[-1] != "none" for row in rows):
        raise SystemExit(1)
