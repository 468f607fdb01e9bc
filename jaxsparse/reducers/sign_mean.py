"""One bit an entry: the sign, and the mean magnitude of each leaf.

Worker i sends ``C_i = (||x_i||_1 / n) sign(x_i)`` leaf by leaf, as n bits and one
float32 a leaf, in one message; ``mean = sum_i C_i / N`` and ``left_i = x_i - C_i``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .. import tree
from ..arguments import check_axis_name
from ..base import PyTree, Reducer
from ..bits import pack, unpack
from ..exchange import collectives


def sign_mean(*, axis_name: collectives.AxisName) -> Reducer:
    """Averages signs scaled by the mean magnitude of their leaf.

    One all-gather of ``4 (ceil(n / 32) + leaves)`` bytes. Zero counts as positive.

    Args:
      axis_name: name of the mapped axis.

    Returns:
      A `Reducer` without state; biased, so it wants `error_feedback`.

    Raises:
      TypeError: ``axis_name`` is no name, or a leaf is not floating point.

    Example:
      >>> import jax
      >>> reducer = sign_mean(axis_name="w")
      >>> x = jnp.array([[1.0, -3.0], [2.0, 2.0]])
      >>> jax.vmap(lambda x: reducer.reduce(x, ())[0], axis_name="w", out_axes=None)(x)
      Array([2., 0.], dtype=float32)

    References:
      Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other
      Gradient Compression Schemes", 2019.
    """
    check_axis_name("sign_mean(axis_name=...)", axis_name)

    def init(params: PyTree) -> PyTree:
        tree.check_size(tree.layout(params))
        return ()

    def reduce(updates: PyTree, state: PyTree):
        workers = collectives.axis_size(axis_name)
        collectives.check_local(updates, axis_name)
        x, spec = tree.flatten(updates)
        if spec.size == 0:
            return tree.zeros(spec), updates, state
        tree.check_size(spec)
        scales = _scales(x, spec.sizes)
        words = pack((x >= 0).astype(jnp.uint32), 1)
        message = jnp.concatenate([words, lax.bitcast_convert_type(scales, jnp.uint32)])

        def decode(message: Array) -> Array:
            positive = unpack(message[: words.shape[0]], spec.size, 1) == 1
            scales = lax.bitcast_convert_type(message[words.shape[0] :], jnp.float32)
            magnitude = _per_entry(scales, spec.sizes)
            return jnp.where(positive, magnitude, -magnitude)

        messages = collectives.gather(message, axis_name)
        mean, _ = lax.scan(
            lambda total, message: (total + decode(message) / workers, None),
            collectives.vary_like(jnp.zeros(spec.size, jnp.float32), messages),
            messages,
        )
        left = x - decode(message)
        return tree.unflatten(mean, spec), tree.unflatten(left, spec), state

    return Reducer(init, reduce)


def _scales(x: Array, sizes: tuple[int, ...]) -> Array:
    """Mean magnitude of each leaf; divides before adding, so it cannot overflow."""
    parts, start = [], 0
    for size in sizes:
        parts.append(jnp.sum(jnp.abs(x[start : start + size]) / max(size, 1)))
        start += size
    return jnp.stack(parts)


def _per_entry(scales: Array, sizes: tuple[int, ...]) -> Array:
    return jnp.concatenate([jnp.full(size, scales[i]) for i, size in enumerate(sizes)])
