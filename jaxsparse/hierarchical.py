"""Topology: hosts of several devices that reach one another faster than other hosts.

One step of G devices on each of H hosts:

1. *inside*: each device gets one of G equal parts of its host's mean (reduce-scatter);
2. *between*: the wrapped transformation runs on that part, over the devices that have
   the same place on their hosts;
3. *inside*: the parts are put together again (all-gather).

A host sends one compressed message in place of G: what its network link carries falls
by G. State is of a part only, ``n / G`` entries on each device, as with sharded
parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from . import tree
from .arguments import check_axis_name, check_positive_int
from .base import AxisGroups, PyTree, WorkerLocal
from .exchange import collectives


class HierarchicalState(NamedTuple):
    """State of `hierarchical`."""

    inner: WorkerLocal  # of the wrapped transformation, on this device's part


def hierarchical(
    tx: optax.GradientTransformation,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages densely inside a host, and by ``tx`` between the hosts.

    With updates ``x_hd`` of device d on host h, part d of ``mean_d(x_hd)`` is what
    ``tx`` gets there, a float32 vector of ``ceil(n / G)`` entries, the last part filled
    up with zeros. The mean that comes out is the same on all ``H G`` workers.

    Two named axes, under ``shard_map`` or ``vmap`` in ``vmap``: the fast one is
    ``axis_name`` here, the slow one is that of the reducer in ``tx``. One axis, under
    ``pmap`` or ``shard_map(check_vma=False)``: see `axis_groups`.

    ``tx`` sees one vector and no leaves, so that ``scope="leaf"`` takes the part for
    one leaf, and `low_rank` has no matrix to work on. ``params`` reach it as the same
    part of them, and extra arguments as they are; ``tx.init`` gets zeros of a part's
    size. It may hold the optimizer too, whose moments are then sharded.

    Args:
      tx: a whole transformation, memory included.
      axis_name: the axis of the devices of a host.
      num_workers: size of that axis, G; needed where ``init`` runs outside it, and
        checked against the axis where given. `axis_groups` know it.

    Returns:
      A transformation from one worker's updates to the mean, the same on all workers.
      Which of its state differs between workers `local_leaves` finds out;
      `state_axes` takes all of it for local. `metrics` tells of this device's part.

    Raises:
      TypeError: ``axis_name`` is no name; at ``init``, a leaf is not floating point.
      ValueError: at ``init``, G is not known; at ``update``, a tree that is not like
        the one at ``init``, or another G.

    Example:
      >>> import jax, jaxsparse as js
      >>> between = js.sparse(js.top_k(0.5), js.all_gather(), axis_name="hosts")
      >>> tx = hierarchical(js.error_feedback(between), axis_name="devices")
      >>> step = lambda g: tx.update(g, tx.init(g))[0]
      >>> on_host = jax.vmap(step, axis_name="devices", out_axes=None)
      >>> g = jnp.array([[[4.0, 0, 2, 0], [2.0, 2, 0, 2]]] * 2)  # two hosts of two
      >>> jax.jit(jax.vmap(on_host, axis_name="hosts", out_axes=None))(g)
      Array([3., 0., 1., 0.], dtype=float32)

    References:
      Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision",
      2018 (hierarchical all-reduce).
    """
    check_axis_name("hierarchical(axis_name=...)", axis_name)
    if num_workers is not None:
        check_positive_int("hierarchical(num_workers=...)", num_workers)
    elif isinstance(axis_name, AxisGroups):
        num_workers = axis_name.size
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            "`hierarchical(...)` takes a transformation, such as "
            f"`js.error_feedback(reducer)`, got {type(tx).__name__}."
        )
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> HierarchicalState:
        rows = -(-tree.layout(params).size // _devices(num_workers, axis_name))
        part = jnp.zeros(rows, jnp.float32)
        return HierarchicalState(WorkerLocal(tx.init(part), reshard="inner"))

    def update(updates, state, params=None, **extra_args):
        devices = collectives.check_workers(
            "hierarchical(num_workers=...)", num_workers, axis_name
        )
        collectives.check_local(updates, axis_name)
        tree.check_state(state, init, updates, "hierarchical")
        x, spec = _padded(updates, devices)
        part = collectives.mean_part(x, axis_name) if spec.size else x
        if params is not None:
            params = _part(params, spec, devices, axis_name)
        held = state.inner.value
        mean, inner = tx.update(part, held, params, **extra_args)
        inner = collectives.keep_types(inner, held)
        state = HierarchicalState(WorkerLocal(inner, reshard="inner"))
        if spec.size == 0:
            return tree.zeros(spec), state
        whole = collectives.gather(mean, axis_name).reshape(-1)[: spec.size]
        return tree.unflatten(whole, spec), state

    return optax.GradientTransformationExtraArgs(init, update)


def axis_groups(
    axis_name: str, *, num_workers: int, group_size: int
) -> tuple[AxisGroups, AxisGroups]:
    """One mapped axis as two: the devices of a host, and those of one place.

    For ``pmap``, which maps one axis, and for ``shard_map(check_vma=False)``; JAX has
    no groups under ``vmap`` and ``check_vma=True``. Workers ``h G .. h G + G - 1`` are
    host h, as ``pmap`` lays them out over processes. Every method takes a group in
    place of an axis name.

    Args:
      axis_name: name of the mapped axis.
      num_workers: its size.
      group_size: devices of a host, G, as ``jax.local_device_count()``.

    Returns:
      * the groups of a host's devices, for ``hierarchical(axis_name=...)``;
      * those of devices with the same place on all hosts, for the reducer inside.

    Raises:
      ValueError: ``num_workers`` is no multiple of ``group_size``.

    Example:
      >>> import jaxsparse as js
      >>> inside, between = axis_groups("workers", num_workers=8, group_size=4)
      >>> print(inside.members, between.members)
      [[0, 1, 2, 3], [4, 5, 6, 7]] [[0, 4], [1, 5], [2, 6], [3, 7]]
      >>> reducer = js.sparse(js.top_k(0.01), js.all_gather(), axis_name=between)
      >>> tx = js.hierarchical(js.error_feedback(reducer), axis_name=inside)
    """
    if not isinstance(axis_name, str) or not axis_name:
        raise TypeError(f"`axis_groups(axis_name=...)` must be a name: {axis_name!r}.")
    check_positive_int("axis_groups(num_workers=...)", num_workers)
    check_positive_int("axis_groups(group_size=...)", group_size)
    if num_workers % group_size:
        raise ValueError(
            f"`axis_groups(num_workers=...)` must be a multiple of group_size="
            f"{group_size}, got {num_workers}: hosts have equally many devices."
        )
    return (
        AxisGroups(axis_name, num_workers, group_size, stride=1),
        AxisGroups(axis_name, num_workers, num_workers // group_size, group_size),
    )


def _devices(num_workers: int | None, axis_name: collectives.AxisName) -> int:
    if num_workers is not None:
        return num_workers
    try:
        return collectives.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            "`hierarchical(num_workers=...)` is needed where `init` runs outside the "
            f"mapped axis {axis_name!r}: each device's state is of one part in so many."
        ) from error


def _padded(updates: PyTree, devices: int) -> tuple[Array, tree.Layout]:
    x, spec = tree.flatten(updates)
    return jnp.pad(x, (0, -spec.size % devices)), spec


def _part(
    params: PyTree, spec: tree.Layout, devices: int, axis_name: collectives.AxisName
) -> Array:
    """This device's part of the parameters."""
    x, found = _padded(params, devices)
    if found.shapes != spec.shapes:
        raise ValueError(
            "`params` of `hierarchical` do not match the updates: their leaves have "
            f"shapes {found.shapes}, those of the updates {spec.shapes}."
        )
    return x.reshape(devices, -1)[collectives.worker(axis_name)]
