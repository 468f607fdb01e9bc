"""What the two forms share: the state, the stages and the quality gate.

    count < T1          dense       everything is averaged
    count < T2          training    plain values are sent, the code is trained on them
    from then on        compressed  latents are sent; while the gate is closed, and
                                    every `recheck` steps, plain values on the same
                                    support, which the code is measured and trained on

The stages are `phases`: dense averaging has no state, the two others share one. The
gate is no phase, as it depends on what is measured, and not on the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import tree
from ..arguments import check_axis_name, check_number, check_positive_int
from ..base import ExchangeMetrics, PyTree, Reducer, Selection
from ..codec import Codec
from ..exchange import collectives
from ..phases import phases
from ..reducers.dense import dense
from ..reducers.sparse import no_metrics
from ..scope import first_of_each_leaf, per_leaf
from ..selection import top_k
from .code import Code
from .order import Order
from .training import Training, check_training

_MOST = 2**31 - 1  # what fits into an int32


class LgcMetrics(NamedTuple):
    """What is known of the code's quality; the same on all workers."""

    nmse: Array  # shape=(), float32; reconstruction error when it was last measured
    gate: Array  # shape=(), int32; 1 where the latest step sent a latent
    measured: Array  # shape=(), int32; steps in which the error was measured
    fallbacks: Array  # shape=(), int32; steps of the compressed stage without a latent


class LgcState(NamedTuple):
    """State of `lgc_server` and `lgc_ring`, the same on all workers."""

    step: Array  # shape=(), dtype=uint32; whose turn it is to lead
    params: PyTree  # of the code
    optimizer: PyTree
    quality: LgcMetrics
    metrics: ExchangeMetrics  # of the latest step

    def learned(self, params: PyTree, optimizer: PyTree, error: Array) -> LgcState:
        """After the code was measured and trained."""
        quality = self.quality._replace(nmse=error, measured=self.quality.measured + 1)
        return self._replace(params=params, optimizer=optimizer, quality=quality)

    def fell_back(self) -> LgcState:
        """After plain values were sent where a latent was due."""
        quality = self.quality._replace(
            gate=jnp.zeros_like(self.quality.gate),
            fallbacks=self.quality.fallbacks + 1,
        )
        return self._replace(quality=quality)


class Settings(NamedTuple):
    """The arguments that the two forms share, checked."""

    call: str
    axis_name: collectives.AxisName
    num_workers: int | None
    selection: Selection
    scope: str
    code: Code
    order: Order
    codec: Codec
    training: Training
    rotate: bool
    seed: int
    contributed: bool  # every worker brings its part of the support

    def scoped(self, spec: tree.Layout) -> Selection:
        """The selection, over all leaves or in every one."""
        if self.scope == "leaf":
            return per_leaf(self.selection, spec.sizes)
        return self.selection

    def own(self, x: Array, spec: tree.Layout) -> Array:
        """The worker's choice; of a contributed support its part."""
        own, _ = self.scoped(spec).select(x, ())
        if not self.contributed:
            return own
        workers = collectives.axis_size(self.axis_name)
        sizes = spec.sizes if self.scope == "leaf" else (spec.size,)
        return own[first_of_each_leaf(self.selection, sizes, workers)]

    def leader(self, state: LgcState) -> Array:
        """Whose turn it is, an int32."""
        workers = collectives.axis_size(self.axis_name)
        turn = state.step % workers if self.rotate else jnp.zeros((), jnp.uint32)
        return turn.astype(jnp.int32)

    def encode(self, state: LgcState, x: Array) -> Array:
        """The latent of normalised values."""
        return self.code.encode(state.params, x)

    def decode(self, state: LgcState, z: Array, k: int, helped=None) -> Array:
        """Normalised values of a latent."""
        return self.code.decode(state.params, z, k, helped)


