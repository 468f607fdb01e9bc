"""Residual networks with bottleneck blocks: ResNet-50, ResNet-101, ResNet-152.

======  ==========  ============  ==============
depth   stem        classes       parameters
======  ==========  ============  ==============
50      imagenet    1000          25 557 032
101     imagenet    1000          44 549 160
50      cifar       10            23 520 842
101     cifar       10            42 512 970
======  ==========  ============  ==============

The first two counts are those of the literature (torchvision's models). The stride of a
block is in its 3 x 3 convolution, as is usual today.

References:
  He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2016.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
CONV_INIT = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up to four times the width, and the way around."""

    width: int
    stride: int = 1
    dilation: int = 1
    norm_momentum: float = 0.9

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> Array:
        """Features of ``4 * width`` channels."""
        conv = partial(nn.Conv, use_bias=False, kernel_init=CONV_INIT)
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=self.norm_momentum
        )
        stride = (self.stride, self.stride)
        y_BHWC = nn.relu(norm()(conv(self.width, (1, 1))(x_BHWC)))
        y_BHWC = conv(
            self.width,
            (3, 3),
            strides=stride,
            padding=self.dilation,
            kernel_dilation=self.dilation,
        )(y_BHWC)
        y_BHWC = nn.relu(norm()(y_BHWC))
        # Every block starts as the identity: its last scale is zero.
        y_BHWC = norm(scale_init=nn.initializers.zeros)(
            conv(4 * self.width, (1, 1))(y_BHWC)
        )
        if x_BHWC.shape != y_BHWC.shape:
            x_BHWC = norm(name="around_norm")(
                conv(4 * self.width, (1, 1), strides=stride, name="around")(x_BHWC)
            )
        return nn.relu(x_BHWC + y_BHWC)


class Backbone(nn.Module):
    """A ResNet up to its last features."""

    depth: int
    stem: Literal["imagenet", "cifar"] = "imagenet"
    dilated: bool = False  # the last two stages keep the resolution of the second
    norm_momentum: float = 0.9  # of BatchNorm's running averages

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> tuple[Array, Array]:
        """Features of the last stage, and of the one before."""
        if self.depth not in BLOCKS:
            raise ValueError(f"depth={self.depth} must be one of {list(BLOCKS)}")
        if self.stem not in ("imagenet", "cifar"):
            raise ValueError(f"stem={self.stem!r} must be 'imagenet' or 'cifar'")
        small = self.stem == "cifar"
        x_BHWC = nn.Conv(
            64,
            (3, 3) if small else (7, 7),
            strides=1 if small else 2,
            padding=1 if small else 3,
            use_bias=False,
            kernel_init=CONV_INIT,
            name="stem",
        )(x_BHWC)
        norm = nn.BatchNorm(
            use_running_average=not train, momentum=self.norm_momentum, name="stem_norm"
        )
        x_BHWC = nn.relu(norm(x_BHWC))
        if not small:
            x_BHWC = nn.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1),) * 2)
        before = x_BHWC
        for stage, blocks in enumerate(BLOCKS[self.depth]):
            before = x_BHWC
            stride, dilation = (1 if stage == 0 else 2), 1
            if self.dilated and stage >= 2:
                stride, dilation = 1, 2 ** (stage - 1)
            for block in range(blocks):
                x_BHWC = Bottleneck(
                    64 * 2**stage,
                    stride=stride if block == 0 else 1,
                    dilation=dilation,
                    norm_momentum=self.norm_momentum,
                    name=f"stage{stage + 1}_block{block + 1}",
                )(x_BHWC, train)
        return x_BHWC, before


class ResNet(nn.Module):
    """A ResNet for classification."""

    depth: int
    num_classes: int
    stem: Literal["imagenet", "cifar"] = "imagenet"
    norm_momentum: float = 0.9  # of BatchNorm's running averages

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> Array:
        """Logits of a batch of images."""
        backbone = Backbone(
            self.depth, self.stem, norm_momentum=self.norm_momentum, name="backbone"
        )
        x_BHWC, _ = backbone(x_BHWC, train)
        x_BC: Any = jnp.mean(x_BHWC, axis=(1, 2))
        return nn.Dense(self.num_classes, name="head")(x_BC)
