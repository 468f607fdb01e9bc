"""Which layers stay dense, which get top-k only and which are encoded, as labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..labels import check_found, compiled
from ..tree import name


def layers(
    *, dense: Sequence[str] = (), top_k: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Labels each leaf ``"dense"``, ``"top_k"`` or ``"encoded"``, by its path.

    As in the paper: the first layer is averaged densely, the last one by top-k alone,
    and what is between is encoded. The first pattern that matches decides, those of
    ``dense`` before those of ``top_k``; a leaf that none matches is encoded.

    Args:
      dense: regular expressions; a match in a leaf's path (``Conv_0/kernel``) will do.
      top_k: the same.

    Returns:
      A function from a tree to a tree of labels, for ``optax.partition``.

    Raises:
      TypeError: an argument is one string, not a sequence of them.
      ValueError: a pattern is no regular expression; when called, a pattern that
        matches no leaf (lists the leaves' paths).

    Example:
      >>> import jax.numpy as jnp
      >>> labels = layers(dense=["^Conv_0/", "bias"], top_k=["^head/"])
      >>> labels({"Conv_0": {"kernel": 1.0}, "Conv_1": {"bias": 1.0, "kernel": 1.0},
      ...         "head": {"bias": 1.0, "kernel": 1.0}})
      {'Conv_0': {'kernel': 'dense'},
       'Conv_1': {'bias': 'dense', 'kernel': 'encoded'},
       'head': {'bias': 'dense', 'kernel': 'top_k'}}

      >>> import optax, jaxsparse as js
      >>> top_k = js.sparse(js.top_k(0.01), js.all_gather(), axis_name="w")
      >>> tx = optax.partition({
      ...     "dense": js.stateless(js.dense(axis_name="w")),
      ...     "top_k": js.error_feedback(top_k),
      ...     "encoded": js.error_feedback(js.lgc_server(0.01, axis_name="w")),
      ... }, labels)
    """
    patterns = {
        "dense": compiled("layers(dense=...)", dense),
        "top_k": compiled("layers(top_k=...)", top_k),
    }

    def labels(params: Any) -> Any:
        for label, given in patterns.items():
            check_found(f"layers({label}=...)", given, params)

        def label_of(path, leaf):
            del leaf
            for label, given in patterns.items():
                if any(pattern.search(name(path)) for pattern in given):
                    return label
            return "encoded"

        return jax.tree_util.tree_map_with_path(label_of, params)

    return labels
