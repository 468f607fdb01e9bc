"""The k largest entries of a long vector, exactly, without sorting it.

A threshold that a little more than k entries reach is guessed from a sample. One pass
marks these candidates, a bit each; where there are at least k of them, and not many
more, the k largest of all are the k largest candidates. A wrong guess is corrected,
each time by another pass, and a vector that no threshold will divide (a few values,
over and over) is sorted after all: the result is exact in any case.

A sample, a read pass or two, and work on about ``1.5 k + n / 32`` entries, where
`lax.top_k` takes the time of 30 passes on a CPU; no scatter and no full sort, for GPUs.
Under `vmap` both ways are computed, for a condition becomes a choice.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from . import bits

# Below so many entries, or for so few of them, `lax.top_k` is as fast.
LONG, FEW = 1 << 18, 64
_LINE = 16  # neighbours that are sampled together: a cache line
_SAMPLED = 256  # entries of the sample that should lie above the threshold
_CORRECTIONS = 3


def k_largest(x: Array, k: int) -> Array:
    """Indices of the k entries of largest magnitude, the largest first.

    Of entries equal to the smallest one chosen, those of lower index are taken. NaN
    counts as infinite.

    Args:
      x: float32[n].
      k: at most n.

    Returns:
      int32[k].

    >>> k_largest(jnp.array([1.0, -3.0, 2.0, 0.0]), 2)
    Array([1, 2], dtype=int32)
    """
    n = x.shape[0]
    if n < LONG or 16 * k > n or k < FEW:
        return lax.top_k(sizes(x), k)[1]
    most = k + k // 2 + 1
    guess = _guess(x, 1.2 * k / n)

    def marked(threshold, below, above):
        words = _marks(x, threshold)
        found = jnp.sum(lax.population_count(words), dtype=jnp.uint32)
        return threshold, below, above, words, found

    def correct(threshold, below, above, words, found):
        del words
        return marked(*narrowed(threshold, below, above, found < k))

    def right(found):
        return (found >= k) & (found <= most)

    # One in the other and no loop, into which XLA would copy x: a right guess is asked
    # about once.
    def corrected(times, *carry):
        def again(*carry):
            return corrected(times - 1, *correct(*carry))

        if times == 0:
            return carry
        return lax.cond(right(carry[-1]), lambda *same: same, again, *carry)

    # Made from what varies between workers, so that shard_map's types agree.
    carry = marked(guess, jnp.zeros_like(guess), jnp.full_like(guess, jnp.inf))
    *_, words, found = corrected(_CORRECTIONS, *carry)
    return lax.cond(
        right(found),
        lambda: _among(x, _unmarked(words, most, n), k),
        lambda: lax.top_k(sizes(x), k)[1],
    )


def narrowed(
    threshold: Array, below: Array, above: Array, too_few: Array
) -> tuple[Array, Array, Array]:
    """The next threshold to try, and the bounds that are known of the right one.

    By a factor of 0.8 or 1.25, or halfway, once it is bounded on both sides.

    >>> narrowed(jnp.float32(4), jnp.float32(0), jnp.float32(8), False)
    (Array(6., dtype=float32), Array(4., dtype=float32), Array(8., dtype=float32))
    """
    below = jnp.where(too_few, below, threshold)
    above = jnp.where(too_few, threshold, above)
    threshold = jnp.where(
        (below > 0) & (above < jnp.inf),
        below + (above - below) / 2,
        threshold * jnp.where(too_few, 0.8, 1.25),
    )
    return threshold, below, above


def smallest_of(scores: Array, k: int) -> Array:
    """The k-th largest score.

    As a minimum: XLA takes ``lax.top_k(...)[0][-1]`` for a sort of everything.

    >>> smallest_of(jnp.array([1.0, 4.0, 3.0]), 2)
    Array(3., dtype=float32)
    """
    return jnp.min(lax.top_k(scores, k)[0])


def sizes(x: Array) -> Array:
    """The magnitude; infinity for NaN, whose order depends on the backend."""
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x))


def _guess(x: Array, share: float) -> Array:
    """About the magnitude that a share of all entries reaches, from lines of x."""
    n = x.shape[0]
    lines = min(math.ceil(_SAMPLED / share / _LINE), n // _LINE // 8)
    # An odd stride does not fall on one part of a matrix' rows over and over.
    stride = max((n // _LINE // lines - 1) | 1, 1)
    lines = n // (stride * _LINE)
    stretches = x[: lines * stride * _LINE].reshape(lines, stride, _LINE)
    sample = sizes(stretches[:, stride // 2].ravel())
    return smallest_of(sample, math.ceil(share * sample.shape[0]))


def _marks(x: Array, threshold: Array) -> Array:
    """One bit for each entry at or above the threshold; uint32[n / 32].

    Bit b of word w is entry ``b * words + w``: reading 32 stretches side by side is one
    fast pass, while packing neighbours into a word is not.
    """
    size = -(-x.shape[0] // 32)
    words = jnp.zeros(size, jnp.uint32)
    for bit in range(32):
        part = x[bit * size : (bit + 1) * size]
        reached = ~(jnp.abs(part) < threshold)  # so that NaN does
        reached = jnp.pad(reached, (0, size - part.shape[0]))
        words |= reached.astype(jnp.uint32) << bit
    return words


def _unmarked(words: Array, most: int, n: int) -> Array:
    """The marked entries, int32[most], in no order; n in empty places."""
    size = words.shape[0]
    none = 32 * size  # no entry's position
    position = bits.positions(words, most, none)
    index = (position % 32) * size + position // 32
    return jnp.where(position == jnp.uint32(none), n, index).astype(jnp.int32)


def _among(x: Array, candidates: Array, k: int) -> Array:
    """The k largest of the candidates."""

    def choose(candidates):
        values = sizes(x.at[candidates].get(mode="fill", fill_value=0))
        values = jnp.where(candidates < x.shape[0], values, -1)
        # The k of them as they come: XLA takes a slice of `lax.top_k` for a sort.
        chosen, at = lax.top_k(values, k)
        return candidates[at], jnp.sum(values >= jnp.min(chosen)) > k

    chosen, tied = choose(candidates)
    # `lax.top_k` takes what comes first of equal entries: here, the lower index.
    return lax.cond(
        tied, lambda: choose(lax.sort(candidates, is_stable=False))[0], lambda: chosen
    )
