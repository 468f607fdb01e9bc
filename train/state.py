"""What a run carries from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from train.tasks import Task


class TrainState(NamedTuple):
    """As one worker sees it; which leaves differ from worker to worker is inferred."""

    params: Any
    model_state: Any  # BatchNorm's statistics and the like; often empty
    opt_state: Any  # moments, residuals, counts


def create(
    task: Task, tx: optax.GradientTransformation, seed: int, batch: Any
) -> TrainState:
    """The state before the first step, the same on every worker and every host."""

    @jax.jit
    def init(key, batch):
        params, model_state = task.init(key, batch)
        return TrainState(params, model_state, tx.init(params))

    return init(jax.random.key(seed), batch)