def settings(
    call: str,
    density: float,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None,
    scope: str,
    code: Code,
    order: Order,
    codec: Codec,
    training: Training,
    rotate: bool,
    seed: int,
    contributed: bool = False,
) -> Settings:
    """Checks the arguments.

    Raises:
      ValueError, TypeError: names the argument.
    """
    check_axis_name(f"{call}(axis_name=...)", axis_name)
    if num_workers is not None:
        check_positive_int(f"{call}(num_workers=...)", num_workers)
    for argument, given, kind, example in (
        ("code", code, Code, "js.lgc.convolutional()"),
        ("order", order, Order, "js.lgc.flipped()"),
        ("codec", codec, Codec, "js.codec.bfloat16()"),
    ):
        if not isinstance(given, kind):
            raise TypeError(
                f"`{call}({argument}=...)` must be made by a call such as "
                f"`{example}`, got {given!r}."
            )
    if scope not in ("global", "leaf"):
        raise ValueError(
            f"`{call}(scope=...)` must be 'global' or 'leaf', got {scope!r}."
        )
    check_training(f"{call}(training=...)", training)
    if not isinstance(rotate, bool):
        raise TypeError(f"`{call}(rotate=...)` must be True or False, got {rotate!r}.")
    if check_positive_int(f"{call}(seed=...)", seed, 0) > _MOST:
        raise ValueError(f"`{call}(seed=...)` must be at most {_MOST}, got {seed}.")
    return Settings(
        call,
        axis_name,
        num_workers,
        top_k(density),
        scope,
        code,
        order,
        codec,
        training,
        rotate,
        seed,
        contributed,
    )


# (x[n], own choice[k], state) -> (mean[n], left[n], state)
Step = Callable[[Array, Array, LgcState], tuple[Array, Array, LgcState]]


def staged(
    shared: Settings,
    stages: tuple[int, int],
    gate: float,
    recheck: int,
    *,
    training: Step,
    latent: Step,
    plain: Step,
) -> Reducer:
    """The reducer of the three stages.

    Args:
      shared: checked arguments.
      stages: T1 and T2.
      gate: the error above which no latent is sent; infinite: no gate.
      recheck: steps between measurements while the gate is open.
      training: a step of the training stage.
      latent: a step of the compressed stage.
      plain: the same with plain values; called only if there is a gate.

    Raises:
      ValueError: an argument out of its range.
    """
    call = shared.call
    if not isinstance(stages, (tuple, list)) or len(stages) != 2:
        raise ValueError(
            f"`{call}(stages=...)` must be two steps (T1, T2), got {stages}."
        )
    first, second = (check_positive_int(f"{call}(stages=...)", s, 0) for s in stages)
    if second < first:
        raise ValueError(
            f"`{call}(stages=...)` must be steps (T1, T2) with T1 <= T2, got {stages}."
        )
    check_number(f"{call}(gate=...)", gate, "be positive", lambda x: x > 0, static=True)
    if check_positive_int(f"{call}(recheck=...)", recheck) > _MOST:
        raise ValueError(
            f"`{call}(recheck=...)` must be at most {_MOST}, got {recheck}."
        )

    def gated(x: Array, own: Array, state: LgcState):
        if gate == math.inf:
            return latent(x, own, state)
        due = state.step % jnp.uint32(recheck) == recheck - 1
        is_open = (state.quality.nmse <= gate) & ~due
        with jax.named_scope("gate"):
            return lax.cond(is_open, latent, plain, x, own, state)

    steps: list[tuple[int | None, Reducer]] = []
    if first:
        steps.append((first, dense(axis_name=shared.axis_name)))
    if second > first:
        steps.append((second, _on_trees(shared, training)))
    return phases([*steps, (None, _on_trees(shared, gated))])


def _on_trees(shared: Settings, step: Step) -> Reducer:
    """A step on flat vectors as a reducer of trees."""

    def init(params: PyTree) -> LgcState:
        spec = tree.layout(params)
        tree.check_size(spec)
        learned = shared.code.init(jax.random.key(shared.seed))
        return LgcState(
            jnp.zeros((), jnp.uint32),
            learned,
            shared.training.optimizer().init(learned),
            LgcMetrics(
                nmse=jnp.ones((), jnp.float32),  # nothing learned, nothing sent
                gate=jnp.zeros((), jnp.int32),
                measured=jnp.zeros((), jnp.int32),
                fallbacks=jnp.zeros((), jnp.int32),
            ),
            no_metrics(),
        )

    def reduce(updates: PyTree, state: LgcState):
        call = f"{shared.call}(num_workers=...)"
        collectives.check_workers(call, shared.num_workers, shared.axis_name)
        collectives.check_local(updates, shared.axis_name)
        spec = tree.layout(updates)
        if spec.size == 0:
            return tree.zeros(spec), updates, state
        tree.check_size(spec)
        tree.check_state(state, init, updates, shared.call)
        x, _ = tree.flatten(updates)
        own = shared.own(x, spec)
        mean, left, state = step(x, own, state)
        state = state._replace(step=state.step + jnp.uint32(1))
        return tree.unflatten(mean, spec), tree.unflatten(left, spec), state

    return Reducer(init, reduce)
