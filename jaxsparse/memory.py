"""Memories: what happens to the part of an update that was not sent.

Each makes an ordinary optax transformation out of a `Reducer`. Put it where the mean
over workers would stand: what comes before it in a chain sees one worker's gradient,
what comes after it sees the mean, the same on all workers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from . import tree
from .arguments import check_fraction
from .base import PyTree, Reducer, WorkerLocal
from .exchange import collectives
from .scaling import add


def stateless(reducer: Reducer) -> optax.GradientTransformationExtraArgs:
    """Sends updates through a reducer and forgets what was left.

    Right for `dense`, and for unbiased methods; biased ones (top-k) lose the small
    entries for ever without a memory.

    Args:
      reducer: any `Reducer`.

    Returns:
      A transformation whose state is the reducer's.

    Example:
      >>> import jaxsparse as js
      >>> tx = js.stateless(js.dense(axis_name="w"))
      >>> grads = jnp.array([[1.0], [3.0]])
      >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="w")(grads)
      Array([[2.], [2.]], dtype=float32)
    """
    _check_reducer("stateless", reducer)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        mean, _, state = reducer.reduce(updates, state)
        return mean, state

    return optax.GradientTransformationExtraArgs(reducer.init, update)


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: WorkerLocal  # like the parameters, float32
    reducer: PyTree


def error_feedback(
    reducer: Reducer, decay: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Adds what was left at earlier steps to the updates before they are reduced.

    With ``a = g + decay * r``, the reducer's ``mean, left`` of ``a``, and ``r = left``
    for the next step. With ``decay = 1`` nothing is ever lost: the means delivered so
    far plus the mean residual equal the mean gradients given so far.

    Args:
      reducer: any `Reducer`.
      decay: factor on the residual, in [0, 1]; lower forgets faster.

    Returns:
      A transformation from one worker's updates to the mean, the same on all workers.

    Raises:
      ValueError: ``decay`` outside [0, 1]; at ``update``, a tree that is not like the
        one at ``init``.

    Example:
      >>> import jaxsparse as js
      >>> tx = js.error_feedback(
      ...     js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w"))
      >>> g = jnp.array([[4.0, 1.0], [2.0, 1.0]])  # of two workers
      >>> def twice(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(0 * g, state)
      ...     return first, second
      >>> print(*jax.jit(jax.vmap(twice, axis_name="w", out_axes=None))(g))
      [3. 0.] [0. 1.]

    References:
      Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent", 2014.
      Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", 2018.
    """
    _check_reducer("error_feedback", reducer)
    check_fraction("error_feedback(decay=...)", decay)

    def init(params: PyTree) -> ErrorFeedbackState:
        return ErrorFeedbackState(WorkerLocal(_zeros(params)), reducer.init(params))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        residual = state.residual.value
        tree.check_matches(updates, residual, "the residual of `error_feedback`")
        collectives.check_as_local(updates, residual)
        grads = tree.cast_float32(updates)
        compensated = jax.tree.map(lambda g, r: add(g, decay * r), grads, residual)
        mean, left, inner = reducer.reduce(compensated, state.reducer)
        mean, left = _rounded(mean, left, updates)
        return mean, ErrorFeedbackState(WorkerLocal(left), inner)

    return optax.GradientTransformationExtraArgs(init, update)


class MomentumCorrectionState(NamedTuple):
    """State of `momentum_correction`."""

    momentum: WorkerLocal  # u, like the parameters, float32
    velocity: WorkerLocal  # v: accumulated momentum not yet sent, float32
    reducer: PyTree


def momentum_correction(
    reducer: Reducer,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Accumulates momentum on every worker before selecting, as DGC does.

    ``u = m u + g``, ``v = v + u``; under Nesterov ``u = m (u + g)``, ``v = v + u + g``.
    The reducer takes ``v``; what is left of it stays. Follow it by plain ``optax.sgd``
    without momentum.

    Args:
      reducer: any `Reducer`.
      momentum: m, in [0, 1].
      nesterov: use Nesterov's form.
      masking: also clear ``u`` where something was sent, so that stale momentum does
        not push entries that have just been delivered. Nothing is cleared in a step
        in which all was sent: a lossless step is plain momentum SGD. Use False for
        reducers that send a bit of everything (low rank, signs).

    Returns:
      A transformation from one worker's updates to the mean, the same on all workers.

    Raises:
      ValueError: ``momentum`` outside [0, 1]; at ``update``, a tree that is not like
        the one at ``init``.

    Example:
      >>> import jaxsparse as js
      >>> tx = js.momentum_correction(js.dense(axis_name="w"), 0.5)
      >>> def twice(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(g, state)
      ...     return first, second
      >>> on_workers = jax.jit(jax.vmap(twice, axis_name="w", out_axes=None))
      >>> print(*on_workers(jnp.ones((2, 1))))
      [1.] [1.5]

    References:
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", 2018.
    """
    _check_reducer("momentum_correction", reducer)
    check_fraction("momentum_correction(momentum=...)", momentum)

    def init(params: PyTree) -> MomentumCorrectionState:
        return MomentumCorrectionState(
            WorkerLocal(_zeros(params)),
            WorkerLocal(_zeros(params)),
            reducer.init(params),
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        u, v = state.momentum.value, state.velocity.value
        tree.check_matches(updates, v, "the velocity of `momentum_correction`")
        collectives.check_as_local(updates, v)
        grads = tree.cast_float32(updates)
        if nesterov:
            u = jax.tree.map(lambda u, g: add(momentum * u, momentum * g), u, grads)
            v = jax.tree.map(lambda v, u, g: add(add(v, u), g), v, u, grads)
        else:
            u = jax.tree.map(lambda u, g: add(momentum * u, g), u, grads)
            v = jax.tree.map(add, v, u)
        mean, left, inner = reducer.reduce(v, state.reducer)
        if masking:
            u = _cleared_where_sent(u, v, left)
        mean, left = _rounded(mean, left, updates)
        return mean, MomentumCorrectionState(WorkerLocal(u), WorkerLocal(left), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _rounded(mean: PyTree, left: PyTree, updates: PyTree) -> tuple[PyTree, PyTree]:
    """The mean in the updates' dtypes; what rounding takes from it is left to all.

    It is the same on every worker, so the mean over the workers of what is left grows
    by just what the mean lost.
    """
    rounded = tree.cast_like(mean, updates)
    left = jax.tree.map(
        lambda kept, exact, given: (
            kept
            if given.dtype == exact.dtype
            else add(kept, exact - given.astype(jnp.float32))
        ),
        left,
        mean,
        rounded,
    )
    return rounded, left


def _cleared_where_sent(u: PyTree, v: PyTree, left: PyTree) -> PyTree:
    anything_left = jnp.any(
        jnp.array([jnp.any(leaf != 0) for leaf in jax.tree.leaves(left)])
    )
    return jax.tree.map(
        lambda u, v, left: jnp.where(anything_left & (left != v), 0.0, u), u, v, left
    )


def _zeros(params: PyTree) -> PyTree:
    """Zeros like the parameters in float32: bfloat16 would swallow small updates."""
    tree.layout(params)
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def _check_reducer(call: str, reducer: Reducer) -> None:
    if not isinstance(reducer, Reducer):
        raise TypeError(
            f"`{call}(...)` takes a Reducer, such as `js.dense(axis_name='workers')` "
            f"or `js.sparse(...)`, got {type(reducer).__name__}."
        )
