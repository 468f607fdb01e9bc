"""What one method costs, measured in this process, alone or with others."""

from __future__ import annotations

import re
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

import jaxsparse as js
from bench import work
from configs import common
from study.clock import median_seconds
from train import build
from train.parallel import AXIS, Workers

NIC = Path("/sys/class/net/eth0/statistics")  # of a test host


def config_of(method: str, workers: int, density: float, steps: int) -> ConfigDict:
    """The trainer's settings of a method; the optimizer behind it is plain SGD.

    Warm-ups and stages are over from the first step on: the steady state is measured.
    """
    config = common.get_config(method, default_names=method)
    config.num_workers, config.density, config.steps = workers, density, steps
    config.skip_nonfinite = False
    settings = config.methods[method]
    settings.sgd_momentum = 0.0
    for key in ("warmup_steps", "dense_until", "training_until"):
        if key in settings:
            settings[key] = 0
    for key in ("dense_layers", "top_k_layers", "warmup_densities"):
        if key in settings:
            settings[key] = ()
    return config


def selection(n: int, density: float, repeats: int) -> dict[str, float]:
    """The exact selection of the largest entries, in read passes over the same data."""
    x = jax.random.normal(jax.random.key(0), (n,))
    select = js.top_k(density).select
    read = jax.jit(lambda x: jnp.max(jnp.abs(x)))
    choose = jax.jit(lambda x: select(x, ())[0])
    found = {
        "read_ms": 1e3 * median_seconds(lambda: read(x), repeats),
        "selection_ms": 1e3 * median_seconds(lambda: choose(x), repeats),
    }
    return {**found, "selection_passes": found["selection_ms"] / found["read_ms"]}


def moved() -> dict[str, int]:
    """Bytes that have left and reached this test host."""
    if jax.process_count() == 1 or not NIC.exists():
        return {}
    ways = {"nic_sent": "tx_bytes", "nic_received": "rx_bytes"}
    return {name: int((NIC / file).read_text()) for name, file in ways.items()}


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(
    method: str,
    shapes: Any,
    workers: Workers,
    *,
    density: float,
    steps: int,
    burn_in: int,
    train: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """The figures of a method.

    Args:
      method: its name in configs/methods.py.
      shapes: the parameters, abstract.
      workers: all of them, in one process or several.
      density: of the sparse methods.
      steps: that are timed.
      burn_in: steps before these.
      train: a model of `work.TRAINED` and its batch, for whole training steps in the
        place of exchanges alone.

    Returns:
      A record: milliseconds of a step and their spread, and of its compilation; bytes
      of one worker's payload and of its link by the program, and those that the
      network's interface counted; in one process memory of the compiled step by XLA's
      own account; what the process grew by from the first to the last timed step.
    """
    config = config_of(method, workers.num_workers, density, steps + burn_in)
    tx = build.optimizer(config, method)
    if train is None:
        doing = work.exchange(tx, shapes, workers.numbers)
    else:
        doing = work.training(tx, *train, workers.numbers)
    of_one = jax.tree.map(lambda x: x[0], doing.inputs[0])
    place = jax.pmap(lambda x: x)  # on the workers' devices, as the step wants them
    inputs = [place(x) for x in doing.inputs]
    axis = {"axis_name": AXIS, "num_workers": workers.num_workers}
    is_local = js.local_leaves(doing.step, jax.eval_shape(doing.init), of_one, **axis)
    shared, own = workers.place(*js.split(jax.jit(doing.init)(), is_local))
    mapped = workers.map_train(doing.step, is_local)
    found: dict[str, Any] = {}
    if jax.process_count() == 1:  # over several, JAX calls no compiled pmap
        start = time.perf_counter()
        mapped = mapped.lower(shared, own, inputs[0]).compile()
        found["compile_ms"] = 1e3 * (time.perf_counter() - start)
        found |= memory(mapped, shapes)

    taken, before, size, way = [], {}, 0, None
    for i in range(burn_in + steps):
        if i == burn_in:
            before, size = moved(), resident()
        start = time.perf_counter()
        shared, own, way = mapped(shared, own, inputs[i % 2])
        jax.block_until_ready((shared, own))
        taken.append(1e3 * (time.perf_counter() - start))
    after, grown = moved(), resident() - size
    taken, quarter = taken[burn_in:], max(1, steps // 4)
    first = jax.tree.map(lambda x: x[0], jax.device_get(way))
    up, down, link = said(tx, shapes, workers.num_workers, first)
    return {
        "method": method,
        "workers": workers.num_workers,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes)),
        "density": density,
        "batch_size": train[1] if train else None,
        "steps": steps,
        "step_ms": statistics.median(taken),
        "step_ms_lowest": min(taken),
        "step_ms_highest": max(taken),
        "step_ms_first_quarter": statistics.median(taken[:quarter]),
        "step_ms_last_quarter": statistics.median(taken[-quarter:]),
        "payload_up_bytes": up,
        "payload_down_bytes": down,
        "link_bytes": link,
        **{f"{key}_bytes": (after[key] - before[key]) / steps for key in after},
        **found,
        "growth_bytes": grown,
    }


def said(
    tx: optax.GradientTransformation,
    shapes: Any,
    workers: int,
    way: work.Branches | None = None,
) -> tuple[int, int, int]:
    """Bytes of a step of one worker: payload up and down, and on its link.

    Without ``way`` it is a step of the last phase whose selections have nothing in
    common: a ladder's last rung.
    """
    state = jax.eval_shape(tx.init, shapes)
    jaxpr = jax.make_jaxpr(tx.update, axis_env=[(AXIS, workers)])
    traffic = js.traffic(jaxpr(shapes, state, shapes))
    taken = {"phases": 0, "ladder": 0, "gate": 1, "finite": 1}
    if way is None:
        for label, branch in re.findall(r"(phases|ladder)\[(\d+)\]", " ".join(traffic)):
            taken[label] = max(taken[label], int(branch))
    else:
        taken |= {"phases": way.phase, "ladder": way.rung, "gate": way.gate}
    taken = {label: int(branch) for label, branch in taken.items()}
    up, down = js.payload_bytes(traffic, workers, **taken)
    return up, down, js.link_bytes(traffic, workers, **taken)


def memory(compiled: Any, shapes: Any) -> dict[str, float]:
    """Peak memory of one worker's step: what goes in and out and is needed between.

    In bytes, and in vectors of float32 as long as the parameters.
    """
    found = compiled.memory_analysis()
    alive = found.argument_size_in_bytes + found.temp_size_in_bytes
    alive += found.output_size_in_bytes - found.alias_size_in_bytes
    vector = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return {
        "memory_bytes": alive,
        "memory_vectors": alive / vector,
        "scratch_vectors": found.temp_size_in_bytes / vector,
    }
