"""Time of a learned code for a large model, in selections of the same gradient.

scripts/study coding                     k = 25 557 of 25 557 032 entries

One worker encodes a vector of k values and decodes a latent; one `js.top_k` chooses k
of n entries. All are compiled, medians of one run.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax

import jaxsparse as js
from study.clock import median_seconds
from study.results import markdown, publish
from train.report import write_json

CODES = {
    "`convolutional()`, 13,853 parameters": lambda: js.lgc.convolutional(),
    "`convolutional(channels=11, slope=1)`, of the ring": lambda: js.lgc.convolutional(
        channels=11, slope=1.0
    ),
    "the paper's, 216,678 parameters": lambda: js.lgc.convolutional(
        (64, 128, 256, 64), innovation=True
    ),
    "`linear()`": lambda: js.lgc.linear(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--entries", type=int, default=25_557_032, help="n")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--repeats", type=int, default=11)


def seconds(code: js.lgc.Code, k: int, repeats: int) -> dict[str, float]:
    """Medians of encoding and decoding."""
    params = code.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (k,))
    helped = x if code.innovation else None
    encode = jax.jit(code.encode)
    decode = jax.jit(lambda params, z: code.decode(params, z, k, helped))
    z = encode(params, x)
    return {
        "encode": median_seconds(lambda: encode(params, x), repeats),
        "decode": median_seconds(lambda: decode(params, z), repeats),
    }


def run(arguments: argparse.Namespace) -> None:
    """Measures and tables."""
    n = 1_000_000 if arguments.quick else arguments.entries
    selection = js.top_k(arguments.density)
    g = jax.random.laplace(jax.random.key(2), (n,))
    select = jax.jit(lambda g: selection.select(g, ())[0])
    k = select(g).shape[0]
    once = median_seconds(lambda: select(g), arguments.repeats)
    found: dict[str, Any] = {"n": n, "k": k, "select": once}
    rows = []
    for name, code in CODES.items():
        taken = seconds(code(), k, arguments.repeats)
        found[name] = taken
        row = [name]
        for each in taken.values():
            row += [f"{1e3 * each:.1f} ms", f"{each / once:.2f}"]
        rows.append(row)
    write_json(arguments.workdir / "coding.json", found)
    header = ["code", "encode", "in selections", "decode", "in selections"]
    title = f"k = {k:,} of n = {n:,}; one `top_k` takes {1e3 * once:.1f} ms.\n\n"
    text = title + markdown(header, rows)
    publish("coding", text, arguments.workdir, write=arguments.write)
