"""The sharded server: bytes against all_gather, and the ladder over a training run.

scripts/study server                      2, 4, 8, 16 workers; Fashion-MNIST, 8 workers

First, workers with selections of a given overlap exchange them through both: what the
programs move, what the cost model says, who wins. Then a run is trained through the
server, and what came down is compared, step by step, with the ideal message of the
union: ``log2 binomial(n, u)`` bits of indices, and the values.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsparse as js
from jaxsparse.exchange.ownership import owner
from study import plots, runs
from study.results import markdown, publish
from study.simulation import AXIS, Simulation
from train.report import write_json

K, ENTRIES = 1000, 200_000
SHARED = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # part of a selection that all have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    runs.add_arguments(parser, seeds=[0], densities=[0.01, 0.001])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16])


def alike(workers: int, shared: float, seed: int = 0) -> np.ndarray:
    """A vector for each worker; a part of its K large entries is large for all."""
    rng = np.random.default_rng(seed)
    x = np.zeros((workers, ENTRIES), np.float32)
    common, *own = np.split(
        rng.permutation(ENTRIES)[: K * (workers + 1)], range(K, K * (workers + 1), K)
    )
    both = round(shared * K)
    for worker, mine in zip(x, own, strict=True):
        worker[common[:both]] = 1
        worker[mine[: K - both]] = 1
    return x


def compared(workers: int) -> list[dict[str, Any]]:
    """What the programs of both exchanges move, by the union."""
    reducers = {
        name: js.sparse(js.top_k(K / ENTRIES), way, axis_name=AXIS, num_workers=workers)
        for name, way in (("server", js.server()), ("all_gather", js.all_gather()))
    }
    zero = jnp.zeros(ENTRIES)

    def step(reducer):
        def run(x):
            mean, _, state = reducer.reduce(x, reducer.init(x))
            return mean, js.metrics(state)

        return run

    moved = {
        name: js.traffic(
            jax.make_jaxpr(step(reducer), axis_env=[(AXIS, workers)])(zero)
        )
        for name, reducer in reducers.items()
    }
    gathered = js.link_bytes(moved["all_gather"], workers)
    run = jax.jit(
        jax.vmap(step(reducers["server"]), axis_name=AXIS, out_axes=(None, 0))
    )
    bound = js.cost.server_wins_up_to(workers, K, ENTRIES)
    found = []
    for shared in SHARED:
        mean, metrics = run(alike(workers, shared))
        owners = owner(jnp.flatnonzero(mean), workers)
        busiest = int(jnp.bincount(owners).max())
        union, rung = int(metrics.aggregated[0]), int(metrics.rung[0])
        link = js.link_bytes(moved["server"], workers, ladder=rung)
        model = js.cost.server(workers, K, union, ENTRIES, busiest=busiest).link
        found.append(
            {
                "workers": workers,
                "union": union,
                "server": link,
                "model": model,
                "all_gather": gathered,
                "wins": link < gathered,
                "should": model < gathered,
                "bound": bound,
            }
        )
    return found


def trained(kept: runs.Runs, density: float, workers: int, seed: int) -> dict[str, Any]:
    """A run through the server: the union of every step, and the bytes that came."""
    reducer = js.sparse(
        js.top_k(density), js.server(), axis_name=AXIS, num_workers=workers
    )
    exchange = js.momentum_correction(reducer, kept.setting.momentum)
    setting = kept.setting._replace(workers=workers)
    outcome = Simulation(kept.task, exchange, kept.splits, setting).run(seed)
    n = runs.entries_of_model(kept.task, kept.splits)
    zero = jnp.zeros(n)
    program = jax.make_jaxpr(
        lambda x: reducer.reduce(x, reducer.init(x))[0], axis_env=[(AXIS, workers)]
    )(zero)
    ways = js.traffic(program)
    sent = [
        (workers - 1) * sum(c.bytes for c in ways[f"ladder[{round(rung)}]"])
        for rung in outcome.metrics["rung"]
    ]
    unions = outcome.metrics["aggregated"]
    ideal = [(workers - 1) / workers * js.cost.ideal_bytes(u, n) for u in unions]
    return {
        "density": density,
        "workers": workers,
        "k": math.ceil(density * n),
        "union": unions,
        "down": sent,
        "ideal": ideal,
    }


def run(arguments: argparse.Namespace) -> None:
    """Compares, trains, tables and draws."""
    kept = runs.open_runs(arguments)
    if arguments.quick:
        arguments.sizes = arguments.sizes[:2]
    header = ["workers", "union / k", "all_gather", "server", "model of the server"]
    header += ["server wins", "the model says", "expected up to a union of"]
    rows = []
    for workers in arguments.sizes:
        for f in compared(workers):
            rows.append(
                [
                    str(workers),
                    f"{f['union'] / K:.2f}",
                    f"{f['all_gather']:,}",
                    f"{f['server']:,}",
                    f"{f['model']:,}",
                    "yes" if f["wins"] else "no",
                    "yes" if f["should"] else "no",
                    f"{f['bound'] / K:.2f} k",
                ]
            )
        print(f"{workers} workers compared", flush=True)
    text = f"k = {K:,} of {ENTRIES:,} entries, bfloat16; bytes on a worker's link.\n\n"
    text += markdown(header, rows)

    header = ["density", "workers", "k", "mean union", "came down", "ideal", "ratio"]
    rows, followed = [], []
    for workers in arguments.workers:
        for density in arguments.densities:
            file = runs.kept_file(arguments, f"ladder-{workers}-{density!r}")
            if not file.exists():
                data = trained(kept, density, workers, arguments.seeds[0])
                write_json(file, data)
            f = json.loads(file.read_text())
            followed.append(f)
            down, ideal = np.mean(f["down"]), np.mean(f["ideal"])
            rows.append(
                [
                    f"{density:.2%}",
                    str(workers),
                    f"{f['k']:,}",
                    f"{np.mean(f['union']):,.0f}",
                    f"{down:,.0f}",
                    f"{ideal:,.0f}",
                    f"{down / ideal:.3f}",
                ]
            )
    text += f"\n\n`{arguments.data}`, {arguments.steps} steps, mean bytes down of one "
    text += f"worker and step.\n\n{markdown(header, rows)}"
    picture(followed, arguments)
    publish("server", text, arguments.workdir, write=arguments.write)


def picture(followed: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """What came down and what the union needs, over the steps."""
    figure, axes = plots.panels(len(followed), sharey=False)
    for ax, f in zip(axes, followed, strict=True):
        ax.plot(f["down"], lw=0.8, label="came down")
        ax.plot(f["ideal"], lw=0.8, label="ideal message of the union")
        ax.set(xlabel="step", ylim=(0, None))
        ax.set_title(f"{arguments.data}, {f['workers']} workers, k = {f['k']:,}")
    axes[0].set_ylabel("payload down (bytes per worker and step)")
    plots.finish(figure, axes, arguments.workdir / "ladder.png")
