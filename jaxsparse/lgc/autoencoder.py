"""The convolutional autoencoder of learned gradient compression, in Flax.

Encoder, on a vector as one channel: convolutions of kernel 3 and stride 2 to 64, 128,
256 and 64 channels, then one of kernel 1 to 4 channels. Decoder: transposed
convolutions of kernel 3 and stride 2 to 32, 64, 128 and 32 channels, nearest resize to
the length of the vector, the innovation as one more channel, a convolution of kernel 1
to one channel.

Nothing is padded, so a vector of length L becomes one of about L / 16, the decoder's
output is a little shorter than L or longer, and the resize makes up for it:
entry i is read from ``floor(i L' / L)``. Vectors shorter than 31 are padded with zeros.

This is the only file of the library that needs Flax.

Differences from the paper:
  One last convolution for all workers, where the paper has one a worker: the worker
  whose latent is decoded changes from step to step. The activations and the innovation
  can be left out.

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
        shortest = shortest_length(len(self.widths))
        x = jnp.pad(x, (0, max(shortest - x.shape[0], 0)))[None, :, None]
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
        nearest = jnp.arange(length) * x.shape[1] // length
        x = x[0, nearest]
        if innovation is not None:
            x = jnp.concatenate([x, innovation[:, None]], axis=1)
        return nn.Conv(1, (1,))(x[None])[0, :, 0]


def shortest_length(layers: int) -> int:
    """The shortest vector that the convolutions leave an entry of.

    >>> shortest_length(4)
    31
    """
    return 2 ** (layers + 1) - 1


def latent_length(length: int, layers: int) -> int:
    """Entries of each latent channel.

    >>> latent_length(25_000, 4)
    1561
    """
    length = max(length, shortest_length(layers))
    for _ in range(layers):
        length = (length - _KERNEL) // _STRIDE + 1
    return length
