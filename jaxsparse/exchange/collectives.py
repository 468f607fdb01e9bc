"""The collectives that the library uses, the same under pmap, shard_map and vmap.

``shard_map(check_vma=True)`` types every array as varying or not over the axis and
wants proof that what leaves as replicated is so; the other mappers know no such types.
All that has to be said about them is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..base import AxisGroups

PyTree = Any
AxisName = str | tuple[str, ...] | AxisGroups


def axis_size(axis_name: AxisName) -> int:
    """The number of workers on the mapped axis, or in a group, a Python int.

    Raises:
      NameError: the axis is not bound here.
      ValueError: groups were made for another number of workers.
    """
    name = _name(axis_name)
    try:
        size = lax.axis_size(name)
    except NameError as error:
        raise NameError(
            f"axis_name={name!r} is not bound here: the update must run inside "
            f"`jax.pmap(..., axis_name={name!r})`, or inside `jax.shard_map` "
            "or `jax.vmap` over an axis of that name."
        ) from error
    if not isinstance(axis_name, AxisGroups):
        return size
    if size != axis_name.num_workers:
        raise ValueError(
            f"`axis_groups(num_workers=...)` is {axis_name.num_workers}, but axis "
            f"{name!r} has {size} workers: pass num_workers={size}."
        )
    return axis_name.size


def _name(axis_name: AxisName) -> str | tuple[str, ...]:
    return axis_name.axis if isinstance(axis_name, AxisGroups) else axis_name


def _run(collective: Callable, x: Array, axis_name: AxisName, **options) -> Array:
    """One of JAX's collectives over the whole axis, or in each of its groups.

    Raises:
      NotImplementedError: groups, where JAX has none.
    """
    if not isinstance(axis_name, AxisGroups):
        return collective(x, axis_name, **options)
    groups = {"axis_index_groups": axis_name.members}
    try:
        return collective(x, axis_name.axis, **groups, **options)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"JAX has no groups of axis {axis_name.axis!r} here: `js.axis_groups` is "
            "for `jax.pmap` and `jax.shard_map(..., check_vma=False)`. Under "
            "`jax.vmap` and `check_vma=True` use two named axes, one for the hosts "
            "and one for the devices of a host."
        ) from error


def check_workers(call: str, num_workers: int | None, axis_name: AxisName) -> int:
    """The size of the bound axis, checked against what was promised at ``init``.

    Raises:
      ValueError: ``num_workers`` was given and is another number.
    """
    size = axis_size(axis_name)
    if num_workers is not None and num_workers != size:
        raise ValueError(
            f"`{call}` is {num_workers}, but axis {axis_name!r} has {size} workers: "
            f"pass num_workers={size}."
        )
    return size


def typed(axis_name: AxisName) -> bool:
    """Whether arrays carry varying types here: only in shard_map(check_vma=True)."""
    return bool(varying_axes(lax.axis_index(_name(axis_name))))


def varying_axes(x: Any) -> frozenset:
    """The axes over which ``x`` is typed as varying; empty where there are no types."""
    aval = jax.typeof(x)
    return frozenset(aval.mat.varying if hasattr(aval, "mat") else aval.vma)


def check_local(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients that the mapper has already summed over the workers.

    Under ``shard_map(check_vma=True)`` the gradient with respect to replicated
    parameters is summed automatically: there is nothing left to compress.

    Raises:
      ValueError: no leaf of ``updates`` varies over the axis.
    """
    leaves = jax.tree.leaves(updates)
    name = _name(axis_name)
    names = set(name) if isinstance(name, tuple) else {name}
    if not leaves or not typed(axis_name):
        return
    if not any(names & varying_axes(leaf) for leaf in leaves):
        raise ValueError(
            f"the updates do not vary over axis {name!r}: shard_map has already "
            "summed these gradients over the workers. Take gradients with respect to "
            f"`js.vary(params, axis_name={name!r})`, or use `check_vma=False`."
        )


def check_as_local(updates: PyTree, state: PyTree) -> None:
    """`check_local` over the axes that a memory varies over, which would hide it."""
    for axis in sorted(frozenset().union(*map(varying_axes, jax.tree.leaves(state)))):
        check_local(updates, axis)


def mean(x: Array, axis_name: AxisName) -> Array:
    """The mean over the workers, on all of them. Divides first: no overflow."""
    return total(x / axis_size(axis_name), axis_name)


def mean_part(x: Array, axis_name: AxisName) -> Array:
    """Worker i's part of the mean, the i-th of N equal ones. Divides first."""
    return _run(lax.psum_scatter, x / axis_size(axis_name), axis_name, tiled=True)


