"""Sparse averaging: a selection, a codec and an exchange make a reducer."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp

from .. import tree
from ..arguments import check_axis_name, check_positive_int
from ..base import (
    Exchange,
    ExchangeMetrics,
    PyTree,
    Reducer,
    Selected,
    Selection,
    WorkerLocal,
)
from ..codec import Codec, bfloat16
from ..exchange import collectives
from ..scope import per_leaf


class SparseState(NamedTuple):
    """State of `sparse`."""

    selection: PyTree
    exchange: PyTree
    metrics: ExchangeMetrics  # of the latest step


def sparse(
    selection: Selection,
    exchange: Exchange,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None = None,
    codec: Codec | None = None,
    scope: Literal["global", "leaf"] = "global",
) -> Reducer:
    """Averages what every worker selects; the rest, and what the codec lost, is left.

    With ``C_i`` the selected entries of worker i's updates ``x_i`` after coding,
    ``mean = sum_i C_i / N`` and ``left_i = x_i - C_i``.

    Args:
      selection: which entries, as `top_k(0.01)`.
      exchange: over which collective, as `all_gather()`.
      axis_name: name of the mapped axis.
      num_workers: size of that axis; needed where ``init`` runs outside it and the
        exchange's state depends on it, and checked against the axis where given.
      codec: how values are written, as `codec.int8()`; bfloat16 by default. The loss
        stays in ``left``.
      scope: ``"global"`` selects over all leaves together, ``"leaf"`` in every leaf.

    Returns:
      A `Reducer` on trees of floating-point arrays, which are exchanged at float32
      precision at most.

    Raises:
      ValueError, TypeError: an argument out of its range; at ``init`` a tree with
        leaves that are not floating point, or with more than ``2**31 - 2`` entries;
        at ``reduce`` a tree that is not like the one at ``init``.

    Example:
      >>> import jax, jaxsparse as js
      >>> reducer = js.sparse(js.top_k(0.25), js.all_gather(), axis_name="w")
      >>> x = {"a": jnp.array([[1.0, 5.0], [4.0, 2.0]]), "b": jnp.zeros((2, 2))}
      >>> mean, left = jax.vmap(lambda x: reducer.reduce(x, reducer.init(x))[:2],
      ...                       axis_name="w", out_axes=(None, 0))(x)
      >>> print(mean["a"], left["a"][0])
      [2.  2.5] [1. 0.]
    """
    check_axis_name("sparse(axis_name=...)", axis_name)
    if scope not in ("global", "leaf"):
        raise ValueError(
            f"`sparse(scope=...)` must be 'global' or 'leaf', got {scope!r}."
        )
    for argument, given, kind, call in (
        ("selection", selection, Selection, "js.top_k(0.01)"),
        ("exchange", exchange, Exchange, "js.all_gather()"),
        ("codec", codec, (Codec, type(None)), "js.codec.bfloat16()"),
    ):
        if not isinstance(given, kind):
            raise TypeError(
                f"`sparse({argument}=...)` must be made by a call such as `{call}`, "
                f"got {given!r}."
            )
    if num_workers is not None:
        check_positive_int("sparse(num_workers=...)", num_workers)
    codec = bfloat16() if codec is None else codec

    def scoped(spec: tree.Layout) -> Selection:
        return per_leaf(selection, spec.sizes) if scope == "leaf" else selection

    def init(params: PyTree) -> SparseState:
        spec = tree.layout(params)
        tree.check_size(spec)
        chosen = scoped(spec)
        return SparseState(
            selection=chosen.init(spec.size),
            exchange=exchange.init(spec.size, chosen.count(spec.size), num_workers),
            metrics=no_metrics(),
        )

    def reduce(updates: PyTree, state: SparseState):
        collectives.check_workers("sparse(num_workers=...)", num_workers, axis_name)
        if selection.workers:
            collectives.check_workers(*selection.workers, axis_name)
        collectives.check_local(updates, axis_name)
        spec = tree.layout(updates)
        if spec.size == 0:
            return tree.zeros(spec), updates, state
        tree.check_size(spec)
        tree.check_state(state, init, updates, "sparse")
        x, _ = tree.flatten(updates)
        chosen = scoped(spec)
        indices, overflow = chosen.select(x, state.selection)
        mean, left, exchanged, metrics = exchange.send(
            x,
            Selected(indices, overflow, chosen.agreed),
            state.exchange,
            axis_name,
            codec,
        )
        observed = chosen.observe(state.selection, mean, x - left)
        after = SparseState(observed, exchanged, metrics)
        return (
            tree.unflatten(mean, spec),
            tree.unflatten(left, spec),
            collectives.keep_types(after, state),
        )

    return Reducer(init, reduce)


def no_metrics() -> ExchangeMetrics:
    """Metrics before the first exchange; distinct buffers, as donation wants."""
    return ExchangeMetrics(
        selected=jnp.zeros((), jnp.float32),
        aggregated=jnp.zeros((), jnp.int32),
        overlap=jnp.zeros((), jnp.float32),
        common=jnp.zeros((), jnp.float32),
        overflow=jnp.zeros((), jnp.float32),
        rung=jnp.zeros((), jnp.int32),
        sent_norm=WorkerLocal(jnp.zeros((), jnp.float32)),
    )
