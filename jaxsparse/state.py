"""Which state differs from worker to worker, and how to carry it.

Residuals and momenta differ, step counts and priorities do not. What the library
creates as local it marks with `WorkerLocal`, but local state arises elsewhere as well:
gradient accumulators, moments placed before the compressor, BatchNorm statistics. So
which leaf is which is found out, by tracing the user's own step:

    local = js.local_leaves(step, state, batch, axis_name="workers", num_workers=8)
    shared, own = js.split(state, local)
    own = js.stack_workers(own, 8)      # axes: (None, 0) for pmap, (P(), P("workers"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from . import tree
from .arguments import check_axis_name, check_positive_int
from .base import AxisGroups, PyTree, WorkerLocal


def local_leaves(
    step: Callable[[PyTree, PyTree], Any],
    state: PyTree,
    batch: PyTree,
    *,
    axis_name: str | tuple[str, ...],
    num_workers: int | tuple[int, ...],
    params: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """Finds the leaves of ``state`` that will differ between workers.

    Traces ``vmap(step)``, computing nothing, until the answer no longer changes: a leaf
    is local if the library marks it so (`WorkerLocal`), or if its new value depends on
    a worker's own data other than through a collective.

    Args:
      step: ``(state, batch) -> state`` or ``(state, anything)``, as it runs on one
        worker, with collectives over ``axis_name``.
      state: as on one worker, without a worker axis; arrays may be abstract.
      batch: one worker's batch; may be abstract.
      axis_name: name of the mapped axis; a tuple of names for several.
      num_workers: its size; a tuple for several.
      params: picks the parameters out of the state; by default ``state.params``,
        ``state["params"]`` or ``state[0]``, whichever there is first.

    Returns:
      A tree like ``state`` of bools, True where the leaf is local.

    Raises:
      ValueError: the parameters would differ between workers (names the leaf), or the
        step changes the structure of the state.

    Example:
      >>> import optax, jaxsparse as js
      >>> tx = optax.chain(js.error_feedback(js.dense(axis_name="w")), optax.sgd(0.1))
      >>> def step(state, x):
      ...     params, opt_state = state
      ...     grads = jax.grad(lambda p: jnp.sum((p - x) ** 2))(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state
      >>> p = jnp.zeros(3)
      >>> local = local_leaves(step, (p, tx.init(p)), p, axis_name="w", num_workers=4)
      >>> local[0], local[1][0].residual.value
      (False, True)
    """
    axes = _axes(axis_name, num_workers)
    local = [set(axes) if own else set() for own in jax.tree.leaves(_marked(state))]
    known = None
    while local != known:
        known = [set(own) for own in local]
        for name in axes:
            found = _varying(step, state, batch, axes, known, name)
            for own, differs in zip(local, found, strict=True):
                own.update({name} if differs else ())
    mask = jax.tree.unflatten(jax.tree.structure(state), map(bool, local))
    _check_params(state, mask, params, axis_name)
    return mask


def _varying(
    step: Callable,
    state: PyTree,
    batch: PyTree,
    axes: dict[str, int],
    local: list[set[str]],
    along: str,
) -> list[bool]:
    """Which leaves of the new state differ along one axis, which is mapped last.

    ``local`` has the axes along which the leaves of ``state`` differ.
    """
    leaves, treedef = jax.tree.flatten(state)
    order = sorted(axes, key=lambda name: name == along)  # from the innermost on
    seen: list[bool] = []

    def stacked(x, own):
        sizes = [axes[name] for name in reversed(order) if name in own]
        return jax.ShapeDtypeStruct((*sizes, *jnp.shape(x)), _dtype(x))

    def mapped(leaves, batch):
        out = step(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(_new_state(out, state))

    for name in order:
        if name == along:
            mapped = _probed(mapped, seen)
        in_axes = [0 if name in own else None for own in local], 0
        mapped = jax.vmap(mapped, in_axes, axis_name=name, axis_size=axes[name])
    jax.eval_shape(
        mapped,
        [stacked(x, own) for x, own in zip(leaves, local, strict=True)],
        jax.tree.map(lambda x: stacked(x, axes), batch),
    )
    return seen


def _axes(axis_name: Any, num_workers: Any) -> dict[str, int]:
    """The mapped axes and their sizes."""
    check_axis_name("local_leaves(axis_name=...)", axis_name)
    if isinstance(axis_name, AxisGroups):
        raise TypeError(
            "`local_leaves(axis_name=...)` takes names only: JAX has no groups under "
            "vmap. Trace the step with two named axes in place of `js.axis_groups`; "
            "its state is the same."
        )
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    sizes = num_workers if isinstance(num_workers, tuple) else (num_workers,)
    if len(names) != len(sizes):
        raise ValueError(
            f"`local_leaves(num_workers=...)` must give the size of each of the axes "
            f"{axis_name!r}, got {num_workers!r}."
        )
    for size in sizes:
        check_positive_int("local_leaves(num_workers=...)", size)
    return dict(zip(names, sizes, strict=True))


def split(state: PyTree, local: PyTree) -> tuple[PyTree, PyTree]:
    """Splits ``state`` into its shared and its local part, by a tree of bools.

    Both have the containers of ``state``, with None in the other's places.

    >>> split({"a": 1, "b": 2}, {"a": False, "b": True})
    ({'a': 1, 'b': None}, {'a': None, 'b': 2})
    """
    return (
        jax.tree.map(lambda x, own: None if own else x, state, local),
        jax.tree.map(lambda x, own: x if own else None, state, local),
    )


def merge(shared: PyTree, local: PyTree) -> PyTree:
    """The inverse of `split`.

    >>> merge({'a': 1, 'b': None}, {'a': None, 'b': 2})
    {'a': 1, 'b': 2}
    """
    return jax.tree.map(
        lambda a, b: b if a is None else a,
        shared,
        local,
        is_leaf=lambda x: x is None,
    )


def stack_workers(local: PyTree, num_workers: int) -> PyTree:
    """Gives every leaf a leading worker axis, all workers alike: state before step one.

    >>> stack_workers(jnp.zeros(3), 2).shape
    (2, 3)
    """
    check_positive_int("stack_workers(num_workers=...)", num_workers)
    return jax.tree.map(lambda x: jnp.stack([x] * num_workers), local)


def unreplicate(state: PyTree) -> PyTree:
    """One copy of a state that has a worker axis though all workers have the same.

    For looking at or saving what a step mapped with ``out_axes=0`` returns, such as
    parameters. What `split` calls shared has no worker axis and needs no such call.

    Args:
      state: every leaf has a leading worker axis.

    Returns:
      The state without it.

    Raises:
      ValueError: a leaf is the library's local state, or differs between the workers:
        one worker's copy is not the others' (names the leaf and what to call).

    Example:
      >>> unreplicate({"w": jnp.ones((4, 2))})["w"].shape
      (2,)
    """

    def first(path, node):
        if isinstance(node, WorkerLocal):
            if not jax.tree.leaves(node):  # taken out by `split`
                return node
            raise ValueError(_one_copy(path, "is each worker's own"))
        if jnp.ndim(node) == 0:
            raise ValueError(
                f"leaf `{tree.name(path)}` has no worker axis: it is one copy already. "
                "Pass `unreplicate` the part alone that has one."
            )
        is_key = jnp.issubdtype(_dtype(node), jax.dtypes.prng_key)
        bits = jax.random.key_data(node) if is_key else node
        same = jnp.broadcast_to(bits[:1], bits.shape)
        if not jnp.array_equal(bits, same, equal_nan=True):
            raise ValueError(_one_copy(path, "differs between the workers"))
        return node[0]

    return jax.tree_util.tree_map_with_path(
        first, state, is_leaf=lambda x: isinstance(x, WorkerLocal)
    )


def _one_copy(path: Any, what: str) -> str:
    return (
        f"leaf `{tree.name(path)}` {what}: `unreplicate` would lose the other workers' "
        "part. Take it out with `shared, own = js.split(state, local)`, where "
        "`local = js.local_leaves(step, ...)`, and save `own` with its worker axis; "
        "`js.reshard` turns it into that of another number of workers."
    )


def state_axes(state: PyTree) -> PyTree:
    """The coarsest tree of axes for a state: 0 at `WorkerLocal`, None elsewhere.

    Fits ``in_axes`` and ``out_axes`` of pmap and vmap where all local state is the
    library's own and already has its worker axis. Where a dict mixes both kinds the
    result holds a dict, which pmap over several processes cannot take: use `split`.

    >>> state_axes((jnp.zeros(2), {"r": WorkerLocal(jnp.zeros(2)), "q": jnp.ones(1)}))
    (None, {'q': None, 'r': 0})
    """
    if isinstance(state, WorkerLocal):
        return 0
    children, treedef = jax.tree.flatten(state, is_leaf=lambda x: x is not state)
    if tree.same_structure(state, 0):  # a leaf
        return None
    axes = [state_axes(child) for child in children]
    if all(axis is None for axis in axes):
        return None
    if all(isinstance(axis, int) for axis in axes):
        return 0
    return jax.tree.unflatten(treedef, axes)


def _marked(state: PyTree) -> PyTree:
    """A tree like ``state`` of bools, True inside `WorkerLocal`.

    Where the marks inside tell (``reshard="inner"``) only they do.
    """

    def is_marked(node):
        return isinstance(node, WorkerLocal) and node.reshard != "inner"

    def mark(node):
        marked = is_marked(node)
        return jax.tree.map(lambda _: marked, node)

    return jax.tree.map(mark, state, is_leaf=is_marked)


def _probed(function: Callable, seen: list[bool]) -> Callable:
    """The function, noting which of its results the vmap around it batches."""

    def probe(x):
        place = len(seen)
        seen.append(False)

        @custom_vmap
        def identity(x):
            return x

        @identity.def_vmap
        def rule(axis_size, in_batched, x):
            seen[place] = in_batched[0]
            return x, in_batched[0]

        return identity(x)

    return lambda *args: [probe(x) for x in function(*args)]


def _new_state(out: Any, state: PyTree) -> PyTree:
    for candidate in (out, out[0] if isinstance(out, tuple) and out else None):
        if tree.same_structure(candidate, state):
            return candidate
    raise ValueError(
        "`local_leaves` wants a step that returns the new state, or a tuple that "
        f"begins with it, in the structure it got: "
        f"{jax.tree.structure(state)}; the step returned {jax.tree.structure(out)}."
    )


def _check_params(state, mask, params, axis_name) -> None:
    if params is None:
        params = _find_params(state)
    for path, own in jax.tree_util.tree_leaves_with_path(params(mask)):
        if own:
            raise ValueError(
                f"parameters would differ between workers: leaf `{tree.name(path)}` "
                "gets updates from a worker's own gradients that were never averaged "
                f"over axis {axis_name!r}. Put a transformation such as "
                "`js.error_feedback(...)` into the chain, give the leaves that "
                "`optax.masked` or `optax.partition` leaves out one with `js.dense`, "
                "and keep what acts on single workers before it."
            )


def _find_params(state: PyTree) -> Callable[[PyTree], PyTree]:
    if hasattr(state, "params"):
        return lambda s: s.params
    if isinstance(state, dict) and "params" in state:
        return lambda s: s["params"]
    if isinstance(state, (tuple, list)) and state:
        return lambda s: s[0]
    raise ValueError(
        "`local_leaves(...)` cannot tell which part of the state are the parameters. "
        "Pass `params=lambda state: ...`."
    )


def _dtype(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
