"""Arithmetic near the ends of float32's range: scale first, then square or divide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_TINY = float(jnp.finfo(jnp.float32).tiny)


def relative(values: Array, largest: Array) -> Array:
    """``values / largest``, in [-1, 1] up to rounding; 0 where the largest is denormal.

    XLA turns a division by a broadcast scalar into a product with its reciprocal, which
    from 2**126 on is denormal and taken for 0. So large numbers are scaled down first:
    by a select, as a mere factor would be moved over to the reciprocal.
    """
    is_large = largest > 1
    values = jnp.where(is_large, values * 2**-32, values)
    largest = jnp.where(is_large, largest * 2**-32, largest)
    return values * (1 / jnp.where(largest >= _TINY, largest, 1))


def add(a: Array, b: Array) -> Array:
    """``a + b`` in float32; of finite numbers always finite.

    >>> add(jnp.float32(3e38), jnp.float32(3e38)) == jnp.finfo(jnp.float32).max
    Array(True, dtype=bool)
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    most = float(jnp.finfo(jnp.float32).max)
    both = jnp.isfinite(a) & jnp.isfinite(b)
    return jnp.where(both, jnp.clip(a + b, -most, most), a + b)


def norm(tree: Any) -> Array:
    """Euclidean norm of all entries of a tree, without overflow; float32 scalar.

    >>> norm({"a": jnp.full(4, 1e38)}) / 2e38
    Array(1., dtype=float32)
    """
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree) if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    squares = [jnp.sum(relative(leaf, largest) ** 2) for leaf in leaves]
    most = float(jnp.finfo(jnp.float32).max)
    return jnp.minimum(largest * jnp.sqrt(sum(squares)), most)
