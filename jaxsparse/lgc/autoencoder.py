"""The convolutional autoencoder of learned gradient compression, in Flax.

Encoder, on a vector as one channel: convolutions of kernel 3 and stride 2 to 64, 128,
256 and 64 channels, then one of kernel 1 to 4 channels. Decoder: transposed
convolutions of kernel 3 and stride 2 to 32, 64, 128 and 32 channels, the innovation as
one more channel, a convolution of kernel 1 to one channel.

The convolutions pad nothing, so a latent of m positions is decoded to 16 (m + 1) - 1
entries. A vector is first made as long as that, with its last entry repeated, and the
rest is cut off behind the decoder: every entry is decoded at its own place.

This is the only file of the library that needs Flax.

Differences from the paper:
  One last convolution for all workers, where the paper has one a worker: the worker
  whose latent is decoded changes from step to step. The activations and the innovation
  can be left out. Third-party code stretches the decoder's output to the length of the
  vector; then entries move against each other by up to 15 places, which a sorted vector
  bears and one in the order of coordinates does not.

References:
  Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned Gradient Compression for Distributed
  Deep Learning", IEEE TNNLS 33(12), 2022, arXiv 2103.08870.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

_KERNEL, _STRIDE = 3, 2
Activation = Callable[[Array], Array]


class Encoder(nn.Module):
    """A vector [L] to a latent [channels * latent_length(L)].

    Attributes:
      widths: channels after each convolution of stride 2.
      channels: of the latent.
      activation: after every convolution, the last one included.
    """

    widths: tuple[int, ...]
    channels: int
    activation: Activation

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Encodes one vector."""
        layers = len(self.widths)
        whole = decoded_length(latent_length(x.shape[0], layers), layers)
        x = jnp.pad(x, (0, whole - x.shape[0]), mode="edge")[None, :, None]
        for width in self.widths:
            convolution = nn.Conv(width, (_KERNEL,), (_STRIDE,), padding="VALID")
            x = self.activation(convolution(x))
        return self.activation(nn.Conv(self.channels, (1,))(x)).reshape(-1)


class Decoder(nn.Module):
    """A latent back to a vector [length].

    Attributes:
      widths: channels after each transposed convolution.
      channels: of the latent.
      activation: after every transposed convolution.
    """

    widths: tuple[int, ...]
    channels: int
    activation: Activation

    @nn.compact
    def __call__(self, z: Array, length: int, innovation: Array | None = None) -> Array:
        """Decodes one latent, with the help of an innovation [length] where given."""
        x = z.reshape(1, -1, self.channels)
        for width in self.widths:
            convolution = nn.ConvTranspose(
                width, (_KERNEL,), (_STRIDE,), padding="VALID"
            )
            x = self.activation(convolution(x))
        x = x[0, :length]
        if innovation is not None:
            x = jnp.concatenate([x, innovation[:, None]], axis=1)
        return nn.Conv(1, (1,))(x[None])[0, :, 0]


def decoded_length(latent: int, layers: int) -> int:
    """Entries that transposed convolutions make of so many positions of a latent.

    >>> decoded_length(1, 4), decoded_length(2, 4)
    (31, 47)
    """
    return int(2**layers * (latent + 1) - 1)


def latent_length(length: int, layers: int) -> int:
    """Positions of a latent: as few as decode to so many entries or more.

    >>> latent_length(31, 4), latent_length(32, 4), latent_length(25_000, 4)
    (1, 2, 1562)
    """
    return max(-(-(length + 1) // 2**layers) - 1, 1)
