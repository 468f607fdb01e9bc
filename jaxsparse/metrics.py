"""What the steps measured, read out of an optimizer's state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .base import ExchangeMetrics, PyTree
from .lgc.stages import LgcMetrics
from .memory import ErrorFeedbackState, MomentumCorrectionState
from .nonfinite import SkipNonfiniteState
from .phases import PhasesState
from .scaling import norm, relative


class Metrics(NamedTuple):
    """Scalars of the latest step. The last two are this worker's own."""

    selected: Array  # float32; entries a worker sent, mean over the workers
    aggregated: Array  # int32; entries in the union: what a server would send
    overlap: Array  # float32; workers that sent an entry of the union, mean: 1 to N
    jaccard: Array  # float32; common part of two workers' selections, mean over pairs
    overflow: Array  # float32; entries that found no place, mean over the workers
    phase: Array  # int32; of `phases`
    rung: Array  # int32; of the capacity ladder
    skipped: Array  # int32; steps skipped by `skip_nonfinite` so far
    consecutive: Array  # int32; of these the latest, in a row; 0 after a step taken
    nmse: Array  # float32; error of a learned code, when it was last measured
    gate: Array  # int32; 1 where the step sent a learned code's latent
    measured: Array  # int32; steps so far in which that error was measured
    fallbacks: Array  # int32; steps so far without a latent where one was due
    residual_norm: Array  # float32; Euclidean norm of what this worker holds back
    captured: Array  # float32; share of this worker's energy that was sent, 0 to 1


def metrics(opt_state: PyTree) -> Metrics:
    """The measured quantities of the latest step, as scalars.

    Call it inside the step: the norm of this worker's residual is computed here, and
    costs nothing where it is not asked for. ``captured`` is ``s / (s + r)`` with s and
    r the squared norms of what was sent and what is held back; there is none without a
    memory. Several reducers in one state (under
    ``optax.partition``) are added up; of their phases, rungs and errors the largest is
    given, and of their gates the smallest.

    Args:
      opt_state: of any optax chain that contains the library's transformations.

    Returns:
      `Metrics`; zeros where there is nothing to tell.

    Example:
      >>> import jaxsparse as js
      >>> tx = js.error_feedback(
      ...     js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w"))
      >>> step = lambda g: js.metrics(tx.update(g, tx.init(g))[1])
      >>> g = jnp.array([[2.0, 1.0], [1.0, 3.0]])  # of two workers
      >>> m = jax.jit(jax.vmap(step, axis_name="w"))(g)
      >>> print(m.selected[0], m.aggregated[0], m.residual_norm)
      1.0 2 [1. 1.]
    """
    exchanges = _find(opt_state, ExchangeMetrics)
    phases = _find(opt_state, PhasesState)
    skips = _find(opt_state, SkipNonfiniteState)
    codes = _find(opt_state, LgcMetrics)
    residuals = [s.residual for s in _find(opt_state, ErrorFeedbackState)]
    residuals += [s.velocity for s in _find(opt_state, MomentumCorrectionState)]
    selected = _total([m.selected for m in exchanges], jnp.float32)
    aggregated = _total([m.aggregated for m in exchanges], jnp.int32)
    common = _total([m.common for m in exchanges], jnp.float32)
    received = _total([m.overlap * m.aggregated for m in exchanges], jnp.float32)
    residual_norm = norm(residuals)
    sent_norm = norm([m.sent_norm for m in exchanges])
    return Metrics(
        selected=selected,
        aggregated=aggregated,
        overlap=received / jnp.maximum(aggregated, 1),
        jaccard=common / jnp.maximum(2 * selected - common, 1),
        overflow=_total([m.overflow for m in exchanges], jnp.float32),
        phase=_largest([p.phase for p in phases]),
        rung=_largest([m.rung for m in exchanges]),
        skipped=_total([s.skipped for s in skips], jnp.int32),
        consecutive=_largest([s.consecutive for s in skips]),
        nmse=_largest([c.nmse for c in codes], jnp.float32),
        gate=_smallest([c.gate for c in codes]),
        measured=_total([c.measured for c in codes], jnp.int32),
        fallbacks=_total([c.fallbacks for c in codes], jnp.int32),
        residual_norm=residual_norm,
        captured=_share(sent_norm, residual_norm),
    )


def _share(a: Array, b: Array) -> Array:
    """``a**2 / (a**2 + b**2)`` without overflow; 0 if both are 0."""
    largest = jnp.maximum(a, b)
    a, b = relative(a, largest) ** 2, relative(b, largest) ** 2
    return a / jnp.maximum(a + b, 1.0)


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


def _largest(values: list[Array], dtype: Any = jnp.int32) -> Array:
    return jnp.max(jnp.stack([jnp.zeros((), dtype), *values]))


def _smallest(values: list[Array]) -> Array:
    return jnp.min(jnp.stack(values)) if values else jnp.zeros((), jnp.int32)
