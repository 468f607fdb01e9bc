"""Bad numbers: a step that is bad on one worker is skipped by all of them together."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from .arguments import check_axis_name
from .base import PyTree
from .exchange import collectives


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`, the same on all workers but for ``inner``."""

    skipped: Array  # shape=(), dtype=int32; steps skipped so far
    consecutive: Array  # shape=(), dtype=int32; steps skipped in a row
    inner: PyTree


def skip_nonfinite(
    tx: optax.GradientTransformation, *, axis_name: collectives.AxisName
) -> optax.GradientTransformationExtraArgs:
    """Skips a step, on all workers together, when any gradient is NaN or infinite.

    Wrap the whole chain: a skipped step leaves parameters, moments and memories bit for
    bit as they were, only the counters move. The workers agree by one scalar.
    ``optax.apply_if_finite`` decides on each worker alone and must not be used around a
    collective: one worker skips, the others wait.

    Args:
      tx: the whole chain, collectives included.
      axis_name: name of the mapped axis.

    Returns:
      A transformation like ``tx``.

    Raises:
      TypeError: ``axis_name`` is no name.

    Example:
      >>> import jaxsparse as js
      >>> tx = skip_nonfinite(js.stateless(js.dense(axis_name="w")), axis_name="w")
      >>> step = lambda g: tx.update(g, tx.init(g))
      >>> updates, state = jax.vmap(step, axis_name="w", out_axes=(0, None))(
      ...     jnp.array([[1.0, 2.0], [jnp.nan, 1.0]]))
      >>> print(updates[0], state.skipped)
      [0. 0.] 1
    """
    check_axis_name("skip_nonfinite(axis_name=...)", axis_name)
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> SkipNonfiniteState:
        zero = lambda: jnp.zeros((), jnp.int32)  # noqa: E731
        return SkipNonfiniteState(zero(), zero(), tx.init(params))

    def update(updates, state, params=None, **extra_args):
        collectives.axis_size(axis_name)
        finite = jnp.array(True)
        for leaf in jax.tree.leaves(updates):
            finite &= jnp.all(jnp.isfinite(leaf))
        finite = collectives.agree(finite, axis_name)

        # Traced once for both branches, and no function of its own in the program.
        @functools.partial(jax.jit, inline=True)
        def take(updates, inner):
            return tx.update(updates, inner, params, **extra_args)

        def skip(updates, inner):
            out = jax.eval_shape(take, updates, inner)[0]
            return jax.tree.map(collectives.zeros, out), inner

        with jax.named_scope("finite"):
            updates, inner = lax.cond(finite, take, skip, updates, state.inner)
        skipped = jnp.where(finite, state.skipped, state.skipped + 1)
        consecutive = jnp.where(finite, 0, state.consecutive + 1)
        return updates, SkipNonfiniteState(skipped, consecutive, inner)

    return optax.GradientTransformationExtraArgs(init, update)
