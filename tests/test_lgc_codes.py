"""Codes, orders and their training; expected values from the paper or from NumPy."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsparse import lgc
from jaxsparse.lgc import order as orders
from jaxsparse.lgc import training, vectors
from jaxsparse.lgc.autoencoder import latent_length

CODES = {
    "convolutional": lambda: lgc.convolutional((4, 6), 2),
    "affine": lambda: lgc.convolutional((4, 6), 2, slope=1.0),
    "helped": lambda: lgc.convolutional((4, 6), 2, innovation=True),
    "linear": lambda: lgc.linear(8, 3),
    "mean": lgc.mean,
    "identity": lgc.identity,
}
every_code = pytest.mark.parametrize("name", CODES)


def layers(*pairs, kernel):
    return sum(kernel * before * after + after for before, after in pairs)


def test_parameters_are_the_papers():
    encoder = layers((1, 64), (64, 128), (128, 256), (256, 64), kernel=3)
    encoder += layers((64, 4), kernel=1)
    decoder = layers((4, 32), (32, 64), (64, 128), (128, 32), kernel=3)
    head = layers((32 + 1, 1), kernel=1)
    assert (encoder, decoder, head) == (172_996, 43_648, 34)
    code = lgc.convolutional((64, 128, 256, 64), innovation=True)
    params = jax.eval_shape(code.init, jax.random.key(0))
    size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert size(params["encoder"]) == encoder
    assert size(params["decoder"]) == decoder + head
    assert 13_000 < lgc.count_parameters(lgc.convolutional()) < 15_000


@pytest.mark.parametrize("k", [1, 31, 32, 618, 25_000])
def test_lengths_are_those_of_unpadded_convolutions(k):
    """The shortest latent that transposed convolutions make k entries of."""

    def decoded(positions):
        for _ in range(4):
            positions = 2 * (positions - 1) + 3
        return positions

    positions = next(m for m in range(1, k + 1) if decoded(m) >= k)
    assert latent_length(k, 4) == positions
    assert lgc.convolutional().size(k) == 4 * positions
    halved = decoded(positions)
    for _ in range(4):
        halved = (halved - 3) // 2 + 1
    assert halved == positions


@every_code
@pytest.mark.parametrize("k", [1, 2, 6, 7, 8, 29, 100])
def test_vectors_of_any_length(name, k):
    code = CODES[name]()

    def through(x):
        params = code.init(jax.random.key(0))
        z = code.encode(params, x)
        return z, code.decode(params, z, k, x if code.innovation else None)

    z, rec = jax.eval_shape(through, jnp.zeros(k))
    assert z.shape == (code.size(k),) and rec.shape == (k,)


def test_convolutions_are_those_of_the_definition():
    """Encoder and decoder against loops: cross-correlation, and its transpose."""
    code = lgc.convolutional((3,), 2, slope=0.25)
    params = code.init(jax.random.key(1))
    x = np.random.default_rng(0).normal(size=9).astype(np.float32)
    p = jax.tree.map(np.asarray, params)
    leaky = lambda v: np.where(v > 0, v, 0.25 * v)  # noqa: E731

    first, last = p["encoder"]["Conv_0"], p["encoder"]["Conv_1"]
    hidden = np.stack([x[2 * i : 2 * i + 3] @ first["kernel"][:, 0] for i in range(4)])
    hidden = leaky(hidden + first["bias"])
    z = leaky(hidden @ last["kernel"][0] + last["bias"])
    np.testing.assert_allclose(code.encode(params, x), z.reshape(-1), rtol=1e-5)

    up, head = p["decoder"]["ConvTranspose_0"], p["decoder"]["Conv_0"]
    wide = np.zeros((9, 1))
    for i in range(4):
        for j in range(3):  # Flax correlates: the kernel is laid down reversed
            wide[2 * i + j] += z[i] @ up["kernel"][2 - j]
    wide = leaky(wide + up["bias"])
    rec = wide[np.arange(9) * 9 // 9] @ head["kernel"][0] + head["bias"]
    found = code.decode(params, jnp.asarray(z.reshape(-1)), 9, None)
    np.testing.assert_allclose(found, rec[:, 0], rtol=1e-5, atol=1e-6)


def test_affine_codes_decode_the_mean_of_latents_to_the_mean():
    x = jax.random.normal(jax.random.key(0), (5, 40))
    for name in ("affine", "linear", "mean", "identity"):
        code = CODES[name]()
        params = code.init(jax.random.key(1))
        z = jnp.stack([code.encode(params, v) for v in x])
        each = jnp.stack([code.decode(params, v, 40, None) for v in z])
        found = code.decode(params, z.mean(0), 40, None)
        np.testing.assert_allclose(found, each.mean(0), atol=1e-5)


def test_losses_are_those_of_the_paper():
    code = lgc.linear(4, 2)
    params = code.init(jax.random.key(0))
    x = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)
    down, up = (np.asarray(params[k]) for k in ("down", "up"))
    z = (x.reshape(3, 2, 4) @ down).reshape(3, -1)
    decode = lambda z: (z.reshape(-1, 2, 2) @ up).reshape(-1, 8)  # noqa: E731
    mse = lambda a, b: np.mean((a - b) ** 2)  # noqa: E731
    similarity = sum(
        mse(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if i != j
    )
    wanted = {
        "own": sum(mse(x[i], decode(z[i])[0]) for i in range(3)),
        "leader": sum(mse(x[i], decode(z[1])[0]) for i in range(3)),
        "mean": mse(x.mean(0), decode(z.mean(0))[0]),
    }
    for target, reconstruction in wanted.items():
        found = training.losses(code, params, x, None, target, 1)
        np.testing.assert_allclose(found, (reconstruction, similarity), rtol=1e-5)


def test_training_is_adam_on_the_weighted_losses():
    code = lgc.linear(4, 2)
    params = code.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 8))
    settings = lgc.Training(0.01, 2, reconstruction=0.5, similarity=0.25)

    def loss(params):
        first, second = training.losses(code, params, x, None, "leader", 0)
        return 0.5 * first + 0.25 * second

    adam = optax.adam(0.01)
    wanted, state = params, adam.init(params)
    for _ in range(2):
        updates, state = adam.update(jax.grad(loss)(wanted), state)
        wanted = optax.apply_updates(wanted, updates)
    state = settings.optimizer().init(params)
    found, _ = training.train(code, settings, params, state, x, None, "leader", 0)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_similarity_loss_brings_latents_together():
    x = jax.random.normal(jax.random.key(1), (4, 40))
    code = lgc.convolutional((4, 6), 2)

    def spread(weight):
        settings = lgc.Training(1e-2, 30, 0.5, weight)
        params = code.init(jax.random.key(0))
        state = settings.optimizer().init(params)
        params, _ = training.train(code, settings, params, state, x, None, "own", 0)
        return training.losses(code, params, x, None, "own", 0)[1]

    assert spread(0.5) < 0.1 * spread(0.0)


ORDERS = {"signed": lgc.signed, "flipped": lgc.flipped, "coordinate": lgc.coordinate}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_read_as_it_was_written(name):
    rng = np.random.default_rng(2)
    order, n, k = ORDERS[name](), 1000, 37
    x = jnp.asarray(rng.normal(size=n).astype(np.float32))
    indices = jnp.asarray(np.r_[rng.permutation(n)[: k - 2], n, n])  # two are empty
    support, values, signs = order.arrange(indices, vectors.take(x, indices))
    np.testing.assert_array_equal(values, vectors.take(x, support))
    assert sorted(support.tolist()) == sorted(indices.tolist())
    words = order.write(support, signs, n)
    assert words.shape == (order.words(k, n),)
    found = order.read(words, k, n)
    np.testing.assert_array_equal(found[0], support)
    np.testing.assert_array_equal(found[1], signs)
    seen = np.asarray(values * signs)[: k - 2]
    if name == "signed":
        assert np.all(np.diff(seen) >= 0)
    if name == "flipped":
        assert np.all(seen >= 0)
    if name != "signed":
        assert np.all(np.diff(support[: k - 2]) > 0)


def test_bits_of_an_order():
    n, k = 1_000_000, 1000
    assert 32 * lgc.signed().words(k, n) / k == 20  # log2 n
    assert 32 * lgc.coordinate().words(k, n) / k == pytest.approx(12, abs=0.1)
    assert 32 * lgc.flipped().words(k, n) / k == pytest.approx(13, abs=0.1)


def test_merged_supports_are_their_union():
    indices = jnp.array([[1, 5, 9], [5, 6, 20]])
    signs = jnp.array([[1.0, -1, 1], [1, -1, 1]])
    support, merged = orders.merge(indices, signs, 20)
    assert support.tolist() == [1, 5, 6, 9, 20, 20]
    assert merged[:4].tolist() == [1, -1, -1, 1]  # the first worker's sign of 5


def test_the_library_is_imported_without_flax():
    program = "import jaxsparse, sys; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lgc.convolutional(()),
        lambda: lgc.convolutional((1,)),
        lambda: lgc.convolutional(slope=2.0),
        lambda: lgc.convolutional(channels=0),
        lambda: lgc.linear(4, 5),
        lambda: lgc.linear(0, 1),
    ],
)
def test_codes_of_no_size_are_refused(call):
    with pytest.raises(ValueError, match=r"\(.*=\.\.\.\)"):
        call()
