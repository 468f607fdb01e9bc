"""One run: one method, from its first or its last checkpoint's step to its summary."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import jaxsparse as js
from train import agreement, build, checkpoint, report
from train.data import Batches, evaluation_batches
from train.history import History
from train.ledger import TAKEN, Ledger
from train.log import Log
from train.parallel import AXIS, Workers, several
from train.prepared import GENERATED
from train.replicas import Replicas
from train.skips import Skips, first_bad
from train.splits import LazySplit, Split
from train.state import create
from train.step import Measured, eval_step, finite_step, train_step


class Stopped(Exception):
    """The run was asked to stop and has saved where it was."""


def run(
    config: ConfigDict,
    method: str,
    *,
    folder: Path,
    splits: dict[str, Split | LazySplit],
    workers: Workers,
    log: Log,
    should_stop: Callable[[int], bool],
) -> dict[str, Any]:
    """Trains with one method, or goes on where an earlier run of it stopped.

    Args:
      config: all settings.
      method: a key of ``config.methods``.
      folder: of this run; must exist.
      splits: the data.
      workers: the devices.
      log: where to speak.
      should_stop: ``step -> bool``, asked after every step, by all processes alike.

    Returns:
      What is in ``summary.json``.

    Raises:
      Stopped: ``should_stop`` said so; a checkpoint is saved.
      RunError: the run cannot go on; the last checkpoint stays.
    """
    # --- Build ---------------------------------------------------------------------
    task, tx = build.task(config), build.optimizer(config, method)
    batches = Batches(
        splits["train"],
        seed=config.seed,
        num_workers=config.num_workers,
        batch_size=config.batch_size,
    )
    example = jax.tree.map(lambda x: x[0], batches.at(0, workers.numbers))
    state = create(task, tx, config.seed, example)
    if several():  # to copy and digest a large state takes a time
        words = agreement.state(state.params, state._replace(params=None))
        agreement.agree(words, of=f"initial state of {method}")
    step_of_worker = train_step(task, tx)
    axis = {"axis_name": AXIS, "num_workers": config.num_workers}
    ledger = Ledger(tx, state.params, **axis)
    # Which leaves differ between workers; an error if the parameters would.
    is_local = js.local_leaves(step_of_worker, state, example, **axis)
    train = workers.map_train(step_of_worker, is_local)
    evaluate = workers.map_eval(eval_step(task, AXIS))
    identity = checkpoint.identity(config, method, state.params)
    shared, local = workers.place(*js.split(state, is_local))
    del state  # its buffers will be donated

    # --- Resume --------------------------------------------------------------------
    checkpoints = checkpoint.Checkpoints(
        folder, workers, identity, keep=config.checkpoints_kept, say=log.say
    )
    start = checkpoints.latest_step or 0
    history = History(folder, upto=start)
    if history.reaches(config.steps):
        summary = report.read_json(folder / "summary.json")
        if isinstance(summary, dict) and summary.get("method") == method:
            log.say(f"{method}: finished before, see {folder}; --fresh trains it again")
            return summary
    if start:
        shared, local, progress = checkpoints.restore(shared, local)
        ledger.restart(progress)
        log.say(f"{method}: goes on after step {start} of {config.steps}, see {folder}")
        if checkpoints.changed:
            log.say(f"{method}: {words_of_change(checkpoints.changed, config)}")

    # --- Train ---------------------------------------------------------------------
    finite = workers.map_look(finite_step(task))

    def whose(step: int) -> str:
        rows = finite(shared, local, batches.at(step - 1, workers.numbers))
        return first_bad(rows, shared.params)

    skips = Skips(config.max_consecutive_skips, start, whose)
    replicas = Replicas(workers, is_local, config.check_replicas_every)

    def book(step: int, measured: Measured) -> float:
        """Takes note of a step; returns its loss, mean of our workers."""
        loss, metrics = jax.device_get((measured.loss, measured.js))
        # These are the same on every worker.
        ledger.add(**{name: int(getattr(metrics, name)[0]) for name in TAKEN})
        skips.add(step, int(metrics.consecutive[0]))
        return float(loss.mean())

    def test(step: int, train_loss: float | None) -> str:
        totals = [
            evaluate(shared, local, batch)
            for batch in evaluation_batches(
                splits["test"],
                workers=workers.numbers,
                num_workers=config.num_workers,
                batch_size=config.eval_batch_size,
            )
        ]
        summed = jax.tree.map(lambda *x: np.sum(x, axis=0), *jax.device_get(totals))
        figures = {name: float(f(summed)) for name, f in task.figures.items()}
        row = {
            "step": step,
            **figures,
            "train_loss": train_loss,  # of this process's workers, at this step
            "payload_up_bytes": ledger.up,
            "payload_down_bytes": ledger.down,
        }
        history.add(row)
        sent = report.human_bytes(ledger.up)
        score = f"{report.words(task.score)} {figures[task.score]:.2%}"
        return f"{score}  loss {figures['loss']:.4f}  sent {sent}"

    stopwatch = Stopwatch()
    with log.progress(method, config.steps) as show:
        if start == 0:
            show(0, test(0, None))
        pending: Measured | None = None
        for step in range(start + 1, config.steps + 1):
            batch = batches.at(step - 1, workers.numbers)
            shared, local, measured = train(shared, local, batch)
            # Read the step before while this one runs: the devices never wait for us.
            if pending is not None:
                book(step - 1, pending)
                stopwatch.lap()
                show(step - 1, "")
            pending = measured

            last = step == config.steps
            stop = should_stop(step) and not last
            test_due = last or step % config.eval_every == 0
            save_due = last or stop or step % config.checkpoint_every == 0
            check_due = replicas.due(step)
            if test_due or save_due or check_due or skips.may_end:
                train_loss, pending = book(step, pending), None
                if check_due:  # before it is saved
                    replicas.check(step, shared, local)
                if test_due:
                    show(step, test(step, train_loss))
                if save_due:
                    checkpoints.save(step, shared, local, ledger.progress())
                stopwatch.restart()
            if stop:
                checkpoints.close()
                raise Stopped(f"{method}: stopped after step {step}, saved in {folder}")
        if not history.reaches(config.steps):  # it has been damaged
            show(config.steps, test(config.steps, None))
    checkpoints.close()

    # --- Summarise -----------------------------------------------------------------
    figures = {name: history.rows[-1][name] for name in task.figures}
    summary = summarise(config, method, figures, ledger, stopwatch.median_ms())
    if jax.process_index() == 0:
        report.write_json(folder / "summary.json", summary)
    return summary


def words_of_change(before: dict[str, Any], config: ConfigDict) -> str:
    """What differs where a run goes on with another number of workers."""
    batch = before.get("config.batch_size", config.batch_size)
    examples = config.num_workers * config.batch_size
    return (
        f"{config.num_workers} workers in place of {before['workers']}, the mean of "
        f"what they owe is kept; {examples} examples a step in place of "
        f"{before['workers'] * batch}, dealt out anew"
    )


def summarise(
    config: ConfigDict,
    method: str,
    figures: dict[str, float],
    ledger: Ledger,
    step_ms: float | None,
) -> dict[str, Any]:
    """What a run's ``summary.json`` says; bytes are those of one worker."""
    # Figures of generated data must not be taken for others, wherever they get to.
    generated = config.data.name.startswith(GENERATED)
    # A steady step is one of the phase that the run ended in: after any warm-up.
    up, down = ledger.per_step(ledger.phase, ledger.rung, ledger.gate)
    dense_bytes = ledger.dense_per_step * config.steps
    return {
        **({"setup": config.setup} if generated else {}),
        "method": method,
        "workers": config.num_workers,
        "steps": config.steps,
        **figures,
        "payload_up_bytes": ledger.up,
        "payload_down_bytes": ledger.down,
        "payload_up_bytes_per_step": up,
        "payload_down_bytes_per_step": down,
        "dense_bytes": dense_bytes,
        "dense_bytes_per_step": ledger.dense_per_step,
        "ratio": dense_bytes / ledger.up,
        "ratio_per_step": ledger.dense_per_step / up,
        "step_ms": step_ms,
    }


class Stopwatch:
    """Times of steps that follow each other without a pause."""

    def __init__(self):
        self._laps: list[float] = []
        self._since: float | None = None

    def lap(self) -> None:
        """A step has ended; its time counts if the one before ended here too."""
        now = time.perf_counter()
        if self._since is not None:
            self._laps.append(now - self._since)
        self._since = now

    def restart(self) -> None:
        """Something other than a step has taken time."""
        self._since = None

    def median_ms(self) -> float | None:
        """Milliseconds of the median step; None if none was timed."""
        return 1000 * statistics.median(self._laps) if self._laps else None
