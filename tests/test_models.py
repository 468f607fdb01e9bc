"""Fast paths compute what plain layers do; large models have their papers' sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from train.models.patches import halve, small_conv
from train.models.pspnet import PSPNet, pool
from train.models.resnet import Backbone, ResNet


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


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        # Of torchvision's models.
        (ResNet(50, 1000), 25_557_032),
        (ResNet(101, 1000), 44_549_160),
        # With 3 x 3 instead of 7 x 7 at the stem, and 10 classes instead of 1000.
        (ResNet(50, 10, "cifar"), 25_557_032 - 40 * 3 * 64 - 990 * 2049),
        (ResNet(101, 10, "cifar"), 44_549_160 - 40 * 3 * 64 - 990 * 2049),
    ],
)
def test_residual_networks_have_the_parameters_of_the_literature(model, wanted):
    assert parameters(model) == wanted


def test_pspnet_is_its_backbone_a_pyramid_and_two_heads():
    backbone = 25_557_032 - 1000 * 2049
    pyramid = 4 * (2048 * 512 + 2 * 512)
    main = 9 * 4096 * 512 + 2 * 512 + 513 * 12
    auxiliary = 9 * 1024 * 256 + 2 * 256 + 257 * 12
    model = PSPNet(50, 12)
    assert parameters(model) == backbone + pyramid + main + auxiliary
    logits = jax.eval_shape(
        lambda key: model.init_with_output(key, jnp.zeros((2, 48, 64, 3)), False)[0],
        jax.random.key(0),
    )
    assert [x.shape for x in logits] == [(2, 48, 64, 12)] * 2


def parameters(model):
    variables = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros((1, 64, 64, 3)), train=False),
        jax.random.key(0),
    )
    return sum(x.size for x in jax.tree.leaves(variables["params"]))


def test_a_dilated_backbone_keeps_an_eighth_of_the_resolution():
    def shapes(dilated):
        model = Backbone(50, dilated=dilated)
        out = jax.eval_shape(
            lambda key: model.init_with_output(key, jnp.zeros((1, 64, 96, 3)), False)[
                0
            ],
            jax.random.key(0),
        )
        return [x.shape for x in out]

    assert shapes(True) == [(1, 8, 12, 2048), (1, 8, 12, 1024)]
    assert shapes(False) == [(1, 2, 3, 2048), (1, 4, 6, 1024)]


def test_regions_cover_everything_and_are_means():
    x = np.arange(35, dtype=np.float32).reshape(1, 5, 7, 1)
    found = np.asarray(pool(jnp.asarray(x), 2))[0, ..., 0]
    rows, columns = (slice(0, 3), slice(2, 5)), (slice(0, 4), slice(3, 7))
    wanted = [[x[0, r, c].mean() for c in columns] for r in rows]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ResNet(34, 10), r"depth=34 must be one of \[50, 101, 152\]"),
        (ResNet(50, 10, "tiny"), r"stem='tiny' must be 'imagenet' or 'cifar'"),
    ],
)
def test_a_network_that_is_not_known_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        parameters(model)
