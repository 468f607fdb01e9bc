"""One step of one worker. All communication is in `tx.update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import jaxsparse as js
from train.state import TrainState
from train.tasks import Task


class Measured(NamedTuple):
    """What a step tells the host."""

    loss: Array  # of this worker's batch
    js: Any  # jaxsparse.metrics


def train_step(task: Task, tx: optax.GradientTransformation) -> Callable:
    """``(state, batch) -> (state, measured)``, to be mapped over the workers."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Measured]:
        # The gradient is this worker's own: nothing is averaged before `tx`.
        (loss, model_state), grads = _gradient(task, state, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        measured = Measured(loss, js.metrics(opt_state))
        # A skipped step leaves all of the state: statistics of bad numbers are bad.
        skipped = measured.js.skipped != js.metrics(state.opt_state).skipped
        model_state = jax.tree.map(
            lambda new, old: jnp.where(skipped, old, new),
            model_state,
            state.model_state,
        )
        return TrainState(params, model_state, opt_state), measured

    return step


def finite_step(task: Task) -> Callable:
    """``(state, batch) -> bools``: of each leaf of a worker's gradient, is it finite?

    The leaves are in the order of `jax.tree.leaves`.
    """

    def step(state: TrainState, batch: Any) -> Array:
        _, grads = _gradient(task, state, batch)
        return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])

    return step


def _gradient(task: Task, state: TrainState, batch: Any) -> Any:
    """``((loss, model_state), gradient)`` of one worker's batch."""
    function = jax.value_and_grad(task.loss, has_aux=True)
    return function(state.params, state.model_state, batch)


def eval_step(task: Task, axis_name: str) -> Callable:
    """``(state, batch) -> totals`` over all workers' batches."""

    def step(state: TrainState, batch: Any) -> Any:
        totals = task.evaluate(state.params, state.model_state, batch)
        return lax.psum(totals, axis_name)

    return step
