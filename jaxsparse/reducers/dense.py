"""Plain averaging, a reducer like any other: what compression is measured against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import tree
from ..arguments import check_axis_name
from ..base import PyTree, Reducer
from ..exchange import collectives


def dense(*, axis_name: collectives.AxisName) -> Reducer:
    """Averages everything over the workers: ``mean = sum_i x_i / N``, nothing is left.

    All leaves travel as one float32 vector: one all-reduce of ``4 n`` bytes.

    Args:
      axis_name: name of the mapped axis.

    Returns:
      A `Reducer` without state.

    Raises:
      TypeError: ``axis_name`` is no name; at ``init``, a leaf is not floating point.

    Example:
      >>> reducer = dense(axis_name="w")
      >>> x = jnp.array([[1.0, 2.0], [3.0, 6.0]])
      >>> jax.vmap(lambda x: reducer.reduce(x, ())[0], axis_name="w", out_axes=None)(x)
      Array([2., 4.], dtype=float32)
    """
    check_axis_name("dense(axis_name=...)", axis_name)

    def init(params: PyTree) -> PyTree:
        tree.layout(params)
        return ()

    def reduce(updates: PyTree, state: PyTree):
        collectives.axis_size(axis_name)
        collectives.check_local(updates, axis_name)
        x, spec = tree.flatten(updates)
        left = jax.tree.map(jnp.zeros_like, updates)
        if spec.size == 0:
            return tree.zeros(spec), left, state
        return tree.unflatten(collectives.mean(x, axis_name), spec), left, state

    return Reducer(init, reduce)
