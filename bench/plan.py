"""Will compression help me? The step time of each method, predicted.

scripts/plan --workers 8 --rate 1gbit --model resnet50 --compute-ms 300
scripts/plan --workers 4 --rate 100mbit --parameters 5000000 --compute-ms 40
scripts/plan --workers 8 --rate 100mbit --config=configs/fashion_mnist.py
scripts/plan --check --hosts 4 --rates 50mbit 200mbit 1gbit    against the test bed

    step = compute + method + 8 link_bytes / (rate * 0.945)

`compute` is the gradient of a worker's batch, given by --compute-ms or measured on a
config's model; `method` is what memory, selection, coding and the optimizer take,
measured here for one worker without a network, or taken from the records of
`scripts/bench` by --measured; `link_bytes` are read off the method's program for so
many workers (of a server's ladder the last rung is taken). See bench/prediction.py.

The last column has the link rates at which a method is faster than dense averaging;
elsewhere, stay dense.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from bench import measure, shapes, worker
from bench.main import check_places, command, measured, tell
from bench.prediction import Cost, advice, named, table
from bench.records import recorded
from bench.testbed import rate_bits
from study.clock import median_seconds
from study.results import markdown
from train import build, data, parallel
from train import flags as train_flags
from train.errors import SetupError

METHODS = ["dense", "topk", "server", "power_sgd", "lgc_server", "lgc_ring"]


def costs(tree: Any, methods: Sequence[str], workers: int, density: float) -> list:
    """Measured here for one worker; the bytes are those of ``workers``."""
    alone, found = parallel.Workers(1), []
    for method in methods:
        figures = measure.measure(
            method, tree, alone, density=density, steps=7, burn_in=3
        )
        config = measure.config_of(method, workers, density, 10)
        link = measure.said(build.optimizer(config, method), tree, workers, None)[2]
        found.append(Cost(method, figures["step_ms"], link))
        print(f"{method} measured", file=sys.stderr, flush=True)
    return found


def model_of(config: Any) -> tuple[Any, Any]:
    """Parameters of a setup's model, abstract; its gradient, to be timed."""
    splits = build.splits(config)
    batch = data.Batches(
        splits["train"], seed=0, num_workers=1, batch_size=config.batch_size
    ).at(0, range(1))
    batch = jax.tree.map(lambda x: x[0], batch)
    task = build.task(config)
    params, model_state = task.init(jax.random.key(0), batch)
    grad = jax.jit(jax.grad(lambda p: task.loss(p, model_state, batch)[0]))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return shapes, lambda: grad(params)


def of_config(path: str) -> tuple[Any, float]:
    """Parameters of a setup's model, and milliseconds of its gradient here."""
    values = flags.FlagValues()
    train_flags.parse(["plan", f"--config={path}"], values)
    tree, gradient = model_of(values.config)
    return tree, 1e3 * median_seconds(gradient, 5)


def check(arguments: argparse.Namespace) -> str:
    """Predictions beside steps that were measured on the test bed."""
    for rate in arguments.rates:
        rate_bits(rate)
    records: dict[tuple, dict[str, Any]] = {}
    for rate in (None, *arguments.rates):
        arguments.rate = rate
        for record in measured(arguments):
            records[rate, record["model"], record["method"]] = record
    rows, header = (
        [],
        ["model", "method", "link rate", "predicted", "measured", "ratio"],
    )
    for (rate, model, method), record in records.items():
        if rate is None:
            continue
        free = records[None, model, method]
        cost = Cost(method, free["step_ms"], free["link_bytes"])
        predicted = cost.step_ms(rate_bits(rate))
        row = [model, method, named(rate_bits(rate))]
        row += [f"{predicted:,.0f} ms", f"{record['step_ms']:,.0f} ms"]
        rows.append([*row, f"{predicted / record['step_ms']:.2f}"])
    title = f"{arguments.hosts} hosts of a test bed on one machine's cores.\n\n"
    return title + markdown(header, rows)


def main() -> None:
    """Plans, or checks the plans."""
    parser = argparse.ArgumentParser(
        prog="scripts/plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    worker.add_arguments(parser)
    parser.set_defaults(methods=METHODS, workers=8)
    parser.add_argument("--model", help=f"{', '.join(shapes.MODELS)}")
    parser.add_argument("--parameters", type=int, help="of a model of one's own")
    parser.add_argument("--config", help="a setup of scripts/train")
    parser.add_argument("--rate", default="1gbit", help="of a worker's link")
    parser.add_argument("--compute-ms", type=float, help="gradient of one batch")
    parser.add_argument("--measured", type=Path, help="records of scripts/bench")
    parser.add_argument("--check", action="store_true", help="on the test bed")
    parser.add_argument("--hosts", type=int, default=4, help="with --check")
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--workdir", type=Path, default=Path("runs", "plan"))
    parser.add_argument("--write", metavar="PLACE", help="with --check: in the docs")
    arguments = parser.parse_args()
    if arguments.check:
        arguments.workers = 1  # of each host
        worker.check(arguments)
        check_places(arguments)
        tell(arguments, check(arguments), sys.stdout)
        return
    print(planned(arguments))


def planned(arguments: argparse.Namespace) -> str:
    """The table and the advice."""
    given = [arguments.model, arguments.parameters, arguments.config]
    if sum(one is not None for one in given) != 1:
        raise SetupError("Give one of --model, --parameters and --config.")
    rate, compute = rate_bits(arguments.rate), arguments.compute_ms
    if compute is not None and not 0 <= compute < float("inf"):
        raise SetupError(
            f"--compute-ms={compute} must be a number of milliseconds, not negative."
        )
    if arguments.workers < 2:
        raise SetupError(f"--workers={arguments.workers} must be at least 2.")
    if arguments.measured and arguments.config:
        raise SetupError(
            f"--measured={arguments.measured} has no records of a --config: give "
            "--model or --parameters."
        )
    worker.check(arguments)
    if arguments.model is not None:
        worker.check_model(arguments.model, "--model")
    if arguments.parameters is not None and arguments.parameters < 1:
        raise SetupError(f"--parameters={arguments.parameters} must be at least 1.")
    parallel.start(1)
    if arguments.config:
        tree, here = of_config(arguments.config)
        compute = here if compute is None else compute
    else:
        tree = worker.tree_of(str(arguments.model or arguments.parameters))
    methods = dict.fromkeys(["dense", *arguments.methods])
    if arguments.measured:
        model = str(arguments.model or arguments.parameters)
        found = recorded(
            arguments.measured, model, arguments.workers, arguments.density
        )
    else:
        found = costs(tree, list(methods), arguments.workers, arguments.density)
    if compute is None:
        print(
            "No --compute-ms: only the exchange is compared; with the gradient's time "
            "all ratios come closer to 1.",
            file=sys.stderr,
        )
        compute = 0.0
    what = f"{shapes.entries(tree):,} parameters, {arguments.workers} workers, "
    what += f"{named(rate)}, gradient {compute:.1f} ms, density {arguments.density:g}"
    tabled = table(found, rate, compute)
    return f"{what}\n\n{tabled}\n\n{advice(found, rate, compute)}"


if __name__ == "__main__":
    command(main)
