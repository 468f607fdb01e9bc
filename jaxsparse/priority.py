"""Priorities: how the entries of a vector are scored before the largest are chosen.

Only few parameters have large gradients again and again within a short time. Scores
that favour what was sent lately make workers choose alike, so the union that a server
sends back shrinks; they are computed from the aggregate, which all workers have, and
cost no traffic.

===============  ==========================================================
priority         score of entry j, with its magnitude ``|x_j|``
===============  ==========================================================
`magnitude`      ``|x_j|``: plain top-k
`frequency`      ``|x_j| (1 + weight c_j / window)``, c the rounds it was in
`ema`            ``|x_j| (1 + weight e_j)``, e a moving average
`penalty`        ``|x_j|``, times ``factor`` where ``e_j < threshold``
`reg_top_k`      ``|x_j| tanh(|1 + d_j| / mu)``, d the others' share of late
===============  ==========================================================

No entry starves: what is not sent grows in the memory, and is chosen at the latest when
it exceeds the others by the largest ratio of two factors, ``1 + weight`` or ``1 /
factor``. ``local=True`` counts a worker's own choices in place of the aggregate, for
ablation: the state then differs between workers.

Differences from the paper: the thesis' formulas are not public. These are our reading
of its abstract and its table of contents (frequency, exponential moving average,
penalty); the moving average of the magnitude is our own variant.

References:
  Wang, Liu, Wu, "Communication Usage Optimization of Gradient Sparsification with
  Aggregation", 2018.
  Bereyhi, Liang, Boudreau, Afana, "Novel Gradient Sparsification Algorithm via Bayesian
  Inference" (RegTop-k), 2024, arXiv 2409.14893.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .arguments import check_fraction, check_number, check_positive_int
from .base import Priority, WorkerLocal
from .scaling import relative


def magnitude() -> Priority:
    """Scores every entry by its magnitude, ``q = |x|``: plain top-k."""
    return Priority(
        init=lambda n: (),
        score=lambda state, x: x,  # the sign does not count
        observe=lambda state, mean, sent: state,
    )


def frequency(
    window: int = 32, weight: float = 16.0, *, local: bool = False
) -> Priority:
    """Favours entries by the number of the last rounds that they were sent in.

    ``q = |x| (1 + weight c / window)``, with c the rounds among the last ``window`` in
    which the aggregate had the entry. One 32-bit word of history an entry.

    Args:
      window: rounds remembered, 1 to 32.
      weight: >= 0; 0 is plain top-k. Higher: smaller union, staler entries.
      local: count the worker's own choices.

    Raises:
      ValueError: an argument out of its range.

    Example:
      >>> p = frequency(window=2, weight=1.0)
      >>> mean = jnp.array([1.0, 0.0])
      >>> p.score(p.observe(p.init(2), mean, mean), jnp.ones(2))
      Array([1.5, 1. ], dtype=float32)
    """
    if check_positive_int("frequency(window=...)", window) > 32:
        raise ValueError(
            f"`frequency(window=...)` must be at most 32, got {window}: the history of "
            "an entry is a 32-bit word. Use `ema` for a longer memory."
        )
    _check_weight("frequency", weight)
    mask = jnp.uint32(2**window - 1)

    def score(history: Array, x: Array) -> Array:
        rounds = lax.population_count(history & mask).astype(jnp.float32)
        return jnp.abs(x) * (1 + weight * (rounds * (1 / window)))

    def observe(history: Array, seen: Array) -> Array:
        return (history << 1) | (seen != 0).astype(jnp.uint32)

    return _remembering(lambda n: jnp.zeros(n, jnp.uint32), score, observe, local)


def ema(
    decay: float = 0.9,
    weight: float = 64.0,
    *,
    of: Literal["magnitude", "support"] = "magnitude",
    local: bool = False,
) -> Priority:
    """Favours entries by an exponential moving average of what was aggregated.

    ``e = decay e + (1 - decay) s`` after every step and ``q = |x| (1 + weight e)``,
    with ``s = |mean| / max |mean|`` for ``of="magnitude"``, and 1 on the aggregate's
    support for ``of="support"``. For the magnitude NaN and infinity count as 0: an
    average that has them would keep them.

    Args:
      decay: in [0, 1]; higher remembers longer.
      weight: >= 0; 0 is plain top-k. Higher: smaller union, staler entries. Useful are
        4 to 64 on the support, 64 to 1024 on the magnitude.
      of: what is averaged.
      local: average what the worker itself sent.

    Raises:
      ValueError: an argument out of its range.

    Example:
      >>> p = ema(decay=0.5, weight=4.0, of="support")
      >>> mean = jnp.array([3.0, 0.0])
      >>> p.score(p.observe(p.init(2), mean, mean), jnp.ones(2))
      Array([3., 1.], dtype=float32)
    """
    check_fraction("ema(decay=...)", decay)
    _check_weight("ema", weight)
    if of not in ("magnitude", "support"):
        raise ValueError(f"`ema(of=...)` must be 'magnitude' or 'support', got {of!r}.")

    def score(average: Array, x: Array) -> Array:
        return jnp.abs(x) * (1 + weight * average)

    def observe(average: Array, seen: Array) -> Array:
        return _averaged(average, decay, seen, of)

    return _remembering(lambda n: jnp.zeros(n, jnp.float32), score, observe, local)


def penalty(
    decay: float = 0.9,
    threshold: float = 0.1,
    factor: float = 0.5,
    *,
    local: bool = False,
) -> Priority:
    """Penalises entries that were not aggregated lately.

    ``q = |x|`` where ``e >= threshold`` and ``factor |x|`` elsewhere, with e the moving
    average of the support as in `ema`.

    Args:
      decay: in [0, 1]; higher remembers longer.
      threshold: of the moving average, in [0, 1].
      factor: in [0, 1]; 1 is plain top-k. Lower: smaller union. 0 lets nothing new in:
        give `top_k` an ``exploration`` share then.
      local: average what the worker itself sent.

    Raises:
      ValueError: an argument out of its range.

    Example:
      >>> p = penalty(factor=0.5)
      >>> mean = jnp.array([3.0, 0.0])
      >>> p.score(p.observe(p.init(2), mean, mean), jnp.ones(2))
      Array([1. , 0.5], dtype=float32)
    """
    check_fraction("penalty(decay=...)", decay)
    check_fraction("penalty(threshold=...)", threshold)
    check_fraction("penalty(factor=...)", factor)

    def score(average: Array, x: Array) -> Array:
        # One step of observation must pass a threshold of (1 - decay), rounding or not.
        return jnp.abs(x) * jnp.where(average >= threshold - 1e-6, 1.0, factor)

    def observe(average: Array, seen: Array) -> Array:
        return _averaged(average, decay, seen, "support")

    return _remembering(lambda n: jnp.zeros(n, jnp.float32), score, observe, local)


class RegTopKState(NamedTuple):
    """State of `reg_top_k`."""

    mean: Array  # float32[n]; the latest aggregate
    sent: WorkerLocal  # float32[n]; this worker's part of it


def reg_top_k(mu: float = 1.0, *, num_workers: int) -> Priority:
    """Damps entries that the other workers' parts cancelled at the step before.

    ``q = |x| tanh(|1 + d| / mu)``, ``d = (mean - sent / N) / (x / N)`` where this
    worker sent the entry at the step before, and ``q = |x|`` elsewhere: d is what the
    others are expected to add, relative to this worker's own part.

    Args:
      mu: > 0; towards 0 it is plain top-k.
      num_workers: N, checked against the axis in the step.

    Raises:
      ValueError: an argument out of its range; in the step, another number of workers.

    References:
      Bereyhi, Liang, Boudreau, Afana, "Novel Gradient Sparsification Algorithm via
      Bayesian Inference", 2024, arXiv 2409.14893; the formula is quoted from memory.
    """
    check_number("reg_top_k(mu=...)", mu, "be positive", lambda v: v > 0)
    call = "reg_top_k(num_workers=...)"
    check_positive_int(call, num_workers)

    def init(n: int) -> RegTopKState:
        return RegTopKState(
            jnp.zeros(n, jnp.float32), WorkerLocal(jnp.zeros(n, jnp.float32))
        )

    def score(state: RegTopKState, x: Array) -> Array:
        sent = state.sent.value
        others = state.mean * num_workers - sent
        known = (sent != 0) & (x != 0)
        distortion = others / jnp.where(known, x, 1.0)
        damped = jnp.abs(x) * jnp.tanh(jnp.abs(1 + distortion) / mu)
        return jnp.where(known, damped, jnp.abs(x))

    def observe(state: RegTopKState, mean: Array, sent: Array) -> RegTopKState:
        del state
        return RegTopKState(mean, WorkerLocal(sent))

    return Priority(init, score, observe, (call, num_workers))


def _remembering(
    init: Callable[[int], Array],
    score: Callable[[Array, Array], Array],
    observe: Callable[[Array, Array], Array],
    local: bool,
) -> Priority:
    """A priority with one array of state, shared or the worker's own."""
    if not local:
        return Priority(init, score, lambda state, mean, sent: observe(state, mean))
    return Priority(
        lambda n: WorkerLocal(init(n)),
        lambda state, x: score(state.value, x),
        lambda state, mean, sent: WorkerLocal(observe(state.value, sent)),
    )


def _averaged(average: Array, decay: float, seen: Array, of: str) -> Array:
    if of == "support":
        signal = (seen != 0).astype(jnp.float32)
    else:
        # A NaN would stay in the average for ever, and its maximum reach all entries.
        signal = jnp.abs(jnp.where(jnp.isfinite(seen), seen, 0.0))
        signal = relative(signal, jnp.max(signal, initial=0.0))
    return decay * average + (1 - decay) * signal


def _check_weight(call: str, weight: float) -> None:
    check_number(
        f"{call}(weight=...)",
        weight,
        "be finite and not negative",
        lambda w: 0 <= w < math.inf,
    )
