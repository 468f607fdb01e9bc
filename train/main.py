"""Trains a model with compressed gradients and compares methods.

    python -m train.main [--config=configs/NAME.py:METHOD] [--config.KEY=VALUE ...]

`scripts/train` does the same and sets up what is needed first. One run is in `loop.py`,
what it is made of in `build.py`. Several processes train together if each gets
--coordinator, --num_processes and its own --process_id, or a launcher such as Slurm's
starts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict

from train import (
    agreement,
    build,
    checkpoint,
    history,
    lock,
    loop,
    lost,
    parallel,
    report,
)
from train import flags as train_flags
from train.checks import check
from train.errors import RunError, SetupError
from train.interrupt import Interrupt
from train.log import Log
from train.prepared import GENERATED

FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    """Runs the methods of a config one after another, then compares them."""
    if len(argv) > 1:
        raise SetupError(f"Unknown arguments: {' '.join(argv[1:])}.")
    logging.set_verbosity(logging.WARNING)  # orbax and TFDS tell a lot
    config = FLAGS.config
    parallel.start(
        config.num_workers,
        coordinator=FLAGS.coordinator,
        num_processes=FLAGS.num_processes,
        process_id=FLAGS.process_id,
        lost_after_s=config.lost_after_s,
    )
    agreement.agree(agreement.program(config, fresh=FLAGS.fresh), of="set-up")
    check(config)
    log, workers = Log(), parallel.Workers(config.num_workers)
    # What can be wrong is found now, and not after an hour.
    score = build.task(config).score
    for method in config.run:
        build.optimizer(config, method)
    if config.data.name.startswith(GENERATED):
        # Whatever setup it was: its results must say so.
        config.setup = GENERATED + config.setup.removeprefix(GENERATED)
    workdir = Path(FLAGS.workdir or Path("runs", config.setup))
    folders = {method: workdir / method for method in config.run}
    for folder in folders.values():
        make_folder(folder)
    with contextlib.ExitStack() as held:
        for folder in folders.values():
            held.enter_context(lock.only_user(folder, workers))
        if FLAGS.fresh and jax.process_index() == 0:
            for folder in folders.values():
                checkpoint.remove(folder)
        train(config, workdir, folders, workers, log, score)


def train(
    config: ConfigDict,
    workdir: Path,
    folders: dict[str, Path],
    workers: parallel.Workers,
    log: Log,
    score: str,
) -> None:
    """Trains with every method, each in its folder, and compares their scores."""
    workers.wait_for_all()  # a fresh start has removed what it must
    splits = build.splits(config)
    with Interrupt() as interrupt:
        summaries = [
            loop.run(
                config,
                method,
                folder=folder,
                splits=splits,
                workers=workers,
                log=log,
                should_stop=interrupt.asked,
            )
            for method, folder in folders.items()
        ]
    if jax.process_index() == 0:
        # Other methods that the folder holds stay in the comparison.
        for path in sorted(workdir.glob("*/summary.json")):
            if path.parent.name not in folders:
                other = report.read_json(path)  # None if it is damaged
                if isinstance(other, dict) and {score, *report.SUMMARY} <= other.keys():
                    summaries.append(other)
                    folders = {**folders, path.parent.name: path.parent}
        histories = {method: history.read(f) for method, f in folders.items()}
        report.write_json(workdir / "summary.json", summaries)
        report.picture(workdir / "results.png", config.setup, histories, score)
        log.console.print(report.table(summaries, score))
        log.say(
            f"In {workdir}: results.png, summary.json, and a folder for each method"
        )
    workers.wait_for_all()  # JAX would wait at the exit, but gives up after a time


def make_folder(folder: Path) -> None:
    """Makes a run's folder, and finds out whether it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SetupError(
            f"The run folder cannot be written: {error}. Choose another with --workdir."
        ) from error


def run() -> None:
    """The command: errors that a user can put right come without a traceback."""
    try:
        app.run(main, flags_parser=lambda argv: train_flags.parse(argv, FLAGS))
    except (RunError, SetupError) as error:
        sys.exit(f"error: {error}")
    except loop.Stopped as stopped:
        Log().say(f"{stopped}. The same command goes on from there.")
        sys.exit(130)  # as a shell reports an interrupted program
    except Exception as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            sys.exit(
                f"error: {error}. Make room on the disk; the same command goes on from "
                "the last checkpoint."
            )
        if parallel.several():
            lost.end(error)
        raise


if __name__ == "__main__":
    run()
