"""A small convolutional net: 3 x 3 convolutions, one pooling, one hidden layer."""

from flax import linen as nn
from jax import Array

from train.models.patches import halve, small_conv


class ConvNet(nn.Module):
    """Convolutions at full size, then halved, then classified."""

    channels: tuple[int, ...]  # of the convolutions, in order
    hidden: int  # width of the layer before the last
    num_classes: int

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> Array:
        """Logits of a batch of images."""
        del train  # nothing here behaves differently in training
        for features in self.channels:
            x_BHWC = nn.relu(small_conv(features, 3)(x_BHWC))
        x_BHWC = halve(x_BHWC)
        x_BF = x_BHWC.reshape(x_BHWC.shape[0], -1)
        x_BF = nn.relu(nn.Dense(self.hidden)(x_BF))
        return nn.Dense(self.num_classes)(x_BF)
