"""One process of a bench: measures, and the first one prints a JSON line a method.

Started by `bench/main.py`, once on this machine or once on every host of a test bed.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax

from bench import shapes
from bench.measure import measure, selection
from bench.work import TRAINED
from configs import common, methods
from jaxsparse.arguments import check_density
from train import parallel
from train.errors import SetupError

LEAST = {"steps": 1, "burn_in": 0, "workers": 1, "batch": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured: the options that the bench shares with its processes."""
    parser.add_argument(
        "--models",
        nargs="+",
        default=["resnet50"],
        help=f"{', '.join(shapes.MODELS)}, or a number of parameters",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["dense", "topk", "power_sgd"],
        help="names in configs/methods.py",
    )
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--burn-in", type=int, default=4, help="steps before these")
    parser.add_argument(
        "--workers", type=int, default=1, help="without --hosts: CPU devices"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=0,
        help="whole training steps of a ResNet with so many images of 224 x 224 pixels",
    )


def check(arguments: argparse.Namespace) -> None:
    """Refuses what can't be measured, before anything is.

    Raises:
      SetupError: names the option, its value and what it must be.
    """
    for name, least in LEAST.items():
        value = getattr(arguments, name)
        if value < least:
            option = name.replace("_", "-")
            raise SetupError(f"--{option}={value} must be at least {least}.")
    try:
        check_density("--density", arguments.density)
    except ValueError as error:
        raise SetupError(str(error)) from error
    known = methods.all_methods(common.get_config("", "dense"))
    for method in arguments.methods:
        if method not in known:
            raise SetupError(f"--methods={method}: choose from {', '.join(known)}.")
    for model in arguments.models:
        check_model(model)
    if arguments.batch and (wrong := set(arguments.models) - TRAINED.keys()):
        raise SetupError(
            f"--batch={arguments.batch} trains {' and '.join(TRAINED)}, and there is "
            f"--models {' '.join(wrong)}."
        )


def check_model(model: str, option: str = "--models") -> None:
    """Refuses what is neither a model's name nor a size."""
    if model not in shapes.MODELS and not (model.isdecimal() and int(model)):
        raise SetupError(
            f"{option}={model}: choose from {', '.join(shapes.MODELS)}, or give a "
            "number of parameters."
        )


def tree_of(model: str) -> Any:
    """The parameters of a model by name, or of a size."""
    if model in shapes.MODELS:
        return shapes.MODELS[model]()
    return shapes.of_size(int(model))


def run(arguments: argparse.Namespace) -> None:
    """Measures all methods on all models."""
    trees = {model: tree_of(model) for model in arguments.models}
    workers = parallel.Workers(jax.device_count())
    # Connections are made now: later, hosts that compile for longer would be given up.
    workers.wait_for_all()
    for model, tree in trees.items():
        n = shapes.entries(tree)
        alone = selection(n, arguments.density, 7) if jax.process_count() == 1 else {}
        for method in arguments.methods:
            figures = measure(
                method,
                tree,
                workers,
                density=arguments.density,
                steps=arguments.steps,
                burn_in=arguments.burn_in,
                train=(model, arguments.batch) if arguments.batch else None,
            )
            if jax.process_index() == 0:
                line = {"model": model, **figures, **alone}
                line["hosts"] = jax.process_count()
                print("bench " + json.dumps(line), flush=True)


def main() -> None:
    """Joins the other processes, if any, and measures."""
    parser = argparse.ArgumentParser(prog="bench.worker", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    check(arguments)
    parallel.start(
        arguments.num_processes or arguments.workers,
        coordinator=arguments.coordinator,
        num_processes=arguments.num_processes,
        process_id=arguments.process_id,
    )
    run(arguments)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"error: {error}")
