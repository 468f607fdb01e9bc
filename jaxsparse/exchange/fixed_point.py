"""The mean of short vectors by one all-reduce of integers, several to a word.

With b bits an entry, N workers share ``M = floor((2**b - 1) / N) + 1`` levels: cells of
equal width in [-R, R], an entry is sent as the number of its cell, 0 to M - 1, and read
as the middle of it. The N numbers of an entry add up to less than ``2**b``, so nothing
is carried from one to the next, and a sum of words is the words of the sums: exact, and
in any order the same. An all-reduce of b-bit floating-point numbers would be neither,
and XLA:CPU widens it.

Few levels are not spent on outliers: a worker asks for a range R of ``sqrt(2.7 ln M)``
root mean squares, or for one whose outermost levels are its largest entries if that is
less, and gets the largest that any of them asked for. With four levels or more the
error of normal entries is then within a hundredth of the least that a uniform quantiser
can have (Max, "Quantizing for Minimum Distortion", 1960).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from ..scaling import norm, relative
from . import collectives


def levels(bits: int, num_workers: int) -> int:
    """M: the levels that N workers have.

    >>> levels(8, 8), levels(5, 8), levels(16, 8), levels(3, 8)
    (32, 4, 8192, 1)
    """
    return int((2**bits - 1) // num_workers + 1)


def words(size: int, bits: int) -> int:
    """Words that ``size`` entries take: no entry lies in two of them.

    >>> words(100, 8), words(100, 6)
    (25, 20)
    """
    return -(-size // (32 // bits))


def fixed_point_mean(
    x: Array, bits: int, axis_name: collectives.AxisName
) -> tuple[Array, Array]:
    """The mean over the workers of a float32 vector, and this worker's part in it.

    Two all-reduces: a float32 scalar, then ``4 ceil(s / floor(32 / b))`` bytes of s
    entries.

    Args:
      x: float32[s].
      bits: b, at most 16.
      axis_name: name of the mapped axis.

    Returns:
      * the mean, float32[s], the same on all workers;
      * what this worker put into it, float32[s]: x, rounded and cut off at the range.

    Raises:
      ValueError: b is too large, or too small for so many workers.

    Example:
      >>> import jax
      >>> x = jnp.array([[1.0, -1.0], [0.5, 0.5]])
      >>> f = lambda x: fixed_point_mean(x, 16, "w")[0]
      >>> jax.vmap(f, axis_name="w", out_axes=None)(x).tolist()
      [0.7500, -0.2500]
    """
    workers, size = collectives.axis_size(axis_name), x.shape[0]
    count = levels(bits, workers)
    if bits > 16 or count < 2:
        least = math.ceil(math.log2(workers + 1))
        raise ValueError(
            f"the integers of {workers} workers do not add up in {bits} bits: take "
            f"{least} to 16."
        )
    limit = collectives.maximum(_outermost(x, count), axis_name)
    cells = jnp.floor((relative(x, limit) * (count - 1) + count) / 2)
    codes = jnp.clip(cells, 0, count - 1).astype(jnp.uint32)

    lanes = 32 // bits
    shifts = bits * lax.iota(jnp.uint32, lanes)
    padded = jnp.pad(codes, (0, -size % lanes)).reshape(-1, lanes) << shifts
    total = collectives.total(jnp.sum(padded, 1, dtype=jnp.uint32), axis_name)
    sums = (total[:, None] >> shifts) & jnp.uint32(2**bits - 1)

    def middle(codes: Array, numbers: int) -> Array:
        """What so many numbers of cells mean together, divided by how many they are."""
        most = numbers * (count - 1)
        return (2 * codes.astype(jnp.int32) - most).astype(jnp.float32) / most * limit

    return middle(sums.reshape(-1)[:size], workers), middle(codes, 1)


def _outermost(x: Array, count: int) -> Array:
    """The outermost level that a worker asks for, R (M - 1) / M, a float32 scalar."""
    largest = jnp.max(jnp.abs(x), initial=0.0)
    rms = norm(x) / math.sqrt(max(x.shape[0], 1))
    share = math.sqrt(2.7 * math.log(count)) * (count - 1) / count
    most = float(jnp.finfo(jnp.float32).max) / max(share, 1) * 0.999
    wide = jnp.where(rms < most, rms * share, largest)
    # A denormal vector has no root mean square.
    return jnp.where(rms > 0, jnp.minimum(largest, wide), largest)
