"""Size and time of one message: what its bits are worth, and where the time goes.

scripts/study message
scripts/study message --densities 0.01 --codec int8 --repeats 50

``entropy_bits`` is log2(binomial(n, k)) / k: no code for k arbitrary indices goes
below; times are medians after a burn-in. ``encode_ms`` includes the sort of the indices
and the gather of the values; ``decode_ms`` is for one message. The ``parts`` are timed
each in a program of its own, dispatch included.
"""

from __future__ import annotations

import argparse
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsparse import bits, codec
from study.clock import median_seconds
from study.results import markdown, publish
from train.report import write_json

CODECS = {
    factory.__name__: factory
    for factory in (
        codec.float32,
        codec.bfloat16,
        codec.float16,
        codec.int8,
        codec.sign_mean,
    )
}


def entropy_bits(n: int, k: int) -> float:
    """log2(binomial(n, k)) / k."""
    nats = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return nats / math.log(2) / k


def median_ms(function, *args, repeats: int) -> float:
    """Median time of a jitted call, in milliseconds."""
    function = jax.jit(function)
    return round(1e3 * median_seconds(lambda: function(*args), repeats), 3)


def measure(n: int, k: int, chosen: codec.Codec, repeats: int, seed: int) -> dict:
    """All figures for k random entries of a random vector."""
    rng = np.random.default_rng(seed)
    indices = jnp.asarray(rng.choice(n, k, replace=False).astype(np.int32))
    x = jax.random.normal(jax.random.key(seed), (n,))

    def encode(x, indices):
        return codec.encode(x, indices, chosen)

    def decode(message):
        return codec.decode(message, n, k, chosen)

    message, ordered, decoded = jax.jit(encode)(x, indices)
    _, received, values = jax.jit(decode)(message)
    if not (np.array_equal(received, ordered) and np.array_equal(values, decoded)):
        raise AssertionError("the message does not decode to what was encoded")

    def ms(function, *args):
        return median_ms(function, *args, repeats=repeats)

    words = jax.jit(lambda i: bits.encode_indices(i, n))(ordered)
    encode_ms, decode_ms = ms(encode, x, indices), ms(decode, message)
    index_bits, entropy = 32 * bits.index_words(k, n) / k, entropy_bits(n, k)
    return {
        "n": n,
        "k": k,
        "codec": chosen.name,
        "bits_per_entry": round(32 * codec.message_words(n, k, chosen) / k, 3),
        "index_bits": round(index_bits, 3),
        "entropy_bits": round(entropy, 3),
        "index_over_entropy": round(index_bits / entropy, 4),
        "encode_ms": encode_ms,
        "decode_ms": decode_ms,
        "total_ms": round(encode_ms + decode_ms, 3),
        "parts": {
            "sort_ms": ms(lambda i: lax.sort(i, is_stable=False), indices),
            "gather_ms": ms(lambda x, i: x[i], x, ordered),
            "encode_indices_ms": ms(lambda i: bits.encode_indices(i, n), ordered),
            "decode_indices_ms": ms(lambda w: bits.decode_indices(w, k, n), words),
        },
        "device": jax.devices()[0].device_kind,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--n", type=int, default=25_557_032, help="ResNet-50's size")
    parser.add_argument("--densities", type=float, nargs="+", default=[1e-3, 0.01, 0.1])
    parser.add_argument("--codec", choices=CODECS, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> None:
    """Measures one message at several densities."""
    chosen = CODECS[arguments.codec]()
    repeats = 10 if arguments.quick else arguments.repeats
    found = []
    for density in arguments.densities:
        k = math.ceil(density * arguments.n)
        found.append(measure(arguments.n, k, chosen, repeats, arguments.seed))
        print(json.dumps(found[-1]))
    write_json(arguments.workdir / "data.json", found)
    header = ["k", "bits per entry", "index bits", "entropy", "index / entropy"]
    header += ["encode", "decode", "both"]
    rows = [
        [
            f"{f['k']:,}",
            f"{f['bits_per_entry']:.2f}",
            f"{f['index_bits']:.2f}",
            f"{f['entropy_bits']:.2f}",
            f"{f['index_over_entropy']:.3f}",
            *(f"{f[part]:.2f} ms" for part in ("encode_ms", "decode_ms", "total_ms")),
        ]
        for f in found
    ]
    text = f"n = {arguments.n:,}, {arguments.codec}.\n\n{markdown(header, rows)}"
    publish("message", text, arguments.workdir, write=arguments.write)
