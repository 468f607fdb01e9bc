"""Selected entries as one flat ``uint32`` message, and back.

    [ header | index part (`bits.encode_indices`) | values, packed | float32 scales ]

Everything has a static size, so that one collective moves it; counters ride along in
the header. A `Codec` says in how many bits a value is written. The sender learns what
the receivers will read, `encode`'s ``decoded``: what is lost is kept by the caller.

>>> x = jnp.array([0.0, 3.0, 0.0, -1.5, 0.25])
>>> message, indices, decoded = encode(x, jnp.array([3, 1, 5]), bfloat16())
>>> indices.tolist(), decoded.tolist()  # 5 is no entry: an empty place
([1, 3, 5], [3.0, -1.5, 0.0])
>>> _, indices, values = decode(message, 5, 3, bfloat16())
>>> indices.tolist(), values.tolist(), message.shape
([1, 3, 5], [3.0, -1.5, 0.0], (3,))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxsparse import bits
from jaxsparse.scaling import relative


class Codec(NamedTuple):
    """How float32 values are written; finite values are read back finite.

    Attributes:
      name: for tables and error messages.
      width: bits per value.
      num_scales: ``k -> s``: how many float32 scales go with k values.
      encode: ``(values f32[k], valid bool[k]) -> (codes uint32[k], scales f32[s])``;
        values in places that are not valid are 0.
      decode: ``(codes, scales) -> values f32[k]``; places that are not valid may hold
        anything.
    """

    name: str
    width: int
    num_scales: Callable[[int], int]
    encode: Callable[[Array, Array], tuple[Array, Array]]
    decode: Callable[[Array, Array], Array]


def float32() -> Codec:
    """Values as they are, bit for bit: 32 bits."""

    def encode(values, valid):
        del valid
        return lax.bitcast_convert_type(values, jnp.uint32), _no_scales()

    def decode(codes, scales):
        del scales
        return lax.bitcast_convert_type(codes, jnp.float32)

    return Codec("float32", 32, lambda k: 0, encode, decode)


def bfloat16() -> Codec:
    """The nearest bfloat16, ties to even: 16 bits, a relative error up to 2**-9."""

    def encode(values, valid):
        del valid
        # XLA may drop a conversion there and back, but never `reduce_precision`.
        values = lax.reduce_precision(_clamp(values, jnp.bfloat16), 8, 7)
        return lax.bitcast_convert_type(values, jnp.uint32) >> 16, _no_scales()

    def decode(codes, scales):
        del scales
        return lax.bitcast_convert_type(codes << 16, jnp.float32)

    return Codec("bfloat16", 16, lambda k: 0, encode, decode)


def float16() -> Codec:
    """The nearest float16: 16 bits, a relative error up to 2**-12 from 6e-5 to 65504.

    Smaller values lose precision and larger ones are clamped; see `bfloat16`.
    """

    def encode(values, valid):
        del valid
        values = _clamp(values, jnp.float16).astype(jnp.float16)
        codes = lax.bitcast_convert_type(values, jnp.uint16)
        return codes.astype(jnp.uint32), _no_scales()

    def decode(codes, scales):
        del scales
        values = lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.float16)
        return values.astype(jnp.float32)

    return Codec("float16", 16, lambda k: 0, encode, decode)


def int8(block: int = 128) -> Codec:
    """255 levels from -max to +max of a block of values: 8 bits + 32 bits per block.

    ``code = round(127 v / m)`` with m the largest magnitude of the block. The blocks
    follow the order of the indices.

    Args:
      block: values per scale; smaller blocks => smaller error, more scales.

    Raises:
      ValueError: for a block below 1.

    References:
      Tim Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015.
    """
    if block < 1:
        raise ValueError(
            f"`int8(block=...)` must be at least 1, got {block}. "
            "Pass the number of values that share a scale, such as 128."
        )

    def encode(values, valid):
        del valid
        size = values.shape[0]
        blocks = jnp.pad(values, (0, -size % block)).reshape(-1, block)
        scales = jnp.max(jnp.abs(blocks), axis=1)
        unit = relative(blocks, scales[:, None])
        codes = jnp.clip(jnp.round(unit * 127), -127, 127).astype(jnp.int32) + 127
        return codes.reshape(-1)[:size].astype(jnp.uint32), scales

    def decode(codes, scales):
        size = codes.shape[0]
        unit = (codes.astype(jnp.int32) - 127).astype(jnp.float32) * (1 / 127)
        blocks = jnp.pad(unit, (0, -size % block)).reshape(-1, block)
        return (blocks * scales[:, None]).reshape(-1)[:size]

    return Codec("int8", 8, lambda k: -(-k // block), encode, decode)


def sign_mean() -> Codec:
    """The sign of every value, and one magnitude for all: 1 bit + 32 bits.

    The magnitude is the mean of ``|v|`` over the valid entries; 0 is sent as positive.

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation
      for Non-Convex Problems", 2018. Karimireddy, Rebjock, Stich, Jaggi, "Error
      Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019.
    """

    def encode(values, valid):
        largest = jnp.max(jnp.abs(values), initial=0)
        # In units of the largest, so that the sum cannot overflow.
        total = _sum(jnp.abs(relative(values, largest)))
        count = jnp.maximum(jnp.sum(valid, dtype=jnp.int32), 1).astype(jnp.float32)
        mean = jnp.minimum(total / count, 1) * largest
        # The sign bit: a comparison may take a denormal for 0.
        return lax.bitcast_convert_type(values, jnp.uint32) >> 31, mean[None]

    def decode(codes, scales):
        return jnp.where(codes == 1, -scales, scales)

    return Codec("sign_mean", 1, lambda k: 1, encode, decode)


def message_words(
    n: int, k: int, codec: Codec, *, agreed: bool = False, header: int = 0
) -> int:
    """Words of the message that carries k of n entries.

    >>> message_words(1_000_000, 1000, bfloat16()) * 32 / 1000  # bits per entry
    28.0
    """
    indices = 0 if agreed else bits.index_words(k, n)
    return header + indices + -(-k * codec.width // 32) + codec.num_scales(k)


def encode(
    x: Array,
    indices: Array,
    codec: Codec,
    *,
    agreed: bool = False,
    header: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Writes the chosen entries of a vector into one message.

    Args:
      x: float32[n].
      indices: int32[k], distinct, in any order; n in empty places.
      codec: how the values are written.
      agreed: the receivers know the indices, which are not sent.
      header: uint32[h], sent along as it is.

    Returns:
      * the message, uint32[message_words(n, k, codec, agreed=agreed, header=h)];
      * the indices in ascending order, int32[k];
      * the values there as the receivers will read them, float32[k]; 0 in empty places.
    """
    n = x.shape[0]
    indices = lax.sort(indices, is_stable=False)
    if n:
        values = x.at[indices].get(mode="fill", fill_value=0, indices_are_sorted=True)
    else:  # nothing but empty places, and XLA refuses to gather from an empty vector
        values = jnp.zeros(indices.shape, jnp.float32)
    message, decoded = write(indices, values, n, codec, agreed=agreed, header=header)
    return message, indices, decoded


