"""Workers as devices under pmap, in one process or several: nothing else knows pmap.

A run's state goes about in two parts (`jaxsparse.split`): ``shared`` is the same on
every worker and has no worker axis, ``local`` has one in front. So the axes are a plain
``(None, 0)``, which pmap over several processes needs: it can't hash a tree with dicts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxsparse as js
from train import lost
from train.errors import SetupError

AXIS = "workers"

# How many processes a launcher has started, where it tells.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

# Seconds that devices of one process wait for each other before XLA warns and aborts,
# of which it has 20 and 40 by itself: a program that was paused may go on.
PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}


def start(
    num_workers: int,
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    lost_after_s: int = 100,
) -> None:
    """Joins the other processes, if any, and makes CPU devices for this one's workers.

    Must come before the first use of a device.

    Args:
      num_workers: over all processes.
      coordinator: ``host:port`` of process 0. None where a launcher that JAX knows
        (Slurm, Open MPI) has started several, or where there is one.
      num_processes: how many there are; with ``coordinator``.
      process_id: which this one is, from 0; with ``coordinator``.
      lost_after_s: seconds without a sign of life after which a process is given up.
    """
    flags = (coordinator, num_processes, process_id)
    if any(flag is not None for flag in flags) and None in flags:
        raise SetupError(
            "--coordinator, --num_processes and --process_id belong together, got "
            f"{coordinator}, {num_processes} and {process_id}."
        )
    found = max(int(os.environ.get(name, 1)) for name in LAUNCHERS)
    processes = num_processes or found
    if num_workers < 1 or num_workers % processes:
        raise SetupError(
            f"config.num_workers={num_workers} must be a positive multiple of the "
            f"number of processes, {processes}."
        )
    if not lost_after_s >= 1:  # the other values are checked later: this is used now
        raise SetupError(f"config.lost_after_s={lost_after_s} must be at least 1.")
    jax.config.update("jax_num_cpu_devices", num_workers // processes)
    os.environ["XLA_FLAGS"] = patient(os.environ.get("XLA_FLAGS", ""))
    if processes > 1:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=lost_after_s,
            shutdown_timeout_seconds=lost_after_s,
        )
        lost.speak_on_abort()


def several() -> bool:
    """Whether there are other processes; asks none of them."""
    return jax.distributed.is_initialized()


def patient(flags: str) -> str:
    """XLA's flags, with `PATIENCE` where they say nothing of it.

    >>> patient("--xla_cpu_collective_call_terminate_timeout_seconds=9").split()[1:]
    ['--xla_cpu_collective_call_warn_stuck_timeout_seconds=120']
    """
    added = [f"{name}={value}" for name, value in PATIENCE.items() if name not in flags]
    return " ".join([*flags.split(), *added])


class Workers:
    """The workers of a run, and how functions and arrays are spread over them."""

    def __init__(self, num_workers: int):
        """Takes the first devices of every process.

        Args:
          num_workers: over all processes.
        """
        here = num_workers // jax.process_count()
        if jax.local_device_count() < here:
            raise SetupError(
                f"config.num_workers={num_workers} needs {here} devices in each of "
                f"{jax.process_count()} processes, and here are {jax.devices()}. Set "
                "JAX_PLATFORMS=cpu to use CPU devices, or lower --config.num_workers."
            )
        self.num_workers = num_workers
        devices = [d for p in range(jax.process_count()) for d in _devices(p)[:here]]
        self._mesh = Mesh(np.array(devices), (AXIS,))
        self._pmap = functools.partial(jax.pmap, axis_name=AXIS, devices=devices)
        here_only = self._mesh.local_mesh
        self._everywhere = NamedSharding(here_only, PartitionSpec())
        self._by_worker = NamedSharding(here_only, PartitionSpec(AXIS))
        first = jax.process_index() * here
        self.numbers = range(first, first + here)  # the workers of this process

    def place(self, shared: Any, local: Any) -> tuple[Any, Any]:
        """Gives the local part its worker axis: this process's workers, all alike."""
        # Placed as a step returns them: else the second step would compile anew.
        return jax.device_put(
            (shared, js.stack_workers(local, len(self.numbers))),
            (self._everywhere, self._by_worker),
        )

    def from_host(self, shared: Any, local: Any) -> tuple[Any, Any]:
        """Places what every process has whole, ``local`` of the workers of all."""
        mine = slice(self.numbers.start, self.numbers.stop)
        return jax.device_put(
            (shared, jax.tree.map(lambda x: x[mine], local)),
            (self._everywhere, self._by_worker),
        )

    def wait_for_all(self) -> None:
        """Returns when every process has come here."""
        multihost_utils.sync_global_devices("wait_for_all")

    def from_first(self, number: int) -> int:
        """Process 0's number, in every process: what one decides for all."""
        return int(multihost_utils.broadcast_one_to_all(np.int32(number)))

    def from_all(self, number: int) -> list[int]:
        """Every process's number, in every process."""
        if jax.process_count() == 1:
            return [number]
        found = multihost_utils.process_allgather(np.int32(number))
        return [int(one) for one in found]

    def map_train(self, step: Callable, is_local: Any) -> Callable:
        """``(shared, local, batch) -> (shared, local, measured)``; state is donated.

        Args:
          step: ``(state, batch) -> (state, measured)`` of one worker.
          is_local: the tree of bools that the state was split by.

        Returns:
          The step of all workers; ``measured`` gets a worker axis.
        """

        def mapped(shared, local, batch):
            state, measured = step(js.merge(shared, local), batch)
            return *js.split(state, is_local), measured

        axes = {"in_axes": (None, 0, 0), "out_axes": (None, 0, 0)}
        return self._pmap(mapped, **axes, donate_argnums=(0, 1))

    def map_look(self, step: Callable) -> Callable:
        """``(shared, local, *batch) -> rows``, a row of every worker, in every process.

        Args:
          step: ``(state, *batch) -> row`` of one worker, without collectives; the
            state stays.

        Returns:
          The step of all workers; its rows are stacked, in NumPy.
        """

        def mapped(shared, local, *batch):
            return step(js.merge(shared, local), *batch)

        def look(shared, local, *batch):
            axes = (None, 0, *(0 for _ in batch))
            rows = self._pmap(mapped, in_axes=axes)(shared, local, *batch)
            return multihost_utils.process_allgather(jax.device_get(rows), tiled=True)

        return look

    def map_eval(self, step: Callable) -> Callable:
        """``(shared, local, batch) -> totals``, the same on every worker."""

        def mapped(shared, local, batch):
            return step(js.merge(shared, local), batch)

        return self._pmap(mapped, in_axes=(None, 0, 0), out_axes=None)

    def to_global(self, shared: Any, local: Any) -> tuple[Any, Any]:
        """Arrays over all processes, as a checkpoint wants them."""
        if jax.process_count() == 1:
            return shared, local
        convert = multihost_utils.host_local_array_to_global_array
        return (
            convert(shared, self._mesh, PartitionSpec()),
            convert(local, self._mesh, PartitionSpec(AXIS)),
        )

    def to_local(self, shared: Any, local: Any) -> tuple[Any, Any]:
        """The inverse of `to_global`."""
        if jax.process_count() == 1:
            return shared, local
        convert = multihost_utils.global_array_to_host_local_array
        return (
            convert(shared, self._mesh, PartitionSpec()),
            convert(local, self._mesh, PartitionSpec(AXIS)),
        )

    def abstract(self, shared: Any, local: Any) -> tuple[Any, Any]:
        """Shapes and places of what `to_global` gives, without the arrays."""

        def describe(x, shape, spec):
            return jax.ShapeDtypeStruct(
                shape, x.dtype, sharding=NamedSharding(self._mesh, spec)
            )

        everyone = (self.num_workers,)
        return (
            jax.tree.map(lambda x: describe(x, x.shape, PartitionSpec()), shared),
            jax.tree.map(
                lambda x: describe(x, everyone + x.shape[1:], PartitionSpec(AXIS)),
                local,
            ),
        )


def _devices(process: int) -> list[jax.Device]:
    return [d for d in jax.devices() if d.process_index == process]
