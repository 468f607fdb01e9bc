"""Messages of random bits, and random entries there and back, for any n and k."""

import functools
import math

import jax
import numpy as np
from fuzzing import ASKED, budget, tick
from hypothesis import given
from hypothesis import strategies as st

import jaxsparse as js
from jaxsparse import bits, codec

VALUES = 100 if ASKED else 10  # messages for each program
CODECS = {
    "float32": js.codec.float32(),
    "bfloat16": js.codec.bfloat16(),
    "float16": js.codec.float16(),
    "int8": js.codec.int8(block=5),
    "sign_mean": js.codec.sign_mean(),
}
SIZES = st.one_of(
    st.integers(0, 70), st.integers(0, 2000), st.sampled_from([31, 32, 33, 128, 129])
)
SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def programs(name, n, k):
    """Over many messages at once: encode, and decode."""

    def encode(x, indices):
        return codec.encode(x, indices, CODECS[name])

    def decode(message):
        _, indices, values = codec.decode(message, n, k, CODECS[name])
        # What a receiver does with them: a write out of bounds would show behind.
        total = jax.numpy.zeros(n).at[indices].set(values, mode="drop")
        return indices, values, total

    return jax.jit(jax.vmap(encode)), jax.jit(jax.vmap(decode))


def done(test):
    tick(test, VALUES)
    if ASKED:  # programs would pile up
        programs.cache_clear()
        jax.clear_caches()


@budget(quick=8, values=VALUES)
@given(name=st.sampled_from([*CODECS]), n=SIZES, k=SIZES, seed=SEEDS)
def test_random_bits_decode_to_places_in_range(name, n, k, seed):
    """Whatever arrives, indices are in [0, n], and n, an empty place, holds 0."""
    rng = np.random.default_rng(seed)
    words = codec.message_words(n, k, CODECS[name])
    messages = rng.integers(0, 2**32, (VALUES, words), dtype=np.uint32)
    # Also messages of few ones, of few zeros, and of one bit all over.
    messages[::4] &= rng.integers(0, 2**32, messages[::4].shape, dtype=np.uint32)
    messages[1::4] |= rng.integers(0, 2**32, messages[1::4].shape, dtype=np.uint32)
    messages[2::8], messages[3::8] = 0, 2**32 - 1
    indices, found, total = map(np.asarray, programs(name, n, k)[1](messages))
    assert indices.shape == found.shape == (VALUES, k)
    assert indices.dtype == np.int32
    assert np.all((indices >= 0) & (indices <= n))
    assert np.all(found[indices == n] == 0)
    # Entries that no index names are not written.
    for row, written in zip(indices, total, strict=True):
        assert not np.any(np.delete(written, row[row < n]))
    done("random bits")


@budget(quick=8, values=VALUES)
@given(name=st.sampled_from([*CODECS]), n=SIZES, share=st.floats(0, 1), seed=SEEDS)
def test_random_entries_come_back_at_their_places(name, n, share, seed):
    """For every n, every k up to n and any number of empty places."""
    rng = np.random.default_rng(seed)
    k = round(share * n)
    used = rng.integers(0, k, VALUES, endpoint=True)
    used[0] = k
    indices = np.full((VALUES, k), n, np.int32)
    for row, count in zip(indices, used, strict=True):
        row[:count] = rng.choice(n, count, replace=False)
        rng.shuffle(row)
    scale = 10.0 ** rng.integers(-4, 5, (VALUES, 1))
    x = (scale * rng.normal(size=(VALUES, n))).astype(np.float32)
    x = np.clip(x, -6e4, 6e4)  # float16's
    encode, decode = programs(name, n, k)
    message, ordered, promised = map(np.asarray, encode(x, indices))
    assert message.shape == (VALUES, codec.message_words(n, k, CODECS[name]))
    np.testing.assert_array_equal(ordered, np.sort(indices, 1))
    read, found, _ = map(np.asarray, decode(message))
    np.testing.assert_array_equal(read, ordered)
    np.testing.assert_array_equal(found, promised)
    if n and name != "sign_mean":
        chosen = np.take_along_axis(x, np.minimum(ordered, n - 1), 1)
        chosen[ordered == n] = 0
        # int8's steps are 1/127 of the largest of a block; the others' are relative.
        most = np.abs(chosen).max(1, keepdims=True, initial=0) / 250
        allowed = {"float32": 0, "int8": most}.get(name, np.abs(chosen) / 250 + 1e-7)
        assert np.all(np.abs(found - chosen) <= allowed)
    done("there and back")


@budget(quick=200)
@given(n=st.integers(1, 2**31 - 2), share=st.floats(0, 1))
def test_words_of_indices_lie_between_the_entropy_and_a_bitmap(n, share):
    k = round(share * n)
    log_factorial = lambda m: math.lgamma(m + 1) / math.log(2)  # noqa: E731
    entropy = log_factorial(n) - log_factorial(k) - log_factorial(n - k)
    words = bits.index_words(k, n)
    assert entropy * (1 - 1e-9) - 1 <= 32 * words
    assert words <= max(-(-n // 32), 1)
    tick("words")
