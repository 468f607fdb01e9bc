"""The mean of short vectors by one all-reduce of integers, several to a word.

With b bits an entry and L the largest magnitude on any worker, an entry becomes the
integer ``round(x h / L) + h`` in [0, 2 h], ``h = floor((2**b - 1) / 2 N)``. The N
integers of an entry add up to less than ``2**b``, so nothing is carried from one to the
next, and a sum of words is the words of the sums: exact, and in any order the same.
An all-reduce of b-bit floating-point numbers would be neither, and XLA:CPU widens it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ..bits import pack, unpack
from ..scaling import relative
from . import collectives


def fixed_point_mean(
    x: Array, bits: int, axis_name: collectives.AxisName
) -> tuple[Array, Array]:
    """The mean over the workers of a float32 vector, and this worker's part in it.

    Two all-reduces: a float32 scalar, then ``4 ceil(b s / 32)`` bytes of s entries.

    Args:
      x: float32[s].
      bits: b, a divisor of 32.
      axis_name: name of the mapped axis.

    Returns:
      * the mean, float32[s], the same on all workers;
      * what this worker put into it, float32[s]: x, rounded.

    Raises:
      ValueError: b is no divisor of 32, or too small for so many workers.

    Example:
      >>> import jax
      >>> x = jnp.array([[1.0, -1.0], [0.5, 0.5]])
      >>> f = lambda x: fixed_point_mean(x, 16, "w")[0]
      >>> jax.vmap(f, axis_name="w", out_axes=None)(x).tolist()
      [0.7500, -0.2500]
    """
    workers = collectives.axis_size(axis_name)
    half = (2**bits - 1) // (2 * workers)
    if bits not in (2, 4, 8, 16) or half < 1:
        raise ValueError(
            f"the integers of {workers} workers do not add up in {bits} bits: take "
            "8 or 16."
        )
    limit = collectives.maximum(jnp.max(jnp.abs(x), initial=0.0), axis_name)
    level = jnp.clip(jnp.round(relative(x, limit) * half), -half, half)
    codes = level.astype(jnp.int32) + half
    words = collectives.total(pack(codes.astype(jnp.uint32), bits), axis_name)
    sums = unpack(words, x.shape[0], bits).astype(jnp.int32) - workers * half
    mean = sums.astype(jnp.float32) / (workers * half)
    return mean * limit, level / half * limit
