"""What a model is trained for: its loss in training, its figures in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array


class Totals(NamedTuple):
    """Sums over examples: they add up over batches and workers, means do not."""

    loss: Array
    correct: Array
    examples: Array


class Task(NamedTuple):
    """Pure functions of one worker's batch; collectives are not their business.

    Attributes:
      init: ``(key, batch) -> (params, model_state)``.
      loss: ``(params, model_state, batch) -> (loss, model_state)``.
      evaluate: ``(params, model_state, batch) -> Totals``.
    """

    init: Callable[..., tuple[Any, Any]]
    loss: Callable[..., tuple[Array, Any]]
    evaluate: Callable[..., Totals]


def classification(model: nn.Module, *, max_value: float) -> Task:
    """Images to classes, by cross entropy.

    ``model_state`` holds what a model keeps besides its parameters, such as BatchNorm's
    statistics. Every worker has its own, of its own batches.

    Args:
      model: called as ``model(images, train=...)``, returns logits.
      max_value: of a pixel; images come to the model in [0, 1].
    """

    def pixels(batch):
        return batch["image"].astype(jnp.float32) / max_value

    def init(key, batch):
        variables = dict(model.init(key, pixels(batch), train=False))
        return variables.pop("params"), variables

    def loss(params, model_state, batch):
        logits, model_state = model.apply(
            {"params": params, **model_state},
            pixels(batch),
            train=True,
            mutable=list(model_state),
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), model_state

    def evaluate(params, model_state, batch):
        variables = {"params": params, **model_state}
        logits = model.apply(variables, pixels(batch), train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = jnp.argmax(logits, axis=-1) == batch["label"]
        weight = batch["weight"]
        return Totals((losses * weight).sum(), (correct * weight).sum(), weight.sum())

    return Task(init, jax.named_call(loss, name="loss"), evaluate)
