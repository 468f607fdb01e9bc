"""A pytree of arrays as one flat float32 vector, and back.

Leaves are laid end to end in the order of ``jax.tree.leaves``; a `Layout` remembers
where each one lies. Everything here works on abstract arrays as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

PyTree = Any

# An index is an int32, and n itself stands for "no entry": n must be below 2**31 - 1.
MAX_ENTRIES = 2**31 - 2


class Layout(NamedTuple):
    """Where the leaves of a tree lie in its flat vector (all static)."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each leaf."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def size(self) -> int:
        """Entries of the whole tree, a Python int."""
        return sum(self.sizes)


def layout(tree: PyTree) -> Layout:
    """The layout of a tree of floating-point arrays.

    Raises:
      TypeError: for a leaf that is not a floating-point array; names the leaf.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"jaxsparse averages floating-point arrays, but leaf `{name(path)}` "
                f"is {dtype if dtype is not None else type(leaf).__name__}. Keep such "
                "leaves out with `optax.partition` or `optax.masked`."
            )
    return Layout(
        treedef,
        tuple(tuple(leaf.shape) for _, leaf in leaves),
        tuple(leaf.dtype for _, leaf in leaves),
    )


def flatten(tree: PyTree) -> tuple[Array, Layout]:
    """The tree as one float32 vector of all its entries, with its layout.

    >>> vector, spec = flatten({"a": jnp.ones((2, 2)), "b": jnp.zeros(1)})
    >>> vector.shape, spec.size
    ((5,), 5)
    """
    spec = layout(tree)
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros(0, jnp.float32), spec
    # The barrier: else XLA takes every slice of the vector for pieces of the leaves,
    # and lays these end to end once more.
    return lax.optimization_barrier(jnp.concatenate(leaves)), spec


def unflatten(vector: Array, spec: Layout) -> PyTree:
    """The inverse of `flatten`; finite values stay finite in every leaf's dtype."""
    leaves, start = [], 0
    for shape, dtype, size in zip(spec.shapes, spec.dtypes, spec.sizes, strict=True):
        leaves.append(narrow(vector[start : start + size].reshape(shape), dtype))
        start += size
    return jax.tree.unflatten(spec.treedef, leaves)


def zeros(spec: Layout) -> PyTree:
    """A tree of zeros, the same on every worker whatever the spec was taken from."""
    return unflatten(jnp.zeros(spec.size, jnp.float32), spec)


def narrow(x: Array, dtype: Any) -> Array:
    """Casts, clamping what is finite to the dtype's range instead of making it inf."""
    if jnp.finfo(dtype).max < jnp.finfo(x.dtype).max:
        limit = jnp.asarray(jnp.finfo(dtype).max, x.dtype)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return x.astype(dtype)


def cast_float32(tree: PyTree) -> PyTree:
    """Casts every leaf to float32, after `layout`'s check of them."""
    layout(tree)
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts every leaf to the dtype of its partner in ``like`` (see `narrow`)."""
    return jax.tree.map(lambda x, other: narrow(x, other.dtype), tree, like)


def check_size(spec: Layout) -> None:
    """Refuses trees whose entries an int32 cannot count.

    Raises:
      ValueError: above ``2**31 - 2`` entries.
    """
    if spec.size > MAX_ENTRIES:
        raise ValueError(
            f"a sparse reducer takes at most 2**31 - 2 entries, got {spec.size}: "
            "indices are int32. Split the parameters into several groups with "
            "`optax.partition`."
        )


def check_matches(tree: PyTree, reference: PyTree, what: str) -> None:
    """Raises if ``tree`` has not the structure and shapes that ``reference`` has.

    Raises:
      ValueError: names the first leaf that differs. ``what`` names the reference.
    """
    given = {name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    known = {
        name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(reference)
    }
    for leaf in [*given, *known]:
        if given.get(leaf) != known.get(leaf):
            raise ValueError(
                f"updates do not match {what}: leaf `{leaf}` has shape "
                f"{given.get(leaf, 'missing')}, at init it was "
                f"{known.get(leaf, 'missing')}. Call `init` with the parameters "
                "whose gradients are passed to `update`."
            )
    if not same_structure(tree, reference):
        raise ValueError(
            f"updates do not match {what}: the containers differ, "
            f"{jax.tree.structure(tree)} now, {jax.tree.structure(reference)} at init."
        )


def check_state(state: PyTree, init: Callable, updates: PyTree, what: str) -> None:
    """Raises if ``state`` is not such as ``init`` makes for trees like ``updates``.

    Raises:
      ValueError: shows both states. ``what`` names the transformation.
    """
    wanted = jax.eval_shape(init, updates)
    if not same_structure(state, wanted) or describe(state) != describe(wanted):
        raise ValueError(
            f"updates do not match the state of `{what}`, which was made for another "
            f"tree: it is {describe(state)}, and updates like these want "
            f"{describe(wanted)}. Call `init` with the parameters whose gradients are "
            "passed to `update`."
        )


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same containers and the same number of leaves."""
    structure: Any = jax.tree.structure(one)
    return structure == jax.tree.structure(other)


def describe(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of every leaf by its path, for error messages.

    >>> describe({"bias": jnp.zeros(3)})
    {'bias': 'float32[3]'}
    """
    return {
        name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def name(path: tuple[Any, ...]) -> str:
    """A leaf's path as text: ``params/Dense_0/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
