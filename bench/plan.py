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
many workers (of a server's ladder the last rung is taken); 0.945 of a rate is left by
the headers of Ethernet, IP and TCP. Parts follow one another: no transfer is hidden
behind the gradient.

The break-even rate of a method is the one at which it and dense averaging take the same
time; above it, stay dense.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from bench import measure, shapes, worker
from bench.main import check_places, command, measured, tell
from bench.testbed import rate_bits
from study.clock import median_seconds
from study.results import markdown
from train import build, data, parallel
from train import flags as train_flags
from train.errors import SetupError

HEADERS = 0.945  # 1448 bytes of payload in the 1538 of an Ethernet frame and its gap
METHODS = ["dense", "topk", "server", "power_sgd", "lgc_server", "lgc_ring"]


class Cost(NamedTuple):
    """What a method takes."""

    method: str
    own_ms: float  # without the network
    link_bytes: float

    def step_ms(self, rate: float, compute_ms: float = 0.0) -> float:
        """Milliseconds of a step at ``rate`` bits per second.

        >>> Cost("dense", 10.0, 945_000).step_ms(8e6, compute_ms=5.0)
        1015.0
        """
        return compute_ms + self.own_ms + 8e3 * self.link_bytes / (rate * HEADERS)

    def break_even(self, dense: Cost) -> float:
        """Bits per second up to which this method is faster than ``dense``.

        >>> Cost("topk", 30.0, 0).break_even(Cost("dense", 10.0, 945_000))
        400000000.0
        """
        saved, more = dense.link_bytes - self.link_bytes, self.own_ms - dense.own_ms
        if saved <= 0:
            return 0.0 if more >= 0 else float("inf")
        return 8e3 * saved / (more * HEADERS) if more > 0 else float("inf")


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


def recorded(file: Path, model: str, workers: int, density: float) -> list[Cost]:
    """From the records of `scripts/bench`, of runs without a limited link.

    Raises:
      SetupError: the file has no such records.
    """
    # No limited link, and no gradient: --batch measures whole training steps.
    wanted = (model, workers, density, None, None)
    keys = ("model", "workers", "density", "batch_size", "rate")
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
        found = {
            r["method"]: Cost(r["method"], r["step_ms"], r["link_bytes"])
            for r in records
            if tuple(r[key] for key in keys) == wanted
        }
    except (OSError, ValueError) as error:
        raise SetupError(f"--measured={file}: {error}") from error
    except (KeyError, TypeError) as error:
        raise SetupError(
            f"--measured={file} holds other things than records of scripts/bench: "
            f"{type(error).__name__}: {error}. Name its bench.jsonl."
        ) from error
    if "dense" not in found:
        raise SetupError(
            f"--measured={file} has no record of dense averaging of {model} with "
            f"{workers} workers, density {density:g} and no --rate. Make some: "
            f"scripts/bench --models {model} --hosts {workers} --density {density:g}"
        )
    return list(found.values())


def of_config(path: str) -> tuple[Any, float]:
    """Parameters of a setup's model, and milliseconds of its gradient here."""
    values = flags.FlagValues()
    train_flags.parse(["plan", f"--config={path}"], values)
    config = values.config
    splits = build.splits(config)
    batch = data.Batches(
        splits["train"], seed=0, num_workers=1, batch_size=config.batch_size
    ).at(0, range(1))
    batch = jax.tree.map(lambda x: x[0], batch)
    task = build.task(config)
    params, model_state = task.init(jax.random.key(0), batch)
    grad = jax.jit(jax.grad(lambda p: task.loss(p, model_state, batch)[0]))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params
    ), 1e3 * median_seconds(lambda: grad(params), 5)


def advice(found: Sequence[Cost], rate: float, compute_ms: float) -> str:
    """What to do, in a sentence.

    >>> dense, topk = Cost("dense", 10.0, 945_000), Cost("topk", 30.0, 945)
    >>> print(advice([dense, topk], 1e9, 100.0))
    Stay dense: no method is faster at 1 Gbit/s.
    >>> print(advice([dense, topk], 1e7, 100.0))
    Use topk: 7.0 times faster than dense at 10 Mbit/s, faster up to 400 Mbit/s.
    """
    best = min(found, key=lambda cost: cost.step_ms(rate, compute_ms))
    dense = next(cost for cost in found if cost.method == "dense")
    if best.method == "dense":
        return f"Stay dense: no method is faster at {named(rate)}."
    gain = dense.step_ms(rate, compute_ms) / best.step_ms(rate, compute_ms)
    if gain < 1.1:
        return f"Stay dense: {best.method} would save {1 - 1 / gain:.0%} of a step."
    until = named(best.break_even(dense))
    return (
        f"Use {best.method}: {gain:.1f} times faster than dense at {named(rate)}, "
        f"faster up to {until}."
    )


def named(rate: float) -> str:
    """A rate in words.

    >>> named(2.5e9), named(5e7), named(float("inf"))
    ('2.5 Gbit/s', '50 Mbit/s', 'any rate')
    """
    if rate == float("inf"):
        return "any rate"
    rate = float(f"{rate:.3g}")
    return f"{rate / 1e9:,g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def table(found: Sequence[Cost], rate: float, compute_ms: float) -> str:
    """All methods, the fastest first."""
    dense = next(cost for cost in found if cost.method == "dense")
    header = ["method", "without network", "on the link", "step", "break-even rate"]
    rows = [
        [
            cost.method,
            f"{cost.own_ms:.1f} ms",
            f"{cost.link_bytes:,.0f} B",
            f"{cost.step_ms(rate, compute_ms):,.1f} ms",
            "" if cost is dense else named(cost.break_even(dense)),
        ]
        for cost in sorted(found, key=lambda cost: cost.step_ms(rate))
    ]
    return markdown(header, rows)


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
