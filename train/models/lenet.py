"""LeNet-5 as it is written today: ReLU and max pooling.

References: LeCun, Bottou, Bengio, Haffner, "Gradient-Based Learning Applied to Document
Recognition", 1998.
"""

from flax import linen as nn
from jax import Array

from train.models.patches import halve, small_conv


class LeNet(nn.Module):
    """Two 5 x 5 convolutions, each halved, and three dense layers."""

    num_classes: int

    @nn.compact
    def __call__(self, x_BHWC: Array, train: bool) -> Array:
        """Logits of a batch of images."""
        del train  # nothing here behaves differently in training
        for features, padding in ((6, "SAME"), (16, "VALID")):
            x_BHWC = halve(nn.relu(small_conv(features, 5, padding)(x_BHWC)))
        x_BF = x_BHWC.reshape(x_BHWC.shape[0], -1)
        for width in (120, 84):
            x_BF = nn.relu(nn.Dense(width)(x_BF))
        return nn.Dense(self.num_classes)(x_BF)
