"""PSPNet: every pixel's class, from features pooled over regions of four sizes.

Depth 50 and 21 classes: 46 592 597 parameters, 48 957 802 with the auxiliary head that
training uses. Depth 101: 65 584 725 and 67 949 930.

Differences from the paper:
  The backbone has the ResNet paper's stem, one 7 x 7 convolution; the authors' code has
  three of 3 x 3. There is no dropout before the heads.

References:
  Zhao, Shi, Qi, Wang, Jia, "Pyramid Scene Parsing Network", 2017.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from train.models.resnet import CONV_INIT, Backbone

BINS = (1, 2, 3, 6)  # regions along each side


class PSPNet(nn.Module):
    """A dilated ResNet, the pyramid, and a head; one more head on the stage before."""

    depth: int
    num_classes: int
    norm_momentum: float = 0.9  # of BatchNorm's running averages

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> tuple[Array, Array]:
        """Logits of every pixel, from the main and from the auxiliary head."""
        size = x_BHWC.shape[1:3]
        backbone = Backbone(
            self.depth, dilated=True, norm_momentum=self.norm_momentum, name="backbone"
        )
        last, before = backbone(x_BHWC, train)
        conv = partial(ConvNorm, norm_momentum=self.norm_momentum)
        parts = [last]
        for bins in BINS:
            pooled = conv(last.shape[-1] // len(BINS), 1, name=f"bins{bins}")(
                pool(last, bins), train
            )
            parts.append(resize(pooled, last.shape[1:3]))
        main = conv(512, 3, name="main")(jnp.concatenate(parts, -1), train)
        auxiliary = conv(256, 3, name="auxiliary")(before, train)
        logits = []
        for features, name in ((main, "head"), (auxiliary, "auxiliary_head")):
            out = nn.Conv(self.num_classes, (1, 1), name=name)(features)
            logits.append(resize(out, size))
        return logits[0], logits[1]


class ConvNorm(nn.Module):
    """A square convolution without bias, batch normalisation, ReLU."""

    features: int
    size: int
    norm_momentum: float = 0.9

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> Array:
        """Features of the same height and width."""
        x_BHWC = nn.Conv(
            self.features,
            (self.size, self.size),
            use_bias=False,
            kernel_init=CONV_INIT,
        )(x_BHWC)
        norm = nn.BatchNorm(use_running_average=not train, momentum=self.norm_momentum)
        return nn.relu(norm(x_BHWC))


def pool(x_BHWC: Array, bins: int) -> Array:
    """Means over ``bins x bins`` regions, as equal as they can be.

    >>> pool(jnp.arange(6.0).reshape(1, 1, 6, 1), 3)[0, 0, :, 0]
    Array([0.5, 2.5, 4.5], dtype=float32)
    """
    for axis in (1, 2):
        n = x_BHWC.shape[axis]
        regions = [
            jnp.mean(
                jax.lax.slice_in_dim(
                    x_BHWC, i * n // bins, -(-(i + 1) * n // bins), axis=axis
                ),
                axis=axis,
                keepdims=True,
            )
            for i in range(bins)
        ]
        x_BHWC = jnp.concatenate(regions, axis)
    return x_BHWC


def resize(x_BHWC: Array, size: tuple[int, ...]) -> Array:
    """Bilinear, to another height and width."""
    shape = (x_BHWC.shape[0], *size, x_BHWC.shape[-1])
    return jax.image.resize(x_BHWC, shape, "bilinear")
