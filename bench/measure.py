"""What one method costs, measured in this process, alone or with others.

A step here is all that lies between a worker's gradient and its updated parameters:
memory, selection, coding, exchange, decoding, the optimizer. The gradients are normal
numbers of an own scale for every leaf, made beforehand; two of them take turns.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

import jaxsparse as js
from configs import common
from train import build
from train.parallel import AXIS, Workers

NIC = Path("/sys/class/net/eth0/statistics")  # of a test host


class State(NamedTuple):
    """What a step carries; `js.local_leaves` looks for ``params``."""

    params: Any
    opt_state: Any


def config_of(method: str, workers: int, density: float, steps: int) -> ConfigDict:
    """The trainer's settings of a method, at a constant learning rate."""
    config = common.get_config(method, default_names=method)
    config.num_workers, config.density, config.steps = workers, density, steps
    config.model.name = "resnet"  # whose layers learned compression tells apart
    config.skip_nonfinite = False
    settings = config.methods[method]
    # Warm-ups and stages are over: what is measured is the steady state.
    for key in ("warmup_steps", "dense_until", "training_until"):
        if key in settings:
            settings[key] = 0
    for key in ("dense_layers", "top_k_layers", "warmup_densities"):
        if key in settings:
            settings[key] = ()
    return config


def gradients(shapes: Any, numbers: range, seed: int) -> Any:
    """Gradients of these workers, ``[workers, ...]`` each."""
    leaves, treedef = jax.tree.flatten(shapes)

    @jax.jit
    def draw(key):
        scales = jnp.exp(jax.random.normal(jax.random.key(1), (len(leaves),)))
        keys = jax.random.split(key, len(leaves))
        return [
            1e-3 * scales[i] * jax.random.normal(keys[i], leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]

    keys = [jax.random.fold_in(jax.random.key(seed), number) for number in numbers]
    drawn = [draw(key) for key in keys]
    return treedef.unflatten([jnp.stack(each) for each in zip(*drawn, strict=True)])


def seconds_of(call: Callable[[], Any], repeats: int) -> list[float]:
    """Times of a call until its result is there."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return taken


def moved() -> dict[str, int]:
    """Bytes that have left and reached this host, of the payload's interface."""
    if jax.process_count() == 1 or not NIC.exists():
        return {}
    ways = {"nic_sent": "tx_bytes", "nic_received": "rx_bytes"}
    return {name: int((NIC / file).read_text()) for name, file in ways.items()}


def selection(n: int, density: float, repeats: int) -> dict[str, float]:
    """The exact selection of the largest entries, in read passes over the same data."""
    x = jax.random.normal(jax.random.key(0), (n,))
    select = js.top_k(density).select
    ways = {
        "read_ms": jax.jit(lambda x: jnp.max(jnp.abs(x))),
        "selection_ms": jax.jit(lambda x: select(x, ())[0]),
    }
    found = {
        name: 1e3
        * statistics.median(seconds_of(lambda way=way: way(x), repeats + 3)[3:])
        for name, way in ways.items()
    }
    return {**found, "selection_passes": found["selection_ms"] / found["read_ms"]}


def step_of(tx: optax.GradientTransformation) -> Callable:
    """From a worker's gradient to its updated parameters."""

    def step(state: State, grads: Any) -> tuple[State, Any]:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), js.metrics(opt_state)

    return step


def measure(
    method: str,
    shapes: Any,
    workers: Workers,
    *,
    density: float,
    steps: int,
    burn_in: int,
) -> dict[str, Any]:
    """The figures of a method.

    Args:
      method: its name in configs/methods.py.
      shapes: the parameters, abstract.
      workers: all of them, in one process or several.
      density: of the sparse methods.
      steps: that are timed.
      burn_in: steps before these.

    Returns:
      A record: milliseconds of a step and their spread, and of its compilation; bytes
      of one worker's payload and of its link by the program, and those that the
      network's interface counted; memory of the compiled step by XLA's own account.
    """
    n = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    config = config_of(method, workers.num_workers, density, steps + burn_in)
    tx = build.optimizer(config, method)
    step = step_of(tx)
    abstract = jax.eval_shape(lambda: State(_zeros(shapes), tx.init(_zeros(shapes))))
    is_local = js.local_leaves(
        step, abstract, shapes, axis_name=AXIS, num_workers=workers.num_workers
    )
    state = jax.jit(lambda: State(_zeros(shapes), tx.init(_zeros(shapes))))()
    shared, own = workers.place(*js.split(state, is_local))
    del state
    given = [gradients(shapes, workers.numbers, seed) for seed in (0, 1)]
    mapped = workers.map_train(step, is_local)
    start = time.perf_counter()
    compiled = mapped.lower(shared, own, given[0]).compile()
    compile_seconds = time.perf_counter() - start

    measured = None
    taken, before = [], {}
    for i in range(burn_in + steps):
        if i == burn_in:
            before = moved()
        start = time.perf_counter()
        shared, own, measured = compiled(shared, own, given[i % 2])
        jax.block_until_ready((shared, own))
        taken.append(time.perf_counter() - start)
    after = moved()
    taken = taken[burn_in:]
    now = jax.tree.map(lambda x: x[0], jax.device_get(measured))
    up, down, link = said(tx, shapes, workers.num_workers, now)
    return {
        "method": method,
        "workers": workers.num_workers,
        "parameters": n,
        "density": density,
        "step_ms": 1e3 * statistics.median(taken),
        "step_ms_lowest": 1e3 * min(taken),
        "step_ms_highest": 1e3 * max(taken),
        "compile_ms": 1e3 * compile_seconds,
        "payload_up_bytes": up,
        "payload_down_bytes": down,
        "link_bytes": link,
        **{f"{key}_bytes": (after[key] - before[key]) / steps for key in after},
        **memory(compiled, n, len(workers.numbers)),
    }


def said(
    tx: optax.GradientTransformation, shapes: Any, workers: int, now: Any = None
) -> tuple[int, int, int]:
    """Bytes of a step of one worker: payload up and down, and on its link.

    ``now`` are the step's metrics, which tell its branches. Without them it is a step
    of the last phase whose selections have nothing in common: a ladder's last rung.
    """
    state = jax.eval_shape(tx.init, shapes)
    jaxpr = jax.make_jaxpr(tx.update, axis_env=[(AXIS, workers)])
    traffic = js.traffic(jaxpr(shapes, state, shapes))
    if now is None:
        last = {label: 0 for label in ("phases", "ladder")}
        for label, branch in re.findall(r"(phases|ladder)\[(\d+)\]", " ".join(traffic)):
            last[label] = max(last[label], int(branch))
        taken = {**last, "gate": 1, "finite": 1}
    else:
        taken = {"phases": now.phase, "ladder": now.rung, "gate": now.gate, "finite": 1}
    taken = {label: int(branch) for label, branch in taken.items()}
    up, down = js.payload_bytes(traffic, workers, **taken)
    return up, down, js.link_bytes(traffic, workers, **taken)


def memory(compiled: Any, n: int, workers_here: int) -> dict[str, float]:
    """Peak memory of a step of one worker: what goes in, out and is needed between."""
    found = compiled.memory_analysis()
    alive = found.argument_size_in_bytes + found.temp_size_in_bytes
    alive += found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "memory_bytes": alive,
        "memory_vectors": alive / (4 * n),
        "scratch_vectors": found.temp_size_in_bytes / (4 * n),
    }


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
