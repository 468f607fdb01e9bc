"""Convolution and pooling of small images as a matrix product and a reshape.

XLA's CPU backend runs the gradients of `lax.conv` inside a loop, and of max pooling, on
slow paths: a step of `LeNet` for 8 workers takes 55 ms with them, 12 ms with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax


def conv_by_patches(
    x_BHWC: Array,
    kernel_HWIO: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **settings: Any,
) -> Array:
    """What ``lax.conv_general_dilated`` gives for NHWC images, at stride 1.

    To be given as ``nn.Conv(..., conv_general_dilated=conv_by_patches)``; the
    parameters stay those of `nn.Conv`. Needs KH * KW times the input's memory.

    Raises:
      ValueError: strides, dilations or groups other than 1.
    """
    dilations = (*settings["lhs_dilation"], *settings["rhs_dilation"])
    if {*window_strides, *dilations, settings["feature_group_count"]} != {1}:
        raise ValueError(
            "`conv_by_patches` does strides, dilations and groups of 1 only; leave out "
            "`conv_general_dilated` for others."
        )
    height, width, channels, features = kernel_HWIO.shape
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(
            x_BHWC.shape[1:3], (height, width), (1, 1), padding
        )
    x_BHWC = jnp.pad(x_BHWC, ((0, 0), *padding, (0, 0)))
    rows, columns = x_BHWC.shape[1] - height + 1, x_BHWC.shape[2] - width + 1
    patches_BHWP = jnp.concatenate(
        [
            x_BHWC[:, i : i + rows, j : j + columns]
            for i in range(height)
            for j in range(width)
        ],
        axis=-1,
    )
    return patches_BHWP @ kernel_HWIO.reshape(height * width * channels, features)


def small_conv(features: int, size: int, padding: str = "SAME") -> nn.Conv:
    """A square convolution of small images.

    >>> small_conv(6, 5).kernel_size
    (5, 5)
    """
    return nn.Conv(
        features, (size, size), padding=padding, conv_general_dilated=conv_by_patches
    )


def halve(x_BHWC: Array) -> Array:
    """Maximum over windows of 2 x 2; an odd last row or column is left out.

    The gradient goes to the largest entry; equal ones share it.
    """
    batch, rows, columns, channels = x_BHWC.shape
    x_BHWC = x_BHWC[:, : rows // 2 * 2, : columns // 2 * 2]
    return x_BHWC.reshape(batch, rows // 2, 2, columns // 2, 2, channels).max((2, 4))
