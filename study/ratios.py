"""Compression ratios of learned compression for large models, in three accountings.

scripts/study ratios

All bytes: what the programs send, indices, signs, headers and the layers that are not
encoded included. Values only: no index, no sign, no header counts, as in the published
ratios most likely. Whole run: all bytes, with the dense and the training stage in it.
The first layer is dense, the last gets top-k (`configs.methods.LAYERS`). A ratio is
``4 n`` over the bytes that a worker says, mean over the workers. Nothing is trained.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxsparse as js
from configs.methods import LAYERS
from jaxsparse.arguments import entries
from jaxsparse.codec import message_words
from study import learned
from study.results import markdown, publish
from train.models.pspnet import PSPNet
from train.models.resnet import ResNet

STAGES = (200, 500)  # steps, as in third-party code
LENGTHS = (5_000, 40_000, 450_000)  # steps of a run
MODELS = {
    "ResNet-50, CIFAR-10": ("resnet", ResNet(50, 10, "cifar")),
    "ResNet-101, CIFAR-10": ("resnet", ResNet(101, 10, "cifar")),
    "ResNet-50, ImageNet": ("resnet", ResNet(50, 1000)),
    "ResNet-101, ImageNet": ("resnet", ResNet(101, 1000)),
    "PSPNet-50, CamVid": ("pspnet", PSPNet(50, 11)),
}
METHODS = [
    ("lgc_server", "paper"),
    ("lgc_server", "improved"),
    ("lgc_ring", "paper"),
    ("lgc_ring", "improved"),
    ("lgc_server", "improved, T1 = 0"),
]


class Sizes(NamedTuple):
    """Parameters by what is done with them."""

    dense: int
    top_k: int
    encoded: int


class Said(NamedTuple):
    """Bytes of a worker in a step, mean over the workers."""

    everything: float
    values: float  # nothing but values
    training: float  # everything, in the training stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this study."""
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])


def sizes(kind: str, model: Any) -> Sizes:
    """Parameters of a model's layers; they do not depend on the images' size."""
    image = jnp.zeros((1, 64, 64, 3))
    params = jax.eval_shape(
        lambda key: model.init(key, image, train=False)["params"], jax.random.key(0)
    )
    patterns = LAYERS[kind]
    labels = js.lgc.layers(
        dense=patterns["dense_layers"], top_k=patterns["top_k_layers"]
    )(params)
    found = dict.fromkeys(Sizes._fields, 0)
    for label, leaf in zip(
        jax.tree.leaves(labels), jax.tree.leaves(params), strict=True
    ):
        found[label] += leaf.size
    return Sizes(**found)


def top_k(n: int, density: float) -> Said:
    """Top-k of the whole model: bfloat16 values, or 4 bytes each for values only."""
    k = entries(density, n)
    everything = 4 * message_words(n, k, js.codec.bfloat16())
    return Said(everything, 4 * k, everything)


def learned_code(
    name: str, preset: str, workers: int, layers: Sizes, density: float
) -> Said:
    """Learned compression of the middle layers."""
    k, last = entries(density, layers.encoded), entries(density, layers.top_k)
    settings = {"preset": preset.partition(",")[0]}
    outside = 4 * layers.dense
    outside += 4 * message_words(layers.top_k, last, js.codec.bfloat16())
    payload = learned.payload(name, settings, workers, k, layers.encoded)
    training = learned.training_bytes(name, settings, workers, k, layers.encoded)
    bits = learned.value_bits(name, settings, workers, k)
    values = 4 * layers.dense + 4 * last + bits / 8
    return Said(outside + payload.mean, values, outside + training)


def run(arguments: argparse.Namespace) -> None:
    """Computes and tables all ratios."""
    parts = []
    for title, (kind, model) in MODELS.items():
        layers = sizes(kind, model)
        dense = 4 * sum(layers)
        rows = [["`top_k`", "", *ratios(top_k(sum(layers), arguments.density), dense)]]
        for name, preset in METHODS:
            for workers in arguments.workers:
                said = learned_code(name, preset, workers, layers, arguments.density)
                first = 0 if preset.endswith("T1 = 0") else STAGES[0]
                cells = ratios(said, dense, first)
                rows.append([f"`{name}`, {preset}", str(workers), *cells])
        header = ["method", "workers", "bytes", "all bytes", "values only"]
        header += [f"run of {steps:,}" for steps in LENGTHS]
        parts.append(
            f"{title}: {sum(layers):,} parameters, {layers.dense:,} of them dense, "
            f"{layers.top_k:,} top-k:\n\n{markdown(header, rows)}"
        )
    publish("ratios", "\n\n".join(parts), arguments.workdir, write=arguments.write)


def ratios(said: Said, dense: float, first: int = STAGES[0]) -> list[str]:
    """The cells of one method; top-k has no stages."""
    second = STAGES[1]
    if said.training == said.everything:
        first = second = 0
    cells = [f"{said.everything:,.0f}", f"{dense / said.everything:,.0f}"]
    cells.append(f"{dense / said.values:,.0f}")
    for steps in LENGTHS:
        total = first * dense + (second - first) * said.training
        total += (steps - second) * said.everything
        cells.append(f"{steps * dense / total:,.0f}")
    return cells