def gather(x: Array, axis_name: AxisName) -> Array:
    """All workers' arrays stacked, ``[N, ...]``, the same on every worker."""
    if typed(axis_name):
        return _run(lax.all_gather, x, axis_name, to="invarying")
    return _run(lax.all_gather, x, axis_name)


def all_to_all(x: Array, axis_name: AxisName) -> Array:
    """Row i of every worker's ``x`` to worker i: ``[N, ...]``, in order of workers."""
    dimensions = {"split_axis": 0, "concat_axis": 0, "tiled": True}
    return _run(lax.all_to_all, x, axis_name, **dimensions)


def swap(x: Array, distance: int, axis_name: AxisName) -> Array:
    """The ``x`` of worker ``i xor distance``, on worker i of ``2**m``."""
    workers = range(axis_size(axis_name))
    # A permutation has no groups: it is one of the whole axis.
    groups = axis_name.members if isinstance(axis_name, AxisGroups) else [workers]
    pairs = [(group[i], group[i ^ distance]) for group in groups for i in workers]
    return lax.ppermute(x, _name(axis_name), pairs)


def gather_halves(x: Array, axis_name: AxisName) -> list[Array]:
    """The ``x`` of the first half of the workers, and that of the second, on all.

    All workers of a half must hold the same vector: each sends its share of it. One
    worker alone is no half; its vector is the only one.
    """
    sharers = max(axis_size(axis_name) // 2, 1)
    padded = jnp.pad(x, (0, -x.shape[0] % sharers)).reshape(sharers, -1)
    shares = gather(padded[worker(axis_name) % sharers], axis_name)
    return [*shares.reshape(-1, padded.size)[:, : x.shape[0]]]


def total(x: Array, axis_name: AxisName) -> Array:
    """The sum over the workers, on all of them."""
    return _run(lax.psum, x, axis_name)


def broadcast(words: Array, root: Array, axis_name: AxisName) -> Array:
    """The root's words on all workers: a sum in which the others are zeros."""
    mine = worker(axis_name) == root
    return total(jnp.where(mine, words, jnp.zeros_like(words)), axis_name)


def maximum(x: Array, axis_name: AxisName) -> Array:
    """The largest over the workers, on all of them."""
    return _run(lax.pmax, x, axis_name)


def worker(axis_name: AxisName) -> Array:
    """Which worker this is, on the axis or in its group, an int32 in [0, N)."""
    index = lax.axis_index(_name(axis_name))
    if isinstance(axis_name, AxisGroups):
        return index // axis_name.stride % axis_name.size
    return index


def agree(flag: Array, axis_name: AxisName) -> Array:
    """True on every worker if true on all of them."""
    return _run(lax.pmin, flag.astype(jnp.int32), axis_name) == 1


def vary(tree: PyTree, *, axis_name: AxisName) -> PyTree:
    """Makes replicated parameters each worker's own, before gradients are taken.

    Under ``shard_map(check_vma=True)`` gradients with respect to replicated parameters
    arrive summed over the workers, and there is nothing left to compress; with respect
    to ``vary(params, ...)`` they are each worker's own. Anywhere else it does nothing:
    one step serves all mappers.

    Args:
      tree: the parameters.
      axis_name: name of the mapped axis.

    Returns:
      The same values.

    Example:
      >>> def step(params, x):
      ...     params = vary(params, axis_name="w")
      ...     return jax.grad(lambda p: jnp.sum(p * x))(params)
      >>> jax.vmap(step, (None, 0), axis_name="w")(jnp.ones(1), jnp.array([1.0, 2.0]))
      Array([[1.],
             [2.]], dtype=float32)
    """
    return vary_like(tree, lax.axis_index(_name(axis_name)))


def vary_like(tree: PyTree, like: Array) -> PyTree:
    """Types ``tree`` as varying over the axes that ``like`` varies over."""

    def typed_like(x: Array) -> Array:
        missing = varying_axes(like) - varying_axes(x)
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return jax.tree.map(typed_like, tree)


def keep_types(state: PyTree, before: PyTree) -> PyTree:
    """Types a new state as varying where the one before it was, for scan and cond."""
    return jax.tree.map(vary_like, state, before)


def zeros(abstract: jax.ShapeDtypeStruct) -> Array:
    """Zeros of an abstract array's shape and dtype, and typed as varying if it is."""
    x = jnp.zeros(abstract.shape, abstract.dtype)
    axes = getattr(abstract, "manual_axis_type", None)
    return lax.pcast(x, tuple(axes.varying), to="varying") if axes else x
