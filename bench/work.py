"""What a bench's step works on: made gradients, or a model that is really trained.

Both give what the step carries, the step of one worker and the inputs that take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jaxsparse as js
from train.models.resnet import ResNet
from train.state import create
from train.step import train_step
from train.tasks import classification

TRAINED = {"resnet50": 50, "resnet101": 101}  # and their depth
CLASSES, SIDE = 1000, 224


class State(NamedTuple):
    """What a step without a model carries; `js.local_leaves` looks for ``params``."""

    params: Any
    opt_state: Any


class Branches(NamedTuple):
    """Which way a step has gone; nothing that would cost it a pass."""

    phase: Array
    rung: Array
    gate: Array


class Work(NamedTuple):
    """A step and what it needs."""

    init: Callable[[], Any]  # the state, the same on every worker
    step: Callable[[Any, Any], tuple[Any, Branches]]  # of one worker
    inputs: list[Any]  # each ``[workers here, ...]``


def branches(opt_state: Any) -> Branches:
    """Those of the latest step."""
    now = js.metrics(opt_state)
    return Branches(now.phase, now.rung, now.gate)


def exchange(tx: optax.GradientTransformation, shapes: Any, numbers: range) -> Work:
    """From a worker's gradient to its updated parameters, and nothing else.

    The gradients are normal numbers, of an own scale for every leaf.
    """

    def init() -> State:
        params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return State(params, tx.init(params))

    def step(state: State, grads: Any) -> tuple[State, Branches]:
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), branches(opt_state)

    return Work(init, step, [gradients(shapes, numbers, seed) for seed in (0, 1)])


def gradients(shapes: Any, numbers: range, seed: int) -> Any:
    """Gradients of these workers, ``[workers, ...]`` each."""
    scales = np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        scale = np.float32(1e-3 * np.exp(scales.standard_normal()))
        drawn = [rng.standard_normal(shape.shape, np.float32) for rng in of_worker]
        return np.stack(drawn) * scale

    of_worker = [np.random.default_rng((seed, number)) for number in numbers]
    return jax.tree.map(leaf, shapes)


def training(
    tx: optax.GradientTransformation, model: str, batch_size: int, numbers: range
) -> Work:
    """The trainer's step of a ResNet, on images of noise.

    Args:
      tx: the whole chain.
      model: one of `TRAINED`.
      batch_size: images of one worker, of 224 x 224 pixels.
      numbers: of the workers here.
    """
    task = classification(ResNet(TRAINED[model], CLASSES), max_value=255)
    one_step = train_step(task, tx)

    def step(state: Any, batch: Any) -> tuple[Any, Branches]:
        state, _ = one_step(state, batch)
        return state, branches(state.opt_state)

    def noise(seed: int) -> Any:
        image, label = jax.random.split(jax.random.key(seed))
        shape = (len(numbers), batch_size)
        return {
            "image": jax.random.bits(image, (*shape, SIDE, SIDE, 3), jnp.uint8),
            "label": jax.random.randint(label, shape, 0, CLASSES),
        }

    inputs = [noise(seed) for seed in (0, 1)]
    example = jax.tree.map(lambda x: x[0, :1], inputs[0])
    return Work(lambda: create(task, tx, 0, example), step, inputs)
