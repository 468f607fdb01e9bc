"""Training with many workers on one machine: vmap in the place of the network.

The step is the trainer's own (`train.step`), so what holds here holds under pmap; N
workers cost N times the work of one and exchange nothing. Gradients, selections, unions
and accuracies are real, times are not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from train.data import Batches, Split
from train.state import create
from train.step import train_step
from train.tasks import Task

AXIS = "workers"
CHUNK = 25  # steps in one compiled scan


class Setting(NamedTuple):
    """What all methods of a comparison share."""

    workers: int = 8
    examples: int = 128  # of a step, shared out among the workers
    steps: int = 600
    peak: float = 0.1  # learning rate: linear rise over a quarter, then a cosine
    momentum: float = 0.9


class Outcome(NamedTuple):
    """What one run gives."""

    accuracy: float  # on the test split, at the end
    loss: float
    metrics: dict[str, list[float]]  # of every step, mean over the workers
    seconds: float


def learning_rate(setting: Setting) -> optax.Schedule:
    """Linear warm-up, then a cosine down to 0.

    A long one: with a few entries per step the memory holds the first steps' gradients
    for hundreds of steps, and a steep rise then makes some seeds diverge.
    """
    return optax.warmup_cosine_decay_schedule(
        0.0, setting.peak, setting.steps // 4, setting.steps
    )


class Simulation:
    """One method in one setting; compiled once, run with any number of seeds."""

    def __init__(
        self,
        task: Task,
        exchange: optax.GradientTransformation,
        splits: dict[str, Split],
        setting: Setting,
    ):
        """Builds the chain.

        Args:
          task: the model and its loss.
          exchange: from a worker's gradients to the mean; plain SGD comes behind it.
          splits: the data.
          setting: workers, batches, steps.
        """
        if setting.examples % setting.workers:
            raise ValueError(
                f"{setting.examples} examples of a step cannot be shared out among "
                f"{setting.workers} workers: pass a number that divides them."
            )
        self._task, self._splits, self.setting = task, splits, setting
        self._tx = optax.chain(exchange, optax.sgd(learning_rate(setting)))
        self._chunk: Callable | None = None
        self.is_local: Any = None  # known from `start` on
        self._evaluate = jax.jit(task.evaluate)

    def run(
        self, seed: int, watch: Callable[[int, Any], None] | None = None
    ) -> Outcome:
        """Trains once.

        Args:
          seed: of parameters and batches.
          watch: called with the step and the state after every chunk.
        """
        start, state = time.perf_counter(), self.start(seed)
        state, metrics = self.advance(state, seed, range(self.setting.steps), watch)
        loss, accuracy = self.test(self.worker_zero(state))
        series = {k: np.asarray(v).tolist() for k, v in metrics._asdict().items()}
        return Outcome(accuracy, loss, series, time.perf_counter() - start)

    def start(self, seed: int) -> Any:
        """The state before the first step, local parts with their worker axis."""
        batch = self._batches(seed).at(0, range(self.setting.workers))
        example = jax.tree.map(lambda x: x[0], batch)
        state = create(self._task, self._tx, seed, example)
        if self._chunk is None:
            self._chunk, self.is_local = self._compile(state, example)
        shared, own = js.split(state, self.is_local)
        return js.merge(shared, js.stack_workers(own, self.setting.workers))

    def advance(
        self,
        state: Any,
        seed: int,
        steps: range,
        watch: Callable[[int, Any], None] | None = None,
    ) -> tuple[Any, Any]:
        """Goes on with steps of that seed's run.

        Args:
          state: from `start`, or of this number of workers; is used up.
          seed: of the batches.
          steps: counted from 0.
          watch: as in `run`.

        Returns:
          The state and the metrics of every step.
        """
        batches, everyone = self._batches(seed), range(self.setting.workers)
        shared, own = js.split(state, self.is_local)
        found = []
        for first in range(steps.start, steps.stop, CHUNK):
            chunk = range(first, min(first + CHUNK, steps.stop))
            stacked = jax.tree.map(
                lambda *xs: np.stack(xs), *(batches.at(i, everyone) for i in chunk)
            )
            shared, own, metrics = self._chunk(shared, own, stacked)
            found.append(jax.device_get(metrics))
            if watch is not None:
                watch(chunk.stop, js.merge(shared, own))
        joined = jax.tree.map(lambda *xs: np.concatenate(xs), *found)
        return js.merge(shared, own), joined

    def _batches(self, seed: int) -> Batches:
        return Batches(
            self._splits["train"],
            seed=seed,
            num_workers=self.setting.workers,
            batch_size=self.setting.examples // self.setting.workers,
        )

    def _compile(self, state: Any, example: Any) -> tuple[Callable, Any]:
        """The program of `CHUNK` steps of all workers, and which state is local."""
        step = train_step(self._task, self._tx)
        is_local = js.local_leaves(
            step,
            state,
            example,
            axis_name=AXIS,
            num_workers=self.setting.workers,
        )

        def one(shared, own, batch):
            state, measured = step(js.merge(shared, own), batch)
            return *js.split(state, is_local), measured.js

        workers = jax.vmap(one, (None, 0, 0), (None, 0, 0), axis_name=AXIS)

        @functools.partial(jax.jit, donate_argnums=1)
        def chunk(shared, own, batches):
            def body(carry, batch):
                shared, own, metrics = workers(*carry, batch)
                return (shared, own), jax.tree.map(jnp.mean, metrics)

            (shared, own), metrics = jax.lax.scan(body, (shared, own), batches)
            return shared, own, metrics

        return chunk, is_local

    def worker_zero(self, state: Any) -> Any:
        """The state as the first worker has it."""
        shared, own = js.split(state, self.is_local)
        return js.merge(shared, jax.tree.map(lambda x: x[0], own))

    def test(self, state: Any, most: int | None = None) -> tuple[float, float]:
        """Loss and accuracy on the test split, or its first ``most`` examples."""
        split, size = self._splits["test"], 100  # what a cache can hold
        totals = []
        for i in range(0, len(split.labels[:most]), size):
            labels = split.labels[i : i + size]
            batch = {
                "image": split.images[i : i + size],
                "label": labels,
                "weight": np.ones(len(labels), np.float32),
            }
            totals.append(self._evaluate(state.params, state.model_state, batch))
        loss, correct, examples = np.sum(jax.device_get(totals), axis=0)
        return float(loss / examples), float(correct / examples)
