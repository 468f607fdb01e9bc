"""The learning rate and what is owed: residuals keep the rate they were computed at."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .arguments import check_number
from .base import PyTree, WorkerLocal
from .memory import ErrorFeedbackState, MomentumCorrectionState


class FollowLearningRateState(NamedTuple):
    """State of `follow_learning_rate`, the same on all workers but for ``inner``."""

    # shape=(), dtype=int32; steps taken, stops at its maximum
    count: Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    rate: Array  # shape=(), dtype=float32; the latest that was not 0
    inner: PyTree


def follow_learning_rate(
    tx: optax.GradientTransformation, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """Rescales what a memory holds back whenever the learning rate changes.

    Where the rate is applied after the exchange, a gradient that waits in a memory is
    delivered at the rate of a later step. Here what is owed is scaled before step t by
    ``eta_(t-1) / eta_t``, so that it comes at the rate at which it was computed:

        sum_t eta_t mean_t + eta_T mean(owed_T) = sum_t eta_t mean(g_t)

    for a memory that forgets nothing, whatever the schedule. A gradient given at a rate
    of 0 is worth nothing: what is left of it is dropped, and what is owed stays as it
    is. At a constant rate not a bit changes.

    Owed are the residual of `error_feedback`, the velocity of `momentum_correction`
    and what a `server` holds back. The momentum of `momentum_correction` is not: plain
    momentum SGD applies it at the rate of the day, too.

    Args:
      tx: a memory, or anything that holds some: ``js.dgc``, a chain, a partition.
      learning_rate: the schedule (or number, >= 0) that the optimizer behind it has;
        it is asked at the number of steps that this transformation has taken.

    Returns:
      A transformation like ``tx``.

    Raises:
      TypeError: ``tx`` is no transformation, ``learning_rate`` neither a number nor a
        function.
      ValueError: a number that is negative.

    Example:
      >>> import jaxsparse as js
      >>> rate = optax.piecewise_constant_schedule(1.0, {1: 0.1})  # 1, then 0.1
      >>> memory = js.error_feedback(
      ...     js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w"))
      >>> tx = optax.chain(js.follow_learning_rate(memory, rate), optax.sgd(rate))
      >>> def twice(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(0 * g, state)
      ...     return first, second
      >>> g = jnp.array([[4.0, 1.0], [2.0, 1.0]])  # of two workers
      >>> print(*jax.jit(jax.vmap(twice, axis_name="w", out_axes=None))(g))
      [-3. 0.] [0. -1.]

    References:
      Zheng, Huang, Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD
      with Error-Feedback", 2019 (the factor ``eta_(t-1) / eta_t``).
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "`follow_learning_rate(...)` takes a transformation, such as "
            f"`js.error_feedback(reducer)`, got {type(tx).__name__}."
        )
    if not callable(learning_rate):
        check_number(
            "follow_learning_rate(learning_rate=...)",
            learning_rate,
            "be finite and not negative",
            lambda x: 0 <= x < float("inf"),
        )
    tx = optax.with_extra_args_support(tx)

    def rate_at(count: Array) -> Array:
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        return jnp.asarray(rate, jnp.float32)

    def init(params: PyTree) -> FollowLearningRateState:
        # Nothing is owed yet: any rate will do.
        return FollowLearningRateState(
            jnp.zeros((), jnp.int32), jnp.ones(()), tx.init(params)
        )

    def update(updates, state, params=None, **extra_args):
        rate = rate_at(state.count)
        counts = rate >= _LEAST
        factor = state.rate / jnp.where(counts, rate, 1)
        factor = jnp.where(counts, jnp.minimum(factor, _MOST), 0)
        owed = _owed(state.inner)
        scaled = jax.tree.map(
            lambda own, x: _times(x, factor) if own else x, owed, state.inner
        )
        updates, inner = tx.update(updates, scaled, params, **extra_args)
        inner = jax.tree.map(
            lambda own, new, old: jnp.where(counts, new, old) if own else new,
            owed,
            inner,
            state.inner,
        )
        after = FollowLearningRateState(
            optax.safe_increment(state.count),
            jnp.where(counts, rate, state.rate),
            inner,
        )
        return updates, after

    return optax.GradientTransformationExtraArgs(init, update)


# A smaller rate is taken for 0, as XLA takes numbers below the normal range.
_LEAST = float(jnp.finfo(jnp.float32).tiny)
_MOST = float(jnp.finfo(jnp.float32).max)


def _owed(state: PyTree) -> PyTree:
    """A tree like ``state`` of bools: True where it holds updates not yet delivered."""

    def all_of(node, value=True):
        return jax.tree.map(lambda x: value and _is_float(x), node)

    def mark(node):
        if isinstance(node, ErrorFeedbackState):
            return ErrorFeedbackState(all_of(node.residual), _owed(node.reducer))
        if isinstance(node, MomentumCorrectionState):
            return MomentumCorrectionState(
                all_of(node.momentum, False),
                all_of(node.velocity),
                _owed(node.reducer),
            )
        if isinstance(node, WorkerLocal) and node.reshard == "inner":
            return dataclasses.replace(node, value=_owed(node.value))
        return all_of(node, isinstance(node, WorkerLocal) and node.reshard == "shard")

    known = ErrorFeedbackState, MomentumCorrectionState, WorkerLocal
    return jax.tree.map(mark, state, is_leaf=lambda node: isinstance(node, known))


def _is_float(x: Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _times(x: Array, factor: Array) -> Array:
    """The product; of finite numbers always finite."""
    product = jnp.clip(x * factor, -_MOST, _MOST)
    return jnp.where(jnp.isfinite(x), product, x)
