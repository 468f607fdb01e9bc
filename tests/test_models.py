"""The fast paths of the small models compute what the plain layers compute."""

import jax
import numpy as np
import pytest
from flax import linen as nn

from train.models.patches import halve, small_conv


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("shape", "size"), [((2, 7, 6, 3), 3), ((1, 5, 8, 1), 5)])
def test_convolution_by_patches_is_the_convolution(padding, shape, size):
    x = jax.random.normal(jax.random.key(0), shape)
    plain, fast = (
        nn.Conv(4, (size, size), padding=padding),
        small_conv(4, size, padding),
    )
    params = plain.init(jax.random.key(1), x)
    assert jax.tree.map(np.shape, params) == jax.tree.map(
        np.shape, fast.init(jax.random.key(1), x)
    )

    def loss(params, x, model):
        return (model.apply(params, x) ** 2).sum()

    for out in (lambda m: m.apply(params, x), lambda m: jax.grad(loss)(params, x, m)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            out(plain),
            out(fast),
        )


def test_halving_is_max_pooling():
    x = jax.random.normal(jax.random.key(0), (2, 7, 6, 3))
    pooled = nn.max_pool(x, (2, 2), strides=(2, 2))
    np.testing.assert_array_equal(halve(x), pooled)

    def slope(pool):
        return jax.grad(lambda x: (pool(x) ** 2).sum())(x)

    np.testing.assert_allclose(
        slope(halve), slope(lambda x: nn.max_pool(x, (2, 2), strides=(2, 2)))
    )


@pytest.mark.parametrize(
    "setting", [{"strides": 2}, {"kernel_dilation": 2}, {"feature_group_count": 3}]
)
def test_what_patches_do_not_do_is_refused(setting):
    conv = small_conv(3, 3).clone(**setting)
    with pytest.raises(ValueError, match=r"strides, dilations and groups of 1 only"):
        conv.init(jax.random.key(0), np.zeros((1, 8, 8, 3), np.float32))
