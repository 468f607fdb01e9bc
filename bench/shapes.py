"""Parameter trees to measure with: shapes of real models, no values.

===========  ============  ==================================================
name         parameters    what it is
===========  ============  ==================================================
lenet              61 706  LeNet for images of 28 x 28
resnet50       25 557 032  ResNet-50 for ImageNet
resnet101      44 549 160  ResNet-101 for ImageNet
transformer   124 439 808  twelve blocks of width 768, as in GPT-2's smallest
===========  ============  ==================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from train.models.lenet import LeNet
from train.models.resnet import ResNet


def _of_model(model: nn.Module, size: tuple[int, ...]) -> Any:
    """The parameters of a model for images of this size."""
    image = jax.ShapeDtypeStruct((1, *size), jnp.float32)
    variables = jax.eval_shape(
        lambda key, image: model.init(key, image, train=False), jax.random.key(0), image
    )
    return variables["params"]


def _transformer(
    depth: int = 12, width: int = 768, vocabulary: int = 50_257, context: int = 1024
) -> Any:
    """A decoder whose output layer is its embedding."""

    def layer(rows: int, columns: int) -> dict[str, Any]:
        return {"kernel": _array(rows, columns), "bias": _array(columns)}

    norm = {"scale": _array(width), "bias": _array(width)}
    block = {
        "norm_1": norm,
        "attention": {
            "in": layer(width, 3 * width),
            "out": layer(width, width),
        },
        "norm_2": norm,
        "feed_forward": {
            "in": layer(width, 4 * width),
            "out": layer(4 * width, width),
        },
    }
    return {
        "tokens": _array(vocabulary, width),
        "positions": _array(context, width),
        **{f"block_{i:02}": block for i in range(depth)},
        "norm": norm,
    }


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MODELS: dict[str, Callable[[], Any]] = {
    "lenet": lambda: _of_model(LeNet(num_classes=10), (28, 28, 1)),
    "resnet50": lambda: _of_model(ResNet(50, 1000), (224, 224, 3)),
    "resnet101": lambda: _of_model(ResNet(101, 1000), (224, 224, 3)),
    "transformer": _transformer,
}


def entries(params: Any) -> int:
    """Parameters of a tree.

    >>> entries(MODELS["transformer"]())
    124439808
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def of_size(parameters: int) -> Any:
    """A tree of this many parameters, most of them in square matrices.

    Four or more of up to 2048 x 2048, for models whose size alone is known.

    >>> entries(of_size(10_000_000))
    10000000
    """
    side = max(1, min(2048, math.isqrt(parameters // 4)))
    whole, rest = divmod(parameters, side * side)
    matrices = [_array(side, side) for _ in range(whole)]
    # Two leaves at least: pmap takes the wrong axes where a step has as many arrays as
    # arguments, as one of dense averaging of a single leaf has.
    return {"matrices": matrices, "rest": [_array(rest - rest // 2), _array(rest // 2)]}
