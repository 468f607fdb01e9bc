"""Low-rank averaging, the reducer inside PowerSGD.

Each leaf of two or more dimensions is a matrix M of ``rest x last`` entries. With the
factor Q of the step before,

    P = orth(mean_i M_i Q),   Q_i = M_i^T P,   mean = P (mean_i Q_i)^T,
    left_i = M_i - P Q_i^T,

so one power iteration a step follows the mean's leading directions. ``P`` and ``Q`` of
all matrices travel together: two all-reduces, of ``4 r (rows + columns)`` bytes in sum
for a matrix. Leaves where that saves nothing, and vectors, are averaged as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import tree
from ..arguments import check_axis_name, check_positive_int
from ..base import PyTree, Reducer
from ..exchange import collectives


class LowRankState(NamedTuple):
    """State of `low_rank`, the same on all workers."""

    factors: Array  # float32; Q of each compressed leaf, columns x rank, end to end


def low_rank(rank: int, *, axis_name: collectives.AxisName, seed: int = 0) -> Reducer:
    """Averages matrices by a rank-r approximation of their mean, with warm start.

    Args:
      rank: r >= 1. Lower: fewer bytes, larger residual.
      axis_name: name of the mapped axis.
      seed: of the first factors; the same on all workers.

    Returns:
      A `Reducer`. Its ``left`` uses the worker's own factor, so that the sum over the
      workers of ``updates - left`` is N times the mean.

    Raises:
      ValueError, TypeError: an argument out of its range; leaves that are not floating
        point; at ``reduce``, a tree that is not like the one at ``init``.

    Differences from the paper:
      Each matrix is orthogonalised on its own, by QR, which is sound for zero and
      rank-deficient ones. Q is normalised before use, so that P has the scale of M and
      not of its square. A column of Q that vanishes is drawn again, or gradients
      orthogonal to it would wait for ever. The last axis makes the columns, as JAX's
      kernels have it.

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
      for Distributed Optimization", 2019.
    """
    check_positive_int("low_rank(rank=...)", rank)
    check_positive_int("low_rank(seed=...)", seed, 0)
    check_axis_name("low_rank(axis_name=...)", axis_name)

    def compressed(shape: tuple[int, ...]) -> bool:
        rows, columns = _matrix(shape)
        return rank * (rows + columns) < rows * columns

    def factors_of(spec: tree.Layout) -> tree.Layout:
        shapes = [(_matrix(s)[1], rank) for s in spec.shapes if compressed(s)]
        return tree.layout([jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])

    def drawn(spec: tree.Layout) -> Array:
        """The first factors, the same on all workers."""
        return jax.random.normal(
            jax.random.key(seed), (factors_of(spec).size,), jnp.float32
        )

    def init(params: PyTree) -> LowRankState:
        return LowRankState(drawn(tree.layout(params)))

    def reduce(updates: PyTree, state: LowRankState):
        collectives.axis_size(axis_name)
        collectives.check_local(updates, axis_name)
        tree.check_state(state, init, updates, "low_rank")
        spec = tree.layout(updates)
        leaves = jax.tree.leaves(updates)
        chosen = [compressed(shape) for shape in spec.shapes]
        matrices = [
            _bounded(leaf.astype(jnp.float32).reshape(_matrix(leaf.shape)))
            for leaf, low in zip(leaves, chosen, strict=True)
            if low
        ]
        plain = [
            leaf.astype(jnp.float32)
            for leaf, low in zip(leaves, chosen, strict=True)
            if not low
        ]

        first = tree.unflatten(drawn(spec), factors_of(spec))
        before = tree.unflatten(state.factors, factors_of(spec))
        bases = [_orthonormal(_alive(q, r)) for q, r in zip(before, first, strict=True)]
        sketches = [m @ q for m, q in zip(matrices, bases, strict=True)]
        sketches, plain = _mean_of((sketches, plain), axis_name)
        left_bases = [_orthonormal(p) for p in sketches]
        own = [m.T @ p for m, p in zip(matrices, left_bases, strict=True)]
        factors = _mean_of(own, axis_name)

        means, lefts = [], []
        rows = iter(zip(left_bases, own, factors, strict=True))
        rest = iter(plain)
        for leaf, low in zip(leaves, chosen, strict=True):
            if low:
                p, q_own, q = next(rows)
                means.append((p @ q.T).reshape(leaf.shape))
                sent = (p @ q_own.T).reshape(leaf.shape)
                lefts.append(leaf.astype(jnp.float32) - sent)
            else:
                means.append(next(rest))
                lefts.append(jnp.zeros_like(leaf))
        mean = tree.cast_like(jax.tree.unflatten(spec.treedef, means), updates)
        left = tree.cast_like(jax.tree.unflatten(spec.treedef, lefts), updates)
        return mean, left, LowRankState(tree.flatten(factors)[0])

    return Reducer(init, reduce)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf; vectors and scalars are one row."""
    if len(shape) < 2:
        return 1, int(np.prod(shape))
    return int(np.prod(shape[:-1])), shape[-1]


def _orthonormal(x: Array) -> Array:
    """An orthonormal basis of the columns' span; of zeros, some basis."""
    scale = jnp.max(jnp.abs(x), initial=0.0)
    scale = jnp.where(scale >= jnp.finfo(jnp.float32).tiny, scale, 1.0)
    return jnp.linalg.qr(x / scale)[0]


def _alive(q: Array, drawn: Array) -> Array:
    """Q, with the columns that are all zero drawn again: M Q would be zero for ever."""
    return jnp.where(jnp.any(q != 0, axis=0), q, drawn)


def _bounded(x: Array) -> Array:
    """Clamps so that products with orthonormal factors stay finite, even summed."""
    limit = jnp.finfo(jnp.float32).max / (8.0 * max(x.size, 1))
    return jnp.clip(x, -limit, limit)


def _mean_of(arrays: PyTree, axis_name: collectives.AxisName) -> PyTree:
    """The mean of a tree of float32 arrays by one collective."""
    x, spec = tree.flatten(arrays)
    if spec.size == 0:
        return tree.zeros(spec)
    return tree.unflatten(collectives.mean(x, axis_name), spec)
