"""A change of the number of workers: how M workers take up the state of N.

A saved state has its shared part once and its local part with a worker axis, as
`split` parts it. Between the two runs,

    state = js.reshard(js.merge(shared, own), M, local)
    shared, own = js.split(state, local)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import tree
from .arguments import check_positive_int
from .base import PyTree, WorkerLocal
from .exchange import ownership


def reshard(state: PyTree, n: int, local: PyTree | bool | None = None) -> PyTree:
    """Turns the state of N workers into that of n.

    What is conserved is the update that the workers together still owe:

    * residuals, momenta, accumulators, BatchNorm statistics, all other floating-point
      leaves: the **mean** over the workers, not the sum, since the mean is what a step
      delivers. Worker i of N stands for the interval ``[i, i + 1) / N``, and a new
      worker gets the mean over its own: worker j of n gets ``sum_i w_ij x_i``, with
      ``w_ij`` the share of ``[j, j + 1) / n`` that lies in ``[i, i + 1) / N``. So 8 to
      4 averages pairs, 4 to 8 copies, N to N changes nothing, and no values are mixed
      more than they must be.
    * a server's shards, which are in units of the mean: entry by entry, exactly.
    * integers and bools, as local histories of bits: no mean makes sense, so worker j
      gets those of worker ``floor(j N / n)``. Typed PRNG keys as well, and copies of
      one key are told apart by ``fold_in``; raw uint32 keys are not recognised.

    Shared state passes through: priorities, PowerSGD's factors, learned codes, counts.
    Transformations that know their number of workers (`server`, `reg_top_k`) must be
    made anew with n.

    Args:
      state: merged of its parts; local leaves have a leading worker axis, JAX or NumPy
        arrays with concrete values.
      n: the number of workers from now on.
      local: which leaves are local, from `local_leaves`; True for all, as in the second
        part of `split`; None for those alone that the library marks as `WorkerLocal`.

    Returns:
      A state of the same structure and dtypes; local leaves have n in front.

    Raises:
      ValueError: n is no positive number; a local leaf has no worker axis, or one of
        another size; state of `hierarchical`, which depends on the place of a device.

    Example:
      >>> import jaxsparse as js
      >>> owed = jnp.array([[4.0, 0.0], [2.0, 0.0], [0.0, 8.0], [0.0, 0.0]])
      >>> state = {"q": jnp.ones(3), "residual": js.WorkerLocal(owed)}
      >>> print(js.reshard(state, 2)["residual"].value)
      [[3. 0.]
       [0. 4.]]
      >>> js.reshard(state, 3)["residual"].value.mean(0).tolist()
      [1.5, 2.0]
    """
    check_positive_int("reshard(n=...)", n)
    _check_marks(state)
    mask = _mask(state, local)
    if (workers := _workers(state, mask)) is None:  # nothing is local
        return state

    def moved(path, node, own, workers=workers):
        if isinstance(node, WorkerLocal):
            return _moved(node, workers, n, tree.name(path))
        return _spread(node, workers, n) if own else node

    return jax.tree_util.tree_map_with_path(moved, state, mask, is_leaf=_is_mark)


def _check_marks(state: PyTree) -> None:
    """Refuses marked state that no rule is known for."""
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_mark):
        if not _is_mark(node):
            continue
        name = tree.name(path)
        if node.reshard == "inner":
            raise ValueError(
                f"`{name}` is the state of `hierarchical`: each device of a host has "
                "another part of the parameters, and an average over all workers would "
                "mix them. A host's devices must stay as many. For another number of "
                "hosts reshape the worker axis to [hosts, devices], and pass `reshard` "
                "the wrapped state, `.inner.value`, at one device's place, `x[:, d]`, "
                "after the other."
            )
        if node.reshard not in ("mean", "shard"):
            raise ValueError(
                f"`{name}` has reshard={node.reshard!r}: known are 'mean' and 'shard'."
            )
        if (node.reshard == "shard") != (node.size is not None):
            raise ValueError(
                f"`{name}` has reshard={node.reshard!r} and size={node.size}: a shard "
                "goes with the size of the global vector, `WorkerLocal(shard, "
                "reshard='shard', size=entries)`, and nothing else does."
            )


def _mask(state: PyTree, local: PyTree | bool | None) -> PyTree:
    """A tree like the state of bools: the local leaves."""
    if local is not None and not isinstance(local, bool):
        if not tree.same_structure(state, local):
            raise ValueError(
                "`reshard(local=...)` must be a tree of bools in the structure of the "
                f"state, {jax.tree.structure(state)}, got {jax.tree.structure(local)}. "
                "A part that `split` made goes with local=True."
            )
        return local
    return jax.tree.map(
        lambda node: jax.tree.map(lambda _: bool(local) or _is_mark(node), node),
        state,
        is_leaf=_is_mark,
    )


def _workers(state: PyTree, mask: PyTree) -> int | None:
    """The number of workers that a state is of; None if none of it is local."""
    shapes = {
        tree.name(path): jnp.shape(x)
        for (path, x), own in zip(
            jax.tree_util.tree_leaves_with_path(state),
            jax.tree.leaves(mask),
            strict=True,
        )
        if own
    }
    for name, shape in shapes.items():
        first, wanted = next(iter(shapes.items()))
        if not shape or shape[0] != wanted[0]:
            raise ValueError(
                "`reshard` wants a leading worker axis, of one size, on every local "
                f"leaf: leaf `{name}` has shape {shape}, leaf `{first}` {wanted}. "
                "Pass what all workers have, as `stack_workers` or a mapped step "
                "gives it."
            )
    return next(iter(shapes.values()))[0] if shapes else None


def _moved(node: WorkerLocal, workers: int, n: int, name: str) -> WorkerLocal:
    """What is marked, for n workers."""
    if node.size is None:
        return jax.tree.map(lambda x: _spread(x, workers, n), node)
    size = int(node.size[0])

    def relaid(shards: Array) -> Array:
        if shards.shape[1:] != (ownership.rows(size, workers),):
            raise ValueError(
                f"`{name}` has shape {shards.shape}: {workers} workers' shards of "
                f"{size} entries are [{workers}, {ownership.rows(size, workers)}]."
            )
        vector = ownership.from_shards(jnp.asarray(shards), size)
        return _like(shards, ownership.to_shards(vector, n))

    return dataclasses.replace(
        node,
        value=jax.tree.map(relaid, node.value),
        size=_spread(node.size, workers, n),
    )


def _spread(x: Array, workers: int, n: int) -> Array:
    """A leaf of any kind, ``[N, ...]`` to ``[n, ...]``."""
    nearest = [j * workers // n for j in range(n)]
    if _is_key(x):
        return jnp.stack(
            [
                x[i] if nearest.index(i) == j else _folded(x[i], j)
                for j, i in enumerate(nearest)
            ]
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[np.array(nearest)]
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def mean_over(sources: list[tuple[int, float]]):
        if len(sources) == 1:  # a copy has the same bits
            return x[sources[0][0]]
        parts = [w * x[i].astype(wide) for i, w in sources]
        return sum(parts[1:], parts[0]).astype(x.dtype)

    stack: Callable = np.stack if isinstance(x, np.ndarray) else jnp.stack
    return stack([mean_over(_sources(j, workers, n)) for j in range(n)])


def _folded(keys: Array, number: int) -> Array:
    """Other keys than these, by a number."""
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _sources(j: int, workers: int, n: int) -> list[tuple[int, float]]:
    """The old workers whose intervals the new worker's overlaps, and the shares.

    >>> [_sources(j, 4, 2) for j in range(2)]
    [[(0, 0.5), (1, 0.5)], [(2, 0.5), (3, 0.5)]]
    """
    # In units of 1 / (N n) an old interval is n long, a new one N.
    low, high = j * workers, (j + 1) * workers
    return [
        (i, (min(high, (i + 1) * n) - max(low, i * n)) / workers)
        for i in range(low // n, -(-high // n))
    ]


def _like(given: Any, x: Array) -> Any:
    """On the host if what was given is there."""
    return np.asarray(x) if isinstance(given, np.ndarray) else x


def _is_mark(node: Any) -> bool:
    return isinstance(node, WorkerLocal)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
