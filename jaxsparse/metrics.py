"""What the steps measured, read out of an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .base import ExchangeMetrics, PyTree
from .memory import ErrorFeedbackState, MomentumCorrectionState
from .nonfinite import SkipNonfiniteState
from .phases import PhasesState


class Metrics(NamedTuple):
    """Scalars of the latest step. All but the norm are the same on every worker."""

    selected: Array  # float32; entries a worker sent, mean over the workers
    aggregated: Array  # int32; non-zero entries of the mean: what a server would send
    overflow: Array  # float32; entries that found no place, mean over the workers
    phase: Array  # int32; of `phases`
    rung: Array  # int32; of the capacity ladder
    skipped: Array  # int32; steps skipped by `skip_nonfinite` so far
    residual_norm: Array  # float32; Euclidean norm of what this worker holds back


def metrics(opt_state: PyTree) -> Metrics:
    """The measured quantities of the latest step, as scalars.

    Call it inside the step: the norm is computed here, from this worker's residual, and
    costs nothing where it is not asked for. Several reducers in one state (under
    ``optax.partition``) are added up; of their phases and rungs the largest is given.

    Args:
      opt_state: of any optax chain that contains the library's transformations.

    Returns:
      `Metrics`; zeros where there is nothing to tell.

    Example:
      >>> import jaxsparse as js
      >>> tx = js.error_feedback(
      ...     js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w"))
      >>> step = lambda g: js.metrics(tx.update(g, tx.init(g))[1])
      >>> m = jax.vmap(step, axis_name="w")(jnp.array([[2.0, 1.0], [1.0, 3.0]]))
      >>> print(m.selected[0], m.aggregated[0], m.residual_norm)
      1.0 2 [1. 1.]
    """
    exchanges = _find(opt_state, ExchangeMetrics)
    phases = _find(opt_state, PhasesState)
    residuals = [s.residual for s in _find(opt_state, ErrorFeedbackState)]
    residuals += [s.velocity for s in _find(opt_state, MomentumCorrectionState)]
    return Metrics(
        selected=_total([m.selected for m in exchanges], jnp.float32),
        aggregated=_total([m.aggregated for m in exchanges], jnp.int32),
        overflow=_total([m.overflow for m in exchanges], jnp.float32),
        phase=_largest([p.phase for p in phases]),
        rung=_largest([m.rung for m in exchanges]),
        skipped=_total(
            [s.skipped for s in _find(opt_state, SkipNonfiniteState)], jnp.int32
        ),
        residual_norm=_norm(residuals),
    )


def _find(state: PyTree, kind: Any) -> list:
    """All nodes of a kind, also inside one another."""
    found = []

    def visit(node):
        if isinstance(node, kind):
            found.append(node)
        children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
        for child in children:
            if child is not node:
                visit(child)

    visit(state)
    return found


def _total(values: list[Array], dtype: Any) -> Array:
    return sum(values, jnp.zeros((), dtype))


def _largest(values: list[Array]) -> Array:
    return jnp.max(jnp.stack([jnp.zeros((), jnp.int32), *values]))


def _norm(tree: PyTree) -> Array:
    """Euclidean norm that does not overflow: scales before it squares."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    scale = jnp.where(largest > jnp.finfo(jnp.float32).tiny, largest, 1.0)
    return scale * jnp.sqrt(sum(jnp.sum((leaf / scale) ** 2) for leaf in leaves))
