"""Scope: a selection over the whole vector, or the same one in every leaf."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .base import PyTree, Selection


def per_leaf(selection: Selection, sizes: tuple[int, ...]) -> Selection:
    """The same selection on every leaf of a flat vector: a budget per layer.

    The leaves' states are laid end to end, array by array, so that the structure of the
    whole does not depend on how many leaves there are: ``optax.tree.map_params`` builds
    the state of a tree without any.

    Args:
      selection: applied to each leaf on its own, with its own state.
      sizes: entries of the leaves, in order; their sum is n.

    Returns:
      A `Selection` over the whole vector. Its order is by rank within the leaf, as a
      share of the leaf's places: where a server has no room, it has none for the least
      important entries of every leaf.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    counts = [selection.count(size) for size in sizes]
    order = _by_share(counts)
    like = functools.cache(lambda n: jax.eval_shape(lambda: selection.init(n)))

    def init(n: int) -> PyTree:
        del n
        return _joined([selection.init(size) for size in sizes or (0,)])

    def parts(x: Array, state: PyTree) -> list[tuple[int, Array, PyTree]]:
        """Start, entries and state of every leaf."""
        slices = [
            x[start : start + size] for start, size in zip(starts, sizes, strict=True)
        ]
        return [*zip(starts, slices, _parted(state, [*map(like, sizes)]), strict=True)]

    def select(x: Array, state: PyTree) -> tuple[Array, Array]:
        found, overflow = [], jnp.zeros((), jnp.int32)
        for start, entries, part in parts(x, state):
            indices, over = selection.select(entries, part)
            empty = indices >= entries.shape[0]
            found.append(jnp.where(empty, x.shape[0], indices + start))
            overflow = overflow + over
        return jnp.concatenate(found)[order], overflow

    def observe(state: PyTree, mean: Array, sent: Array) -> PyTree:
        return _joined(
            [
                selection.observe(part, entries, sent[start : start + len(entries)])
                for start, entries, part in parts(mean, state)
            ]
        )

    return Selection(
        count=lambda n: sum(counts),
        init=init,
        select=select,
        observe=observe,
        agreed=selection.agreed,
        workers=selection.workers,
    )


def first_of_each_leaf(selection: Selection, sizes: Sequence[int], parts: int):
    """Places, in the order of `per_leaf`, of every leaf's first of ``parts`` shares.

    >>> from .selection import top_k
    >>> first_of_each_leaf(top_k(0.5), [8, 2], 2)  # leaf by leaf 0 1 2 3, 4
    array([0, 1, 2])
    """
    counts = [selection.count(size) for size in sizes]
    wanted = [np.arange(count) < -(-count // parts) for count in counts]
    return np.flatnonzero(
        np.concatenate([np.zeros(0, bool), *wanted])[_by_share(counts)]
    )


def _by_share(counts: Sequence[int]) -> np.ndarray:
    """The order of leaves' places by rank, as a share of the leaf's places."""
    ranks = [(np.arange(count) + 0.5) / count for count in counts if count]
    return np.argsort(np.concatenate([np.zeros(0), *ranks]), kind="stable")


def _joined(states: list[PyTree]) -> PyTree:
    """States of one structure as one, of flat arrays."""
    return jax.tree.map(lambda *xs: jnp.concatenate([*map(jnp.ravel, xs)]), *states)


def _parted(joined: PyTree, like: list[PyTree]) -> list[PyTree]:
    """The inverse of `_joined`; ``like`` has the shapes."""
    flat, treedef = jax.tree.flatten(joined)
    starts, parts = [0] * len(flat), []
    for part in like:
        shapes = [leaf.shape for leaf in jax.tree.leaves(part)]
        ends = [
            start + math.prod(shape)
            for start, shape in zip(starts, shapes, strict=True)
        ]
        arrays = [
            x[start:end].reshape(shape)
            for x, start, end, shape in zip(flat, starts, ends, shapes, strict=True)
        ]
        parts.append(jax.tree.unflatten(treedef, arrays))
        starts = ends
    return parts
