"""Priorities: how the entries of a vector are scored before the largest are chosen."""

from __future__ import annotations

import jax.numpy as jnp

from .base import Priority


def magnitude() -> Priority:
    """Scores every entry by its magnitude, ``q = |x|``: plain top-k."""
    return Priority(
        init=lambda n: (),
        score=lambda state, x: jnp.abs(x),
        observe=lambda state, mean: state,
    )
