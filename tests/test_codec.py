import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import codec as codecs

FLOAT32, BFLOAT16, FLOAT16 = codecs.float32(), codecs.bfloat16(), codecs.float16()
INT8, SIGN_MEAN = codecs.int8(block=16), codecs.sign_mean()
CODECS = [FLOAT32, BFLOAT16, FLOAT16, INT8, SIGN_MEAN]
N, K = 997, 97
FULL = 100  # entries where all places are filled
LARGEST = np.finfo(np.float32).max
TINY = np.finfo(np.float32).tiny

each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


@functools.cache
def programs(codec, agreed, n, k):
    """``encode(x, indices, header)``, ``decode(message, indices)``: compiled once."""

    def encode(x, indices, words):
        return codecs.encode(x, indices, codec, agreed=agreed, header=words)

    def decode(message, indices):
        indices = indices if agreed else None
        return codecs.decode(message, n, k, codec, indices=indices, header=2)

    return jax.jit(encode), jax.jit(decode)


def example(seed, n=N, k=K, empty=7):
    """A vector, and k indices in any order, ``empty`` of them n."""
    rng = np.random.default_rng(seed)
    indices = np.r_[rng.choice(n, k - empty, replace=False), np.full(empty, n)]
    x = rng.standard_normal(n).astype(np.float32)
    return x, rng.permutation(indices).astype(np.int32), np.array([5, 2**32 - 1], "u4")


def through(codec, values):
    """Values as the receivers read them, all places filled."""
    encode, _ = programs(codec, False, FULL, FULL)
    indices = np.arange(FULL, dtype=np.int32)
    return np.asarray(encode(values.astype(np.float32), indices, np.zeros(2, "u4"))[2])


def as_bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


@each_codec
@pytest.mark.parametrize("agreed", [False, True])
def test_decode_gives_what_encode_promised(codec, agreed):
    encode, decode = programs(codec, agreed, N, K)
    for seed, empty in enumerate((7, 0, K)):
        x, indices, header = example(seed, empty=empty)
        message, ordered, decoded = encode(x, indices, header)
        np.testing.assert_array_equal(ordered, np.sort(indices))
        assert np.all(np.asarray(decoded)[K - empty :] == 0)
        words = codecs.message_words(N, K, codec, agreed=agreed, header=2)
        assert message.shape == (words,) and message.dtype == jnp.uint32
        read_header, read_indices, values = decode(message, ordered)
        np.testing.assert_array_equal(read_header, header)
        np.testing.assert_array_equal(read_indices, ordered)
        np.testing.assert_array_equal(as_bits(values), as_bits(decoded))


def test_float32_is_lossless():
    special = [0.0, -0.0, 1e-45, -TINY / 3, TINY, LARGEST, -np.inf, np.nan]
    values = np.r_[special, np.random.default_rng(0).standard_normal(92)]
    received = through(FLOAT32, values)
    np.testing.assert_array_equal(as_bits(received), as_bits(values))


@pytest.mark.parametrize(
    "codec, dtype", [(BFLOAT16, jnp.bfloat16), (FLOAT16, np.float16)]
)
def test_short_floats_round_to_nearest(codec, dtype):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(FULL) * 10.0 ** rng.integers(-7, 4, FULL)
    values = values.astype(np.float32)
    expected = values.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(through(codec, values), expected)


def test_int8_has_255_levels_per_block():
    values = np.random.default_rng(0).standard_normal(FULL).astype(np.float32)
    values[16:32] *= 1e-20
    received = through(INT8, values)
    blocks = np.pad(values, (0, 12)).reshape(-1, 16).astype(np.float64)
    unit = np.abs(blocks).max(1, keepdims=True) / 127
    expected = (np.round(blocks / unit) * unit).reshape(-1)[:FULL]
    np.testing.assert_allclose(received, expected, rtol=1e-6)
    largest = np.abs(blocks).argmax(1) + 16 * np.arange(7)
    np.testing.assert_array_equal(received[largest], values[largest])


def test_sign_mean_is_signs_times_the_mean_of_the_valid():
    x, indices, header = example(0)
    encode, _ = programs(SIGN_MEAN, False, N, K)
    _, ordered, decoded = encode(x, indices, header)
    chosen = x[np.sort(indices)[: K - 7]].astype(np.float64)
    expected = np.sign(chosen) * np.abs(chosen).mean()
    np.testing.assert_allclose(decoded[: K - 7], expected, rtol=1e-6)


