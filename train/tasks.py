"""What a model is trained for: its loss in training, its figures in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import Array

AUXILIARY_WEIGHT = 0.4  # of the auxiliary head's loss, as in PSPNet's paper


class Totals(NamedTuple):
    """Sums over examples: they add up over batches and workers, means do not."""

    loss: Array
    correct: Array
    examples: Array


class PixelTotals(NamedTuple):
    """Sums over the pixels that count."""

    loss: Array
    confusion: Array  # shape=(classes, classes), int32: [truth, prediction] -> pixels


class Task(NamedTuple):
    """Pure functions of one worker's batch; collectives are not their business.

    Attributes:
      init: ``(key, batch) -> (params, model_state)``.
      loss: ``(params, model_state, batch) -> (loss, model_state)``.
      evaluate: ``(params, model_state, batch) -> totals``: a tree of sums.
      figures: by name, what the totals of a whole split say, on the host; the task's
        score first, a fraction, and ``loss`` among the others.
    """

    init: Callable[..., tuple[Any, Any]]
    loss: Callable[..., tuple[Array, Any]]
    evaluate: Callable[..., Any]
    figures: dict[str, Callable[[Any], Any]]

    @property
    def score(self) -> str:
        """Name of the figure that runs are compared by."""
        return next(iter(self.figures))


class Network(NamedTuple):
    """A model, and what it keeps besides its parameters, such as BatchNorm's averages.

    The latter is its ``model_state``: every worker's own, of its own batches.
    """

    model: nn.Module  # called as ``model(images, train=...)``
    max_value: float  # of a pixel; images come to the model in [0, 1]

    def pixels(self, batch: Any) -> Array:
        return batch["image"].astype(jnp.float32) / self.max_value

    def init(self, key: Array, batch: Any) -> tuple[Any, Any, Any]:
        """Outputs, parameters, model state."""
        outputs, variables = self.model.init_with_output(
            key, self.pixels(batch), train=False
        )
        model_state = dict(variables)
        return outputs, model_state.pop("params"), model_state

    def train(self, params: Any, model_state: Any, batch: Any) -> tuple[Any, Any]:
        return self.model.apply(
            {"params": params, **model_state},
            self.pixels(batch),
            train=True,
            mutable=list(model_state),
        )

    def test(self, params: Any, model_state: Any, batch: Any) -> Any:
        variables = {"params": params, **model_state}
        return self.model.apply(variables, self.pixels(batch), train=False)


def classification(model: nn.Module, *, max_value: float) -> Task:
    """Images to classes, by cross entropy.

    Args:
      model: called as ``model(images, train=...)``, returns logits.
      max_value: of a pixel; images come to the model in [0, 1].
    """
    network = Network(model, max_value)

    def init(key, batch):
        logits, *state = network.init(key, batch)
        if not isinstance(logits, Array) or logits.ndim != 2:
            raise ValueError(
                "config.task='classification' needs a model that gives logits for "
                "every image, such as config.model.name='resnet'"
            )
        return tuple(state)

    def loss(params, model_state, batch):
        logits, model_state = network.train(params, model_state, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), model_state

    def evaluate(params, model_state, batch):
        logits = network.test(params, model_state, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = jnp.argmax(logits, axis=-1) == batch["label"]
        weight = batch["weight"]
        return Totals((losses * weight).sum(), (correct * weight).sum(), weight.sum())

    figures = {
        "accuracy": lambda totals: totals.correct / totals.examples,
        "loss": lambda totals: totals.loss / totals.examples,
    }
    return Task(init, jax.named_call(loss, name="loss"), evaluate, figures)


def segmentation(model: nn.Module, *, max_value: float, void: int) -> Task:
    """Images to a class for every pixel, by cross entropy.

    Args:
      model: called as ``model(images, train=...)``, returns logits of every pixel from
        the main and from the auxiliary head, the second for training only.
      max_value: of a pixel; images come to the model in [0, 1].
      void: the label of pixels that do not count, neither in the loss nor in figures.
    """
    network = Network(model, max_value)

    def init(key, batch):
        heads, *state = network.init(key, batch)
        if not isinstance(heads, tuple) or [x.ndim for x in heads] != [4, 4]:
            raise ValueError(
                "config.task='segmentation' needs a model with two heads of logits for "
                "every pixel, such as config.model.name='pspnet'"
            )
        return tuple(state)

    def losses(logits, labels, counts):
        """Of every pixel; 0 where it does not count, whatever the label there."""
        # The logarithm of a label that is no class would be undefined.
        labels = jnp.where(counts, labels, 0).astype(jnp.int32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(counts, each, 0.0)

    def loss(params, model_state, batch):
        (main, auxiliary), model_state = network.train(params, model_state, batch)
        counts = batch["label"] != void
        total = losses(main, batch["label"], counts)
        total += AUXILIARY_WEIGHT * losses(auxiliary, batch["label"], counts)
        return total.sum() / jnp.maximum(counts.sum(), 1), model_state

    def evaluate(params, model_state, batch):
        logits, _ = network.test(params, model_state, batch)
        labels, classes = batch["label"], logits.shape[-1]
        counts = (labels != void) & (batch["weight"] > 0)[:, None, None]
        truth = jnp.where(counts, labels, 0)
        # Whole numbers: float32 would lose count at 17 million pixels.
        confusion = jnp.zeros((classes, classes), jnp.int32)
        confusion = confusion.at[truth, jnp.argmax(logits, -1)].add(counts)
        return PixelTotals(losses(logits, labels, counts).sum(), confusion)

    figures = {
        "mean_iou": lambda totals: mean_iou(totals.confusion),
        "pixel_accuracy": lambda t: np.trace(t.confusion) / max(t.confusion.sum(), 1),
        "loss": lambda totals: totals.loss / max(totals.confusion.sum(), 1),
    }
    return Task(init, jax.named_call(loss, name="loss"), evaluate, figures)


def mean_iou(confusion: np.ndarray) -> float:
    """Intersection over union, mean over the classes that occur; 0 if none does.

    A class occurs where it is the truth or the prediction of a pixel.

    >>> mean_iou(np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]])) * 24  # (3/4 + 2/3) / 2
    17.0
    """
    both = np.diag(confusion)
    either = confusion.sum(0) + confusion.sum(1) - both
    return float((both / np.maximum(either, 1)).sum() / max((either > 0).sum(), 1))
