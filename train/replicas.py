"""Replicas: what the workers share must be the same on all of them, bit for bit.

Nothing compares the copies while a run goes on: one bit that a device gets wrong, or an
operation that rounds differently on one host, would part the models for good.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxsparse as js
from jaxsparse import tree
from train.errors import RunError
from train.parallel import Workers

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Replicas:
    """Compares the copies of the shared state from time to time."""

    def __init__(self, workers: Workers, is_local: Any, every: int):
        """Compiles nothing yet.

        Args:
          workers: that have the copies.
          is_local: the tree of bools that the state was split by.
          every: so many steps; 0 for never.
        """
        self._every = every if workers.num_workers > 1 else 0
        self._rows = workers.map_look(
            lambda state: checksums(js.split(state, is_local)[0])
        )

    def due(self, step: int) -> bool:
        """Whether to check after this step."""
        return self._every > 0 and step % self._every == 0

    def check(self, step: int, shared: Any, local: Any) -> None:
        """Reads every worker's copy once; a checksum of each leaf goes to the host.

        Raises:
          RunError: copies differ; in all processes alike.
        """
        found = differing(self._rows(shared, local), shared)
        if found:
            raise RunError(
                f"stopped at step {step}: the copies of what all workers share are no "
                f"longer the same. {found}. A device or its memory may be failing, or "
                "rounds otherwise than the others. This state is not saved; the same "
                "command goes on from the last checkpoint."
            )


def checksums(state: Any) -> Array:
    """Of each leaf the bits, as words ``w``: ``sum f(w_i + 0x9E3779B9 i)`` mod 2**32.

    ``f`` is the end of MurmurHash3, which is one to one: a change of one word always
    changes the sum, any other change does but once in 2**32.

    Returns:
      uint32[leaves].

    References:
      Appleby, "MurmurHash3", 2011.
    """
    return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(state)])


def _checksum(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])
    words = bits.astype(jnp.uint32).reshape(-1)
    words += lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return jnp.sum(words, dtype=jnp.uint32)


def differing(rows: np.ndarray, state: Any) -> str:
    """The first leaf that is not the same on all workers, in words; "" if none is.

    Args:
      rows: uint32[workers, leaves], the checksums.
      state: whose leaves these are.

    Example:
      >>> differing(np.array([[5, 1], [5, 1], [5, 2]]), {"a": 0.0, "b": 0.0})
      'b of worker 2 is not that of workers 0, 1 (1 of 2 leaves differ)'
    """
    differ = (rows != rows[0]).any(axis=0)
    if not differ.any():
        return ""
    leaf = int(differ.argmax())
    path, _ = jax.tree_util.tree_leaves_with_path(state)[leaf]
    alike = (rows[:, leaf] == rows[:, leaf, None]).sum(axis=1)
    most = rows[:, leaf] == rows[alike.argmax(), leaf]  # the first worker's of a tie
    return (
        f"{tree.name(path)} of {_listed(~most)} is not that of {_listed(most)} "
        f"({differ.sum()} of {differ.size} leaves differ)"
    )


def _listed(chosen: np.ndarray) -> str:
    numbers = [str(i) for i in np.flatnonzero(chosen)]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