@pytest.mark.report("hivemind#266")
@each_codec
def test_finite_stays_finite(codec):
    scales = [LARGEST, 3e38, 2.0**126, 1e20, 7e4, 1e-20, 4 * TINY, TINY, 1e-45, 0]
    for scale in scales:
        values = (scale * np.linspace(-1, 1, FULL)).astype(np.float32)
        received = through(codec, values)
        assert np.all(np.isfinite(received)), scale
        assert np.all(np.abs(received) / (1 + 2**-8) <= np.abs(values).max()), scale
        assert np.all(received * np.sign(values) >= 0), scale
    mixed = np.resize([LARGEST, -LARGEST, 1, TINY, 1e-45, 0], FULL)
    assert np.all(np.isfinite(through(codec, mixed)))


@pytest.mark.parametrize("codec", [INT8, SIGN_MEAN])
def test_scales_reach_the_largest_float(codec):
    for scale in (LARGEST, 3e38, 2.0**126, 1.0, 4 * TINY):
        values = np.full(FULL, scale, np.float32)
        np.testing.assert_allclose(through(codec, values), values, rtol=1e-6)


@each_codec
def test_nan_is_not_hidden_and_harms_no_index(codec):
    x, indices, header = example(0)
    x[np.sort(indices)[3]] = np.nan
    encode, decode = programs(codec, False, N, K)
    message, ordered, _ = encode(x, indices, header)
    _, read_indices, values = decode(message, ordered)
    np.testing.assert_array_equal(read_indices, np.sort(indices))
    assert np.isnan(values[3])
    assert np.all(values[K - 7 :] == 0)


@each_codec
def test_vmap_and_scan_give_the_same_bits(codec):
    encode, decode = programs(codec, False, N, K)
    examples = [example(seed, empty=9 * seed) for seed in range(3)]
    single = [encode(*each) for each in examples]
    batch = [np.stack(part) for part in zip(*examples, strict=True)]
    batched = jax.vmap(encode)(*batch)
    messages = np.stack([message for message, _, _ in single])
    np.testing.assert_array_equal(batched[0], messages)
    decoded = np.stack([values for _, _, values in single])
    np.testing.assert_array_equal(as_bits(batched[2]), as_bits(decoded))

    def step(carry, message):
        return carry, decode(message, batched[1][0])[2]

    _, scanned = jax.lax.scan(step, 0, messages)
    np.testing.assert_array_equal(as_bits(scanned), as_bits(decoded))


@each_codec
@pytest.mark.parametrize("n, k", [(0, 0), (1, 1), (5, 0), (0, 2)])
def test_hardly_anything(codec, n, k):
    encode, decode = programs(codec, False, n, k)
    x, indices = np.full(n, -2, np.float32), np.full(k, max(n - 1, 0), np.int32)
    message, ordered, decoded = encode(x, indices, np.zeros(2, "u4"))
    _, read_indices, values = decode(message, ordered)
    np.testing.assert_array_equal(read_indices, indices)
    np.testing.assert_array_equal(values, np.full(k, -2.0 if n else 0))
    np.testing.assert_array_equal(decoded, values)


def test_without_a_header():
    x, indices, _ = example(0, n=5, k=3, empty=1)

    @jax.jit
    def there_and_back(x, indices):
        message, ordered, decoded = codecs.encode(x, indices, FLOAT32)
        return codecs.decode(message, 5, 3, FLOAT32), ordered, decoded

    (header, _, values), ordered, decoded = there_and_back(x, indices)
    assert header.shape == (0,)
    np.testing.assert_array_equal(values, decoded)
    np.testing.assert_array_equal(values[:2], x[ordered[:2]])


def test_any_words_decode_to_valid_indices():
    _, decode = programs(BFLOAT16, False, N, K)
    size = codecs.message_words(N, K, BFLOAT16, header=2)
    messages = np.random.default_rng(0).integers(0, 2**32, (9, size), dtype=np.uint32)
    for message in messages:
        _, indices, values = decode(message, np.zeros(K, np.int32))
        assert np.all((indices >= 0) & (indices <= N))
        assert np.all(np.asarray(values)[np.asarray(indices) == N] == 0)


def test_bits_per_entry():
    n = 25_557_032
    k = math.ceil(1e-3 * n)
    assert 32 * codecs.message_words(n, k, BFLOAT16) / k < 28.2
    for codec in CODECS:
        agreed = codecs.message_words(n, k, codec, agreed=True, header=3)
        assert agreed == 3 + -(-k * codec.width // 32) + codec.num_scales(k)
    assert codecs.int8().num_scales(129) == 2


@pytest.mark.parametrize("block", [0, -128])
def test_int8_refuses_empty_blocks(block):
    with pytest.raises(ValueError, match=rf"`int8\(block=...\)`.*got {block}\."):
        codecs.int8(block=block)


def test_decode_refuses_a_message_of_another_length():
    size = codecs.message_words(N, K, BFLOAT16)
    with pytest.raises(ValueError, match=rf"reads uint32\[{size}\]"):
        codecs.decode(jnp.zeros(size + 1, jnp.uint32), N, K, BFLOAT16)
