"""Runs a study: `scripts/study NAME [--quick] [--write]`.

Each study leaves a table (Markdown), its data (JSON) and where it helps a figure in
runs/study/NAME, goes on where it was interrupted, and with --write puts its table into
docs/results.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from study import (
    coding,
    information,
    largest,
    lgc,
    limit,
    message,
    network,
    ratios,
    repeats,
    replicas,
    reshard,
    seeds,
    selection,
    server,
    soak,
    time,
)

STUDIES = {
    "seeds": seeds,
    "message": message,
    "largest": largest,
    "repeats": repeats,
    "selection": selection,
    "limit": limit,
    "server": server,
    "time": time,
    "lgc": lgc,
    "information": information,
    "ratios": ratios,
    "coding": coding,
    "network": network,
    "reshard": reshard,
    "replicas": replicas,
    "soak": soak,
}


def main() -> None:
    """Parses the command line and runs one study."""
    parser = argparse.ArgumentParser(prog="scripts/study", description=__doc__)
    commands = parser.add_subparsers(dest="study", required=True)
    for name, module in STUDIES.items():
        command = commands.add_parser(name, help=module.__doc__.splitlines()[0])
        command.add_argument("--quick", action="store_true", help="a few minutes only")
        command.add_argument(
            "--write", action="store_true", help="put the table into docs/results.md"
        )
        command.add_argument("--workdir", type=Path, help="default: runs/study/NAME")
        module.add_arguments(command)
    arguments = parser.parse_args()
    if arguments.workdir is None:
        form = arguments.study + ("-quick" if arguments.quick else "")
        arguments.workdir = Path("runs", "study", form)
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    STUDIES[arguments.study].run(arguments)


if __name__ == "__main__":
    main()