def write(
    indices: Array,
    values: Array,
    n: int,
    codec: Codec,
    *,
    agreed: bool = False,
    header: Array | None = None,
) -> tuple[Array, Array]:
    """Like `encode`, for values that have been picked already.

    Args:
      indices: int32[k], ascending; n in empty places.
      values: float32[k]; 0 in empty places.
      n: entries of the vector that the indices are of.
      codec: how the values are written.
      agreed: the receivers know the indices, which are not sent.
      header: uint32[h], sent along as it is.

    Returns:
      * the message;
      * the values as the receivers will read them, float32[k]; 0 in empty places.
    """
    valid = indices < n
    codes, scales = codec.encode(values, valid)
    parts = [
        header,
        None if agreed else bits.encode_indices(indices, n),
        bits.pack(codes, codec.width),
        lax.bitcast_convert_type(scales, jnp.uint32),
    ]
    message = jnp.concatenate([part for part in parts if part is not None])
    return message, jnp.where(valid, codec.decode(codes, scales), 0)


def decode(
    message: Array,
    n: int,
    k: int,
    codec: Codec,
    *,
    indices: Array | None = None,
    header: int = 0,
) -> tuple[Array, Array, Array]:
    """The inverse of `encode`.

    Args:
      message: uint32[w]; may come from anywhere.
      n: entries of the vector.
      k: places in the message.
      codec: the codec it was written with.
      indices: int32[k], as `encode` returned them (in ascending order): given for a
        message with ``agreed=True``, and only for such.
      header: words of the header.

    Returns:
      * the header, uint32[h];
      * the indices, int32[k], in [0, n] whatever the message;
      * the values there, float32[k]; 0 in empty places.

    Raises:
      ValueError: for a message of another length.
    """
    agreed = indices is not None
    expected = message_words(n, k, codec, agreed=agreed, header=header)
    if message.shape != (expected,):
        raise ValueError(
            f"`decode(message, {n}, {k}, {codec.name}, header={header})` reads "
            f"uint32[{expected}], got a message of shape {message.shape}. Pass the "
            "n, k, codec, header and `indices` (if agreed) it was encoded with."
        )
    start = header
    if indices is None:
        start += bits.index_words(k, n)
        indices = bits.decode_indices(message[header:start], k, n)
    stop = expected - codec.num_scales(k)
    codes = bits.unpack(message[start:stop], k, codec.width)
    scales = lax.bitcast_convert_type(message[stop:], jnp.float32)
    values = jnp.where(indices < n, codec.decode(codes, scales), 0)
    return message[:header], indices, values


def _no_scales() -> Array:
    return jnp.zeros(0, jnp.float32)


def _clamp(values: Array, dtype) -> Array:
    """Into the finite range of a dtype; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(values, -largest, largest)


def _sum(values: Array) -> Array:
    """A sum of neighbours, and of their sums: in one order, under jit and vmap.

    Zeros behind the values, where a message has empty places, change no bit.
    """
    while values.shape[0] > 1:
        values = jnp.pad(values, (0, values.shape[0] % 2))
        values = values[0::2] + values[1::2]
    return values.sum()
