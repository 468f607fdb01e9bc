"""Time: a reducer that changes with the step, inside the compiled program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from . import tree
from .arguments import check_positive_int
from .base import PyTree, Reducer


class PhasesState(NamedTuple):
    """State of `phases`."""

    # shape=(), dtype=int32; steps taken, stops at its maximum
    count: Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    phase: Array  # shape=(), dtype=int32; of the latest step
    reducer: PyTree  # one state, handed from phase to phase


def phases(schedule: Sequence[tuple[int | None, Reducer]]) -> Reducer:
    """Switches between reducers at given steps, without a second compilation.

    Phase i runs while ``count < until_i``. All phases share one state, so what a
    reducer has gathered (a priority, a server's residual) survives the switch;
    reducers without state, as `dense`, hand it on untouched.

    Args:
      schedule: pairs ``(until_step, reducer)``, ``until_step`` rising; the last one is
        None, for ever.

    Returns:
      A `Reducer`.

    Raises:
      ValueError: an empty schedule, steps that do not rise, a last phase that ends;
        at ``init``, states that differ in structure, shapes or dtypes (shows both).

    Example:
      >>> import jaxsparse as js
      >>> top1 = js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w")
      >>> reducer = js.phases([(1, js.dense(axis_name="w")), (None, top1)])
      >>> def twice(x):
      ...     first, _, state = reducer.reduce(x, reducer.init(x))
      ...     second, _, state = reducer.reduce(x, state)
      ...     return first, second
      >>> on_workers = jax.jit(jax.vmap(twice, axis_name="w", out_axes=None))
      >>> print(*on_workers(jnp.ones((2, 2))))
      [1. 1.] [1. 0.]
    """
    _check_schedule(schedule)
    ends = [until for until, _ in schedule[:-1]]
    reducers = [reducer for _, reducer in schedule]

    def init(params: PyTree) -> PhasesState:
        states = [(i, r.init(params)) for i, r in enumerate(reducers)]
        # A parameter tree without leaves still has to give the structure.
        kept = [(i, s) for i, s in states if jax.tree.leaves(s)] or states[:1]
        for i, state in kept[1:]:
            _check_same(kept[0], (i, state))
        zero = lambda: jnp.zeros((), jnp.int32)  # noqa: E731
        return PhasesState(zero(), zero(), kept[0][1])

    def reduce(updates: PyTree, state: PhasesState):
        phase = jnp.sum(state.count >= jnp.array(ends, jnp.int32), dtype=jnp.int32)

        def branch(reducer: Reducer):
            has_state = jax.tree.leaves(jax.eval_shape(reducer.init, updates))

            def run(updates, inner):
                if has_state:
                    return reducer.reduce(updates, inner)
                mean, left, _ = reducer.reduce(updates, reducer.init(updates))
                return mean, left, inner

            return run

        with jax.named_scope("phases"):
            mean, left, inner = lax.switch(
                phase, [branch(r) for r in reducers], updates, state.reducer
            )
        count = optax.safe_increment(state.count)
        return mean, left, PhasesState(count, phase, inner)

    return Reducer(init, reduce)


def _check_schedule(schedule: Sequence) -> None:
    if isinstance(schedule, Reducer) or not all(
        isinstance(phase, tuple | list) and len(phase) == 2 for phase in schedule
    ):
        raise TypeError(
            "`phases([...])` takes a list of pairs (until_step, reducer), got "
            f"{type(schedule).__name__}."
        )
    if not schedule:
        raise ValueError("`phases([...])` needs at least one (until_step, reducer).")
    last = 0
    for i, (until, reducer) in enumerate(schedule):
        if not isinstance(reducer, Reducer):
            raise TypeError(
                f"phase {i} of `phases([...])` must hold a Reducer, got "
                f"{type(reducer).__name__}. Put the memory around `phases`."
            )
        if i == len(schedule) - 1:
            if until not in (None, math.inf):
                raise ValueError(
                    "the last phase of `phases([...])` must be (None, reducer): it "
                    f"has no end, got {until!r}."
                )
        elif check_positive_int(f"phases([...])[{i}] until_step", until) <= last:
            raise ValueError(
                f"the steps of `phases([...])` must rise: phase {i} ends at {until}, "
                f"the one before it at {last}."
            )
        elif until >= 2**31:
            raise ValueError(
                f"phase {i} of `phases([...])` ends at {until}, which an int32 count "
                "never reaches: make it the last one."
            )
        else:
            last = until


def _check_same(one: tuple[int, PyTree], other: tuple[int, PyTree]) -> None:
    a, b = tree.describe(one[1]), tree.describe(other[1])
    if a != b or not tree.same_structure(one[1], other[1]):
        raise ValueError(
            "the phases of `phases([...])` share one state, but their states differ: "
            f"phase {one[0]} has {a}, phase {other[0]} has {b}. Use methods of the "
            "same kind, or `dense`, which has no state."
        )
