"""Which leaves are compressed and which stay dense: labels for ``optax.partition``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .tree import name


def label_leaves(
    *,
    dense: Sequence[str] = (),
    min_size: int = 0,
    min_ndim: int = 0,
) -> Callable[[Any], Any]:
    """Labels each leaf ``"dense"`` or ``"sparse"``, by its path, size and dimensions.

    Args:
      dense: regular expressions; a leaf whose path (``params/Conv_0/kernel``) contains
        a match stays dense.
      min_size: leaves of fewer entries stay dense.
      min_ndim: leaves of fewer dimensions stay dense; 2 keeps biases and norms, as
        DGC does.

    Returns:
      A function from a tree to a tree of labels, for ``optax.partition``.

    Raises:
      TypeError: ``dense`` is one string, not a sequence of them.
      ValueError: a pattern is no regular expression; when called, a pattern that
        matches no leaf, which is most often a typing error.

    Example:
      >>> labels = label_leaves(dense=["head"], min_ndim=2)
      >>> labels({"body": jnp.ones((3, 3)), "bias": jnp.ones(3),
      ...         "head": jnp.ones((3, 2))})
      {'bias': 'dense', 'body': 'sparse', 'head': 'dense'}

      >>> import optax, jaxsparse as js
      >>> reducer = js.sparse(js.top_k(0.01), js.all_gather(), axis_name="w")
      >>> tx = optax.partition({
      ...     "sparse": js.error_feedback(reducer),
      ...     "dense": js.stateless(js.dense(axis_name="w")),
      ... }, labels)
    """
    patterns = compiled("label_leaves(dense=...)", dense)

    def labels(params: Any) -> Any:
        check_found("label_leaves(dense=...)", patterns, params)

        def label(path, leaf):
            small = jnp.size(leaf) < min_size or jnp.ndim(leaf) < min_ndim
            matched = any(pattern.search(name(path)) for pattern in patterns)
            return "dense" if small or matched else "sparse"

        return jax.tree_util.tree_map_with_path(label, params)

    return labels


def compiled(argument: str, patterns: Sequence[str]) -> list[re.Pattern]:
    """Regular expressions, ready for use.

    Raises:
      TypeError: one string, not a sequence of them.
      ValueError: a pattern is no regular expression.
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"`{argument}` takes a list of patterns, got {patterns!r}: "
            f"write [{patterns!r}]."
        )
    found = []
    for pattern in patterns:
        try:
            found.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(
                f"`{argument}`: {pattern!r} is no regular expression: {error}."
            ) from error
    return found


def check_found(argument: str, patterns: Sequence[re.Pattern], params: Any) -> None:
    """Refuses a pattern that matches no leaf: most often a typing error.

    A tree without leaves passes: `optax.tree.map_params` asks for the state of one.

    Raises:
      ValueError: names the pattern and lists the leaves' paths.
    """
    paths = [name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if paths and not any(pattern.search(path) for path in paths):
            raise ValueError(
                f"`{argument}`: {pattern.pattern!r} matches no leaf. The leaves are: "
                f"{', '.join(paths)}."
            )
