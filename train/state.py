"""What a run carries from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from train.tasks import Task


class TrainState(NamedTuple):
    """As seen by one worker; which leaves differ between workers is found by tracing."""

    params: Any
    model_state: Any  # BatchNorm's statistics and the like; often empty
    opt_state: Any  # moments, residuals, counts


def create(
    task: Task, tx: optax.GradientTransformation, seed: int, batch: Any
) -> TrainState:
    """The state before the first step, the same on every worker and every host."""
    params, model_state = jax.jit(task.init)(jax.random.key(seed), batch)
    return TrainState(params, model_state, tx.init(params))
