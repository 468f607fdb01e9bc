"""Selections: which entries of a flat vector are sent. No collectives, no pytrees.

=================  =============================================  ==================
selection          chooses                                        cost on n entries
=================  =============================================  ==================
`top_k`            exactly the k largest                          a few read passes
`sampled_top_k`    about the k largest, threshold from a sample   a few read passes
`threshold`        everything above a fixed magnitude             one read pass
`random_k`         k at random, the same on all workers           none
`random_block`     k neighbours, the same on all workers          none
=================  =============================================  ==================
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .arguments import (
    check_density,
    check_fraction,
    check_number,
    check_positive_int,
    entries,
)
from .base import Priority, PyTree, Selection
from .bits import compact
from .largest import k_largest, narrowed, sizes, smallest_of
from .priority import magnitude


def _no_overflow() -> Array:
    return jnp.zeros((), jnp.int32)


def _largest(scores: Array, k: int) -> Array:
    """Indices of the k largest positive scores; n in places left empty."""
    values, indices = lax.top_k(scores, k)
    return jnp.where(values > 0, indices, scores.shape[0]).astype(jnp.int32)


def _sample(scores: Array, m: int) -> Array:
    """One entry of each of m equal stretches, at a hashed place; any layout will do."""
    width = scores.shape[0] // m
    stretch = jnp.arange(m, dtype=jnp.uint32)
    place = (stretch * jnp.uint32(2654435761)) >> 8
    return scores[stretch * width + place % width]


def top_k(
    density: float, priority: Priority | None = None, *, exploration: float = 0.0
) -> Selection:
    """Selects exactly the ``k = ceil(density * n)`` entries of highest score.

    Ties go to the lower index; NaN counts as infinite.

    Args:
      density: fraction of the entries kept, in (0, 1]. Lower: fewer bytes, larger
        residual.
      priority: how entries are scored; by default their magnitude.
      exploration: share of the k places, in [0, 1], rounded up, that goes to the
        largest magnitudes among the rest, whatever their score. Wanted with priorities
        that let nothing new in.

    Returns:
      A `Selection`.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> selection = top_k(0.5)
      >>> selection.select(jnp.array([1.0, -3.0, 2.0, 0.0]), ())[0]
      Array([1, 2], dtype=int32)
    """
    density = check_density("top_k(density=...)", density)
    check_fraction("top_k(exploration=...)", exploration, static=True)
    if not isinstance(priority, Priority | None):
        raise TypeError(
            "`top_k(priority=...)` must be made by a call such as `js.ema()`, got "
            f"{priority!r}."
        )
    priority = magnitude() if priority is None else priority

    def select(x: Array, state: PyTree) -> tuple[Array, Array]:
        k = entries(density, x.shape[0])
        own = entries(float(exploration), k)
        indices = k_largest(priority.score(state, x), k - own)
        if own:
            others = sizes(x).at[indices].set(-1.0)
            # First, as what comes last may find no place in an exchange, ever again.
            indices = jnp.concatenate([lax.top_k(others, own)[1], indices])
        return indices, _no_overflow()

    return Selection(
        lambda n: entries(density, n),
        priority.init,
        select,
        priority.observe,
        workers=priority.workers,
    )


def sampled_top_k(
    density: float,
    *,
    sample: float = 0.01,
    tolerance: tuple[float, float] = (0.8, 1.3),
    max_adjustments: int = 10,
) -> Selection:
    """Selects about the k largest entries, by a threshold estimated from a sample.

    The threshold is estimated from a sample of one entry in each of equal stretches:
    its ``density`` largest lie above. While the number of entries at or above it is
    outside ``tolerance`` times k it is multiplied by 0.8 or 1.25, or halved in between
    once it is bounded on both sides. Among these candidates the k largest are kept,
    exactly. NaN counts as infinite.

    Where there are too many candidates all the same, as among equal entries, the k
    largest of all are taken, as by `top_k`: the first by index would be the same ones
    at every step, and the others would starve.

    Args:
      density: fraction of the entries kept, in (0, 1].
      sample: fraction of the entries sampled, in (0, 1]; at least ``2 / density``
        entries are.
      tolerance: accepted number of candidates, as factors of k; ``low <= 1 <= high``.
      max_adjustments: at most so many corrections of the threshold, each a read pass.

    Returns:
      A `Selection`; its overflow counts the candidates beyond k.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Differences from the paper:
      The authors' code lowers the threshold only; when there are too many candidates
      it sorts all of them. Static shapes want a bound on the candidates, so the
      threshold is also raised. The sample's places are hashed: a fixed stride may fall
      on one column of a matrix, over and over.

    References:
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", 2018.
    """
    density = check_density("sampled_top_k(density=...)", density)
    sample = check_density("sampled_top_k(sample=...)", sample)
    low, high = tolerance
    if not 0 < low <= 1 <= high < math.inf:
        raise ValueError(
            "`sampled_top_k(tolerance=...)` must be a pair with 0 < low <= 1 <= high, "
            f"got {tolerance}."
        )
    check_positive_int("sampled_top_k(max_adjustments=...)", max_adjustments, 0)

    def select(x: Array, state: PyTree) -> tuple[Array, Array]:
        del state
        n = x.shape[0]
        k = entries(density, n)
        if k == n:  # everything; no sample can tell the smallest entry
            return jnp.arange(n, dtype=jnp.int32), _no_overflow()
        fewest, most = math.ceil(low * k), math.floor(high * k)
        scores = sizes(x)
        m = min(n, max(entries(sample, n), math.ceil(2 / density)))
        first = smallest_of(_sample(scores, m), entries(density, m))

        def candidates(threshold):
            # A threshold of zero would make every zero entry a candidate.
            return (scores >= threshold) & (scores > 0)

        def count(threshold):
            return jnp.sum(candidates(threshold), dtype=jnp.int32)

        def outside(carry):
            threshold, found, _, _, step = carry
            wrong = (found < fewest) | (found > most)
            return wrong & (threshold > 0) & (step < max_adjustments)

        def adjust(carry):
            threshold, found, below, above, step = carry
            threshold, below, above = narrowed(threshold, below, above, found < k)
            return threshold, count(threshold), below, above, step + 1

        # Made from what varies between workers, so that shard_map's types agree.
        zero, inf = jnp.zeros_like(first), jnp.full_like(first, jnp.inf)
        found = count(first)
        threshold, found, below, _, _ = lax.while_loop(
            outside, adjust, (first, found, zero, inf, jnp.zeros_like(found))
        )
        # Rather too many than too few, where a threshold with enough was seen.
        threshold = jnp.where((found < fewest) & (below > 0), below, threshold)
        chosen = candidates(threshold)
        found = jnp.sum(chosen, dtype=jnp.int32)

        def among_candidates():
            indices = compact(chosen, min(n, most))
            at_indices = scores.at[indices].get(mode="fill", fill_value=-1.0)
            return indices[lax.top_k(at_indices, k)[1]]

        indices = lax.cond(found > most, lambda: _largest(scores, k), among_candidates)
        return indices, jnp.maximum(found - k, 0)

    return Selection(
        lambda n: entries(density, n),
        lambda n: (),
        select,
        lambda state, mean, sent: state,
    )


def threshold(value: float | Array, *, max_density: float) -> Selection:
    """Selects every entry with ``|x| > value``, up to a fixed capacity.

    Where more qualify than ``k = ceil(max_density * n)``, the k largest are taken and
    the rest counted as overflow; it stays in ``left``. NaN counts as infinite.

    Args:
      value: the magnitude above which an entry is sent, >= 0; may be traced.
      max_density: capacity as a fraction of the entries, in (0, 1].

    Returns:
      A `Selection`.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> selection = threshold(1.5, max_density=0.75)
      >>> selection.select(jnp.array([1.0, -3.0, 2.0, 0.0]), ())[0]
      Array([1, 2, 4], dtype=int32)

    References:
      Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
      2015 (who sends the threshold's value in place of the entry's).
    """
    check_number(
        "threshold(value=...)",
        value,
        "be finite and not negative",
        lambda x: 0 <= x < math.inf,
    )
    max_density = check_density("threshold(max_density=...)", max_density)

    def select(x: Array, state: PyTree) -> tuple[Array, Array]:
        del state
        k = entries(max_density, x.shape[0])
        scores = sizes(x)
        over = scores > value
        found = jnp.sum(over, dtype=jnp.int32)
        indices = lax.cond(
            found > k,
            lambda: _largest(scores, k),
            lambda: compact(over, k),
        )
        return indices, jnp.maximum(found - k, 0)

    return Selection(
        lambda n: entries(max_density, n),
        lambda n: (),
        select,
        lambda state, mean, sent: state,
    )


class StepState(NamedTuple):
    """The step that random selections derive their choice from."""

    step: Array  # shape=(), dtype=uint32; wraps round, which is harmless


def _drawn_by_step(density: float, seed: int, draw) -> Selection:
    """A selection drawn anew at every step from (seed, step), agreed by all workers."""

    def select(x: Array, state: StepState) -> tuple[Array, Array]:
        n = x.shape[0]
        if n == 0:
            return jnp.zeros(0, jnp.int32), _no_overflow()
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        return draw(key, n, entries(density, n)), _no_overflow()

    return Selection(
        count=lambda n: entries(density, n),
        init=lambda n: StepState(jnp.zeros((), jnp.uint32)),
        select=select,
        observe=lambda state, mean, sent: StepState(state.step + jnp.uint32(1)),
        agreed=True,
    )


def random_k(density: float, *, seed: int = 0) -> Selection:
    """Selects k entries at random, the same ones on every worker, without a message.

    Each entry is chosen with probability ``k / n``, so ``n / k`` times the selected
    vector is unbiased, with error ``E ||C(x) - x||^2 = (n / k - 1) ||x||^2``.

    Args:
      density: fraction of the entries kept, in (0, 1].
      seed: the same on all workers; steps draw anew from it.

    Returns:
      A `Selection` with ``agreed=True``: no index is ever sent.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Differences from the paper:
      One entry is drawn in each of k equal strata, and the strata are rotated by a
      random offset: O(k) work, the same inclusion probabilities, so the same mean and
      error. Neighbours are drawn together more rarely than in a uniform k-subset.

    References:
      Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", 2018.
    """
    density = check_density("random_k(density=...)", density)
    check_positive_int("random_k(seed=...)", seed, 0)

    def draw(key: Array, n: int, k: int) -> Array:
        inside, offset = jax.random.split(key)
        stratum = jnp.arange(k, dtype=jnp.int32)
        base, longer = divmod(n, k)  # the first `longer` strata have one entry more
        start = stratum * base + jnp.minimum(stratum, longer)
        width = base + (stratum < longer).astype(jnp.int32)
        drawn = start + jax.random.randint(inside, (k,), 0, width, dtype=jnp.int32)
        return _rotate(drawn, jax.random.randint(offset, (), 0, n, jnp.int32), n)

    return _drawn_by_step(density, seed, draw)


def random_block(density: float, *, seed: int = 0) -> Selection:
    """Selects k neighbouring entries from a random start on, the same on every worker.

    The block wraps round at the end. Under ``scope="leaf"`` every layer has its own.

    Args:
      density: fraction of the entries kept, in (0, 1].
      seed: the same on all workers; steps draw anew from it.

    Returns:
      A `Selection` with ``agreed=True``: no index is ever sent.

    Raises:
      ValueError, TypeError: an argument out of its range.

    References:
      Eghlidi, Jaggi, "Sparse Communication for Training Deep Networks", 2020.
    """
    density = check_density("random_block(density=...)", density)
    check_positive_int("random_block(seed=...)", seed, 0)

    def draw(key: Array, n: int, k: int) -> Array:
        offset = jax.random.randint(key, (), 0, n, jnp.int32)
        return _rotate(jnp.arange(k, dtype=jnp.int32), offset, n)

    return _drawn_by_step(density, seed, draw)


def _rotate(indices: Array, offset: Array, n: int) -> Array:
    """``(indices + offset) mod n`` where the sum may pass 2**31."""
    return jnp.where(
        indices >= n - offset, indices - (n - offset), indices + offset
    ).astype(jnp.int32)
