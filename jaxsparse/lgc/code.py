"""Codes: how a vector of k values becomes a shorter one, and back.

=================  ======================================  ============================
code               latent of k values                      what it is for
=================  ======================================  ============================
`convolutional`    4 channels of about k / 16              the paper's autoencoder
`linear`           a projection of every block             control: no non-linearity
`mean`             one number                              control: sign + magnitude
`identity`         the values                              control: no code at all
=================  ======================================  ============================

All reducers of this package take any of them, on the same path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..arguments import check_number, check_positive_int
from ..base import PyTree


class Code(NamedTuple):
    """A pair of maps between vectors and latents.

    Attributes:
      name: for tables and error messages.
      size: ``k -> s``: entries of the latent of k values.
      init: ``key -> params``; of shapes that do not depend on k.
      encode: ``(params, x[k]) -> z[s]``.
      decode: ``(params, z[s], k, innovation[k] | None) -> x[k]``.
      innovation: whether the decoder wants an innovation.
    """

    name: str
    size: Callable[[int], int]
    init: Callable[[Array], PyTree]
    encode: Callable[[PyTree, Array], Array]
    decode: Callable[[PyTree, Array, int, Array | None], Array]
    innovation: bool = False


def convolutional(
    widths: Sequence[int] = (16, 32, 64, 16),
    channels: int = 4,
    *,
    slope: float = 0.01,
    innovation: bool = False,
) -> Code:
    """The paper's autoencoder, by default a narrow one of 13 853 parameters.

    ``widths=(64, 128, 256, 64), innovation=True`` is the paper's, of 216 678.

    Args:
      widths: channels of the encoder's convolutions, each of stride 2; the decoder's
        transposed convolutions have half of them. More => longer training, a better
        reconstruction.
      channels: of the latent. Fewer => fewer bytes, a worse reconstruction.
      slope: of the activation below 0, in [0, 1]; 1 makes the code affine: then the
        mean of decoded latents is the decoded mean of latents.
      innovation: whether the decoder is helped by a vector of a few true values.

    Returns:
      A `Code`. Needs Flax: ``pip install jaxsparse[lgc]``.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> code = convolutional()
      >>> params = code.init(jax.random.key(0))
      >>> z = code.encode(params, jnp.ones(1000))
      >>> z.shape[0] == code.size(1000), code.decode(params, z, 1000, None).shape
      (True, (1000,))
    """
    widths = tuple(widths)
    for width in (*widths, channels):
        check_positive_int("convolutional(widths=..., channels=...)", width)
    check_number(
        "convolutional(slope=...)",
        slope,
        "lie in [0, 1]",
        lambda x: 0 <= x <= 1,
        static=True,
    )
    if not widths or any(width < 2 for width in widths):
        raise ValueError(
            "`convolutional(widths=...)` must hold at least one width, each of at "
            f"least 2, got {tuple(widths)}."
        )
    from . import autoencoder

    def activation(x: Array) -> Array:
        return x if slope == 1 else jnp.where(x > 0, x, slope * x)

    halves = tuple(width // 2 for width in widths)
    encoder = autoencoder.Encoder(tuple(widths), channels, activation)
    decoder = autoencoder.Decoder(halves, channels, activation)

    def size(k: int) -> int:
        return channels * autoencoder.latent_length(k, len(widths))

    def init(key: Array) -> PyTree:
        first, second = jax.random.split(key)
        k = autoencoder.decoded_length(1, len(widths))
        x, z = (jnp.zeros(size, jnp.float32) for size in (k, size(k)))
        return {
            "encoder": encoder.init(first, x)["params"],
            "decoder": decoder.init(second, z, k, x if innovation else None)["params"],
        }

    def encode(params: PyTree, x: Array) -> Any:
        return encoder.apply({"params": params["encoder"]}, x)

    def decode(params: PyTree, z: Array, k: int, helped: Array | None) -> Any:
        helped = helped if innovation else None
        return decoder.apply({"params": params["decoder"]}, z, k, helped)

    return Code("convolutional", size, init, encode, decode, innovation)


def linear(block: int = 64, latent: int = 16) -> Code:
    """A projection of every block of values, and one back, both trained.

    Args:
      block: values projected together.
      latent: numbers they become, at most ``block``.

    Returns:
      A `Code`; it starts as the orthogonal projection on ``latent`` random directions.

    Raises:
      ValueError: an argument out of its range.

    Example:
      >>> linear(64, 16).size(1000)
      256
    """
    check_positive_int("linear(block=...)", block)
    if check_positive_int("linear(latent=...)", latent) > block:
        raise ValueError(
            f"`linear(latent=...)` must be at most the block, {block}, got {latent}."
        )

    def blocks(k: int) -> int:
        return -(-k // block)

    def init(key: Array) -> PyTree:
        basis = jnp.linalg.qr(jax.random.normal(key, (block, latent), jnp.float32))[0]
        return {"down": basis, "up": basis.T}

    def encode(params: PyTree, x: Array) -> Array:
        x = jnp.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)
        return (x @ params["down"]).reshape(-1)

    def decode(params: PyTree, z: Array, k: int, innovation: Array | None) -> Array:
        del innovation
        return (z.reshape(blocks(k), latent) @ params["up"]).reshape(-1)[:k]

    return Code("linear", lambda k: blocks(k) * latent, init, encode, decode)


def mean() -> Code:
    """All values become their mean: with one sign a value, its mean magnitude."""
    return Code(
        "mean",
        lambda k: 1,
        lambda key: (),
        lambda params, x: jnp.mean(x, keepdims=True),
        lambda params, z, k, innovation: jnp.broadcast_to(z, (k,)),
    )


def identity() -> Code:
    """The values are the latent."""
    return Code(
        "identity",
        lambda k: k,
        lambda key: (),
        lambda params, x: x,
        lambda params, z, k, innovation: z,
    )


def count_parameters(code: Code) -> int:
    """Numbers that a code learns.

    >>> count_parameters(linear(64, 16))
    2048
    """
    shapes = jax.eval_shape(functools.partial(code.init), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
