"""A long run that is killed, paused and starved ends with the bits of one that is not.

scripts/study soak                  2000 steps, 8 workers, 20 faults
scripts/study soak --method dgc --seed 3
scripts/study soak --quick

Both runs train on data with a NaN and an infinity in it. At random steps the second is
killed, killed while it saves, asked to stop, paused for ten seconds, or finds its disk
full; it is started again by the same command until it ends. The disk is a file system
in memory of this program alone: that needs root, or user namespaces; without them the
fault is left out, and said to be.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from study.results import markdown, publish
from train import history
from train.report import read_json, write_json

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds without a step after which a run hangs
DISK = 64 << 20  # bytes
OWN_MOUNTS = "JAXSPARSE_SOAK_OWN_MOUNTS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--method", default="dgc")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")


class Training:
    """One run of the trainer, started as often as it takes."""

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        """Starts nothing yet."""
        self.folder = folder / arguments.method
        self.log = arguments.workdir / f"{folder.name}.log"
        self.log.unlink(missing_ok=True)
        setup = f"--config={ROOT}/configs/digits.py:{arguments.method}"
        settings = {
            "num_workers": arguments.workers,
            "batch_size": 4,
            "steps": arguments.steps,
            "eval_every": 10,
            "checkpoint_every": 50,
            "data.data_dir": arguments.workdir / "data",
        }
        self._command = [sys.executable, "-m", "study.faulty", setup]
        self._command += [f"--workdir={folder}"]
        self._command += [f"--config.{key}={value}" for key, value in settings.items()]
        self._environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(arguments.workdir / "compiled"),
        }
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts it; what it says goes to the log."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    @property
    def step(self) -> int:
        """The last step that it has evaluated."""
        rows = history.read(self.folder)
        return rows[-1]["step"] if rows else 0

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written now."""
        return any(self.folder.glob("checkpoints/*tmp*"))

    def wait(self, until: Callable[[], bool]) -> bool:
        """Waits for something to become true; False if the program ended before.

        Raises:
          RuntimeError: no step for too long.
        """
        assert self.process is not None
        step, since = self.step, time.monotonic()
        while not until():
            if self.process.poll() is not None:
                return until()
            time.sleep(0.002)
            if self.step != step:
                step, since = self.step, time.monotonic()
            if time.monotonic() - since > PATIENCE:
                self.process.kill()
                raise RuntimeError(
                    f"It hangs: no step after {step} for {PATIENCE} s. See {self.log}."
                )
        return True

    def end(self) -> int:
        """Waits for the end; the exit status."""
        assert self.process is not None
        self.wait(lambda: self.process.poll() is not None)
        return self.process.wait()

    def close(self) -> None:
        """Ends what still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)


def kill(run: Training) -> str:
    """SIGKILL between two instructions."""
    time.sleep(random.random())
    run.signal(signal.SIGKILL)
    return f"ended with {run.end()}"


def kill_saving(run: Training) -> str:
    """SIGKILL while a checkpoint is written."""
    run.wait(lambda: run.saving)
    run.signal(signal.SIGKILL)
    return f"ended with {run.end()}"


def stop(run: Training) -> str:
    """SIGTERM: it saves and ends."""
    run.signal(signal.SIGTERM)
    return f"ended with {run.end()}"


def pause(run: Training) -> str:
    """SIGSTOP for ten seconds; it goes on by itself."""
    run.signal(signal.SIGSTOP)
    time.sleep(10)
    run.signal(signal.SIGCONT)
    return "went on"


def fill(run: Training) -> str:
    """No room on the disk until it has ended."""
    ballast = run.folder.parent / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError:  # as wanted
        pass
    status = run.end()
    ballast.unlink()
    lines = run.log.read_text().splitlines()  # the disk's own words, and threads'
    told = [line for line in lines if line.startswith("error: ")]
    return f"ended with {status}: {told[-1] if told else 'without a word'}"


FAULTS: dict[str, Callable[[Training], str]] = {
    "killed": kill,
    "killed while saving": kill_saving,
    "asked to stop": stop,
    "paused": pause,
    "disk full": fill,
}


def run(arguments: argparse.Namespace) -> None:
    """Both runs, and what came of them."""
    if arguments.quick:
        arguments.steps, arguments.faults, arguments.workers = 300, 5, 2
    own = in_own_mounts()
    disk = arguments.workdir / "disturbed"
    disk.mkdir(exist_ok=True)
    if own:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)],
            check=True,
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and `close` what runs
    kinds = [kind for kind in FAULTS if own or kind != "disk full"]
    with (
        contextlib.closing(Training(arguments, arguments.workdir / "whole")) as whole,
        contextlib.closing(Training(arguments, disk)) as disturbed,
    ):
        print(f"undisturbed: {arguments.steps} steps, see {whole.log}", flush=True)
        whole.start()
        if whole.end() != 0:
            raise RuntimeError(f"The undisturbed run failed: see {whole.log}.")
        print(f"disturbed: see {disturbed.log}", flush=True)
        told = disturb(arguments, disturbed, kinds)
    problem = difference(whole, disturbed, arguments.steps)
    counts = skipped(whole, arguments.steps)
    rows = [
        [kind, str(len(steps)), ", ".join(map(str, steps))]
        for kind, steps in told.items()
    ]
    rows.append(["NaN or infinity", str(counts), "all workers skipped these steps"])
    text = (
        f"`{arguments.method}`, {arguments.workers} workers, {arguments.steps} steps, "
        f"seed {arguments.seed}. "
        + (problem or "Parameters, memories, moments and history are the same bits.")
        + "\n\n"
        + markdown(["fault", "times", "after step"], rows)
    )
    write_json(arguments.workdir / "data.json", {"faults": told, "skipped": counts})
    publish("soak", text, arguments.workdir, write=arguments.write)
    if problem:
        sys.exit(1)


def disturb(
    arguments: argparse.Namespace, training: Training, kinds: list[str]
) -> dict[str, list[int]]:
    """Trains to the end through all faults; the steps that they came after."""
    chance = random.Random(arguments.seed)
    planned = [kinds[i % len(kinds)] for i in range(arguments.faults)]
    chance.shuffle(planned)
    last = arguments.steps * 19 // 20
    moments = sorted(chance.randrange(1, last) for _ in planned)
    told: dict[str, list[int]] = {kind: [] for kind in kinds}
    training.start()
    for kind, moment in zip(planned, moments, strict=True):
        if not training.wait(lambda moment=moment: training.step >= moment):
            raise RuntimeError(f"It ended by itself: see {training.log}.")
        step = training.step
        outcome = FAULTS[kind](training)
        told[kind].append(step)
        print(f"after step {step}: {kind}; {outcome}", flush=True)
        if training.process is None or training.process.poll() is not None:
            training.start()
    if (status := training.end()) != 0:
        raise RuntimeError(f"It ended with {status}: see {training.log}.")
    return told


def in_own_mounts() -> bool:
    """Goes on in a mount namespace of its own; False where that is not allowed."""
    if OWN_MOUNTS in os.environ:
        return True
    command = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        print("No mount namespaces here: a full disk is not among the faults.")
        return False
    again = [*command, sys.executable, "-m", "study", *sys.argv[1:]]
    os.execvpe(again[0], again, {**os.environ, OWN_MOUNTS: "1"})


def saved(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a run's checkpoint by name, read without the trainer's code."""
    path = (folder / "checkpoints" / str(step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(path).item_metadata.tree
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return checkpointer.restore(path, restore_args=as_numpy)


def difference(one: Training, other: Training, step: int) -> str:
    """What differs between the ends of two runs, in words; "" if nothing does."""
    a, b = saved(one.folder, step), saved(other.folder, step)
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b or not np.array_equal(a[name], b[name]):
            return f"**{name} differs.**"
    histories = [(run.folder / "history.jsonl").read_text() for run in (one, other)]
    if histories[0] != histories[1]:
        return "**history.jsonl differs.**"
    first, second = (figures(run) for run in (one, other))
    return "" if first == second else "**summary.json differs.**"


def figures(training: Training) -> dict[str, Any]:
    """What the run's summary says, but for its time."""
    return {**read_json(training.folder / "summary.json"), "step_ms": 0}


def skipped(training: Training, step: int) -> int:
    """Steps that all workers skipped."""
    arrays = saved(training.folder, step)
    found = [a for name, a in arrays.items() if name.endswith(".skipped")]
    return int(np.max(found[0]))
