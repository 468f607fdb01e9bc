"""Time of the exact top-k selection, in read passes and against `lax.top_k`.

scripts/study largest                                    ResNet-50's 25 557 032 entries
scripts/study largest --torch python3                    beside `torch.topk`

A read pass is the maximum over all magnitudes, measured in the same run: what no
selection can do without. PyTorch is no part of the project: --torch names a Python that
has it (Debian: python3-torch) and measures there, on the same data and cores.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsparse.largest import k_largest
from study.clock import median_seconds
from study.results import markdown, publish
from train.report import write_json

ENTRIES = 25_557_032
DENSITIES = (1e-4, 1e-3, 1e-2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")


TORCH = """
import sys, time, statistics, numpy, torch
x, k = torch.from_numpy(numpy.load(sys.argv[1])), int(sys.argv[2])
taken = []
for _ in range(12):
    start = time.perf_counter()
    torch.topk(x.abs(), k, sorted=False)
    taken.append(time.perf_counter() - start)
print(statistics.median(taken[1:]))
"""


def torch_seconds(python: str, file: Path, k: int) -> float:
    """`torch.topk` of the magnitudes of the vector in a file."""
    command = [python, "-c", TORCH, str(file), str(k)]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def run(arguments: argparse.Namespace) -> None:
    """Measures each density on one vector of heavy tails."""
    n = 1_000_000 if arguments.quick else arguments.entries
    magnitude, sign = jax.random.split(jax.random.key(0))
    x = jax.random.normal(sign, (n,)) * jnp.exp(jax.random.normal(magnitude, (n,)))
    found = []
    for density in arguments.densities:
        k = round(density * n)
        ways = {
            "read": jax.jit(lambda x: jnp.max(jnp.abs(x))),
            "ours": jax.jit(lambda x, k=k: k_largest(x, k)),
            "lax": jax.jit(lambda x, k=k: lax.top_k(jnp.abs(x), k)[1]),
        }
        times = {
            name: median_seconds(lambda way=way: way(x), 11)
            for name, way in ways.items()
        }
        if arguments.torch:
            file = arguments.workdir / "vector.npy"
            np.save(file, x)
            times["torch"] = torch_seconds(arguments.torch, file, k)
            file.unlink()
        found.append({"k": k, **times})
        print(f"k = {k:,} measured", flush=True)
    write_json(arguments.workdir / "data.json", found)
    header = ["k", "read pass", "`top_k`", "in passes", "`lax.top_k`", "in passes"]
    if arguments.torch:
        header += ["`torch.topk`", "in passes", "times `top_k`"]
    rows = [
        [
            f"{f['k']:,}",
            f"{1e3 * f['read']:.1f} ms",
            f"{1e3 * f['ours']:.1f} ms",
            f"{f['ours'] / f['read']:.1f}",
            f"{1e3 * f['lax']:.1f} ms",
            f"{f['lax'] / f['read']:.1f}",
            *(
                [
                    f"{1e3 * f['torch']:.1f} ms",
                    f"{f['torch'] / f['read']:.1f}",
                    f"{f['torch'] / f['ours']:.1f}",
                ]
                if arguments.torch
                else []
            ),
        ]
        for f in found
    ]
    text = f"n = {n:,}, float32; medians of 11.\n\n{markdown(header, rows)}"
    publish("largest", text, arguments.workdir, write=arguments.write)
