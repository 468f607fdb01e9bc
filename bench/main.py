"""Times, bytes and memory of the methods: one JSON line for each method and model.

scripts/bench                                     ResNet-50's shapes, one worker
scripts/bench --hosts 4 --rate 200mbit            four test hosts (root, iproute2)
scripts/bench --models lenet 125000000 --methods dense topk server power_sgd

A step is what lies between a worker's gradient and its updated parameters, the network
included. Units are in the names: `step_ms` is the median of `--steps` steps after
`--burn-in` others, `link_bytes` what the program's collectives move on one worker's
link in a step, `nic_sent_bytes` what the host's interface counted, `memory_vectors` the
peak memory of a worker in n-vectors of float32 by XLA's account. Steps on all the hosts
of a test bed share this machine's cores. With --batch it is a whole training step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from bench import testbed, worker
from study.results import DOCS, markdown, publish
from train.errors import SetupError

DOCUMENT = DOCS / "performance.md"
SHOWN = {
    "model": "model",
    "method": "method",
    "step_ms": "step (ms)",
    "payload_up_bytes": "payload up",
    "link_bytes": "on the link",
    "nic_sent_bytes": "counted",
    "memory_vectors": "memory (n-vectors)",
    "compile_ms": "compile (ms)",
}


def commands(arguments: argparse.Namespace) -> list[str]:
    """The command line that measures."""
    own = [sys.executable, "-m", "bench.worker"]
    for name in ("models", "methods"):
        own += [f"--{name}", *getattr(arguments, name)]
    for name in ("density", "steps", "burn_in", "workers", "batch"):
        own += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    if arguments.hosts is None:
        return own
    bed = [sys.executable, "-m", "bench.testbed", "-n", str(arguments.hosts)]
    bed += ["--rate", arguments.rate] if arguments.rate else []
    joined = ["--coordinator={coordinator}", "--num-processes={hosts}"]
    return [*bed, "--", *own, *joined, "--process-id={host}"]


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The records, as they come. Other output goes to stderr.

    Raises:
      SystemExit: with the status of the bench that failed.
    """
    process = subprocess.Popen(commands(arguments), stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout or ():
            said = line.removeprefix("[0] ")
            if said.startswith("bench {"):
                record = json.loads(said.removeprefix("bench "))
                yield {**record, "rate": arguments.rate if arguments.hosts else None}
            elif not line.startswith("[") or "rror" in line:
                print(line, end="", file=sys.stderr, flush=True)
        if status := process.wait():
            sys.exit(status)
    finally:
        process.terminate()
        process.wait()


def table(records: list[dict[str, Any]]) -> str:
    """The records as Markdown, with the times as multiples of dense averaging's."""
    keys = [key for key in SHOWN if any(key in record for record in records)]
    rows = []
    for record in records:
        row = []
        for key in keys:
            value = record.get(key, "")
            if isinstance(value, (int, float)):
                value = f"{value:.1f}" if value < 100 else f"{value:,.0f}"
            row.append(value)
        rows.append([*row, times_faster(record, records)])
    return markdown([*(SHOWN[key] for key in keys), "than dense"], rows)


def times_faster(record: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """How much faster than dense averaging on the same model.

    >>> dense = {"model": "lenet", "method": "dense", "step_ms": 10.0}
    >>> times_faster({"model": "lenet", "method": "topk", "step_ms": 4.0}, [dense])
    '2.5 x'
    """
    for other in records:
        if other["method"] == "dense" and other["model"] == record["model"]:
            return f"{other['step_ms'] / record['step_ms']:.1f} x"
    return ""


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    worker.add_arguments(parser)
    parser.add_argument("--hosts", type=int, help="of a test bed; default: none")
    parser.add_argument("--rate", help="of each host's link, as 200mbit")
    parser.add_argument("--workdir", type=Path, default=Path("runs", "bench"))
    parser.add_argument(
        "--write", metavar="PLACE", help="put the table into docs/performance.md there"
    )
    arguments = parser.parse_args()
    if arguments.rate and arguments.hosts is None:
        parser.error("--rate needs --hosts: without them there is no network.")
    if arguments.workers != 1 and arguments.hosts is not None:
        parser.error("--workers is for runs without --hosts: a host is one worker.")
    worker.check(arguments)
    check_places(arguments)
    records = []
    with (
        (arguments.workdir / "bench.jsonl").open("a") as file,
        contextlib.closing(measured(arguments)) as found,
    ):
        for record in found:
            records.append(record)
            print(json.dumps(record), flush=True)
            file.write(json.dumps(record) + "\n")
            file.flush()
    # Nothing but the records on stdout.
    tell(arguments, title(arguments) + table(records), sys.stderr)


def tell(arguments: argparse.Namespace, text: str, file: TextIO) -> None:
    """Puts a table into its place in the document, or prints it where there is none."""
    if arguments.write:
        folder = arguments.workdir
        publish(arguments.write, text, folder, write=True, document=DOCUMENT)
    else:
        print(text, file=file)


def check_places(arguments: argparse.Namespace) -> None:
    """Makes the folder of the results; refuses a document's place that isn't there.

    Raises:
      SetupError: for either; what is measured for long must find its place.
    """
    places = re.findall(r"<!-- (?!end -->)(.+?) -->", DOCUMENT.read_text())
    if arguments.write is not None and arguments.write not in places:
        raise SetupError(
            f"--write={arguments.write}: docs/{DOCUMENT.name} has no place of this "
            f"name; choose from {', '.join(places)}."
        )
    try:
        arguments.workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"--workdir={arguments.workdir} cannot be made: {error.strerror}. Name a "
            "folder that can be written to."
        ) from error


def command(main: Callable[[], None]) -> None:
    """Runs a command; it ends without a traceback where it is wrong or stopped."""
    # An end by a signal is an end by an exception: what was started is stopped.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        main()
        sys.stdout.flush()
    except (SetupError, testbed.TestbedError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # nobody reads: nor is there to be a word at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def title(arguments: argparse.Namespace) -> str:
    """What was measured, in a line."""
    where = f"{arguments.workers} workers in one process"
    if arguments.hosts:
        where = f"{arguments.hosts} hosts, {arguments.rate or 'links without a limit'}"
    return f"{where}; density {arguments.density:g}; {arguments.steps} steps.\n\n"


if __name__ == "__main__":
    command(main)
