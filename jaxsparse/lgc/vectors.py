"""Small arithmetic on the k chosen values, finite for finite input."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..bits import pack, unpack
from ..codec import Codec
from ..scaling import add, norm, relative

# Values a code sees at most, in units of the leader's root mean square: a follower's
# may be of any size, and what is cut off stays with it.
_LIMIT = 1e4


def take(x: Array, indices: Array) -> Array:
    """The entries at indices; 0 in empty places."""
    return x.at[indices].get(mode="fill", fill_value=0)


def subtract_at(x: Array, indices: Array, values: Array) -> Array:
    """``x`` less values at distinct indices; never infinite."""
    return x.at[indices].set(add(take(x, indices), -values), mode="drop")


def add_at(x: Array, indices: Array, values: Array) -> Array:
    """``x`` plus values at distinct indices; never infinite."""
    return subtract_at(x, indices, -values)


def rms(values: Array, valid: Array) -> Array:
    """Root mean square of the valid values; the others are 0."""
    count = jnp.maximum(jnp.sum(valid, dtype=jnp.int32), 1)
    return norm(values) / jnp.sqrt(count.astype(jnp.float32))


def normalised(values: Array, scale: Array, signs: Array) -> Array:
    """Values as a code sees them: in units of the scale, signs flipped."""
    return jnp.clip(relative(values, scale), -_LIMIT, _LIMIT) * signs


def restored(values: Array, scale: Array, signs: Array) -> Array:
    """The inverse of `normalised`."""
    most = float(jnp.finfo(jnp.float32).max)
    return jnp.clip(values * signs * scale, -most, most)


def largest(values: Array, m: int) -> Array:
    """The values with all but the m largest magnitudes set to zero."""
    places = lax.top_k(jnp.abs(values), m)[1]
    return jnp.zeros_like(values).at[places].set(values[places])


def words_of(codec: Codec, k: int) -> int:
    """Words of k values written by `write`."""
    return -(-k * codec.width // 32) + codec.num_scales(k)


def write(codec: Codec, values: Array, valid: Array | None = None) -> Array:
    """Values as ``uint32`` words; what is not valid has no part in the scales."""
    valid = jnp.ones(values.shape, bool) if valid is None else valid
    codes, scales = codec.encode(values, valid)
    words = lax.bitcast_convert_type(scales, jnp.uint32)
    return jnp.concatenate([pack(codes, codec.width), words])


def read(codec: Codec, words: Array, k: int) -> Array:
    """The inverse of `write`, up to the codec's rounding."""
    split = words.shape[0] - codec.num_scales(k)
    scales = lax.bitcast_convert_type(words[split:], jnp.float32)
    return codec.decode(unpack(words[:split], k, codec.width), scales)


def to_words(*scalars: Array) -> Array:
    """Float32 scalars as a header."""
    floats = jnp.stack(scalars).astype(jnp.float32)
    return lax.bitcast_convert_type(floats, jnp.uint32)


def from_words(words: Array) -> Array:
    """The inverse of `to_words`, float32."""
    return lax.bitcast_convert_type(words, jnp.float32)
