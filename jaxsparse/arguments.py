"""Checks of constructor arguments: early, in call syntax, with the remedy."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax

from .base import AxisGroups


def check_density(call: str, density: Any) -> float:
    """A fraction in (0, 1], as a float.

    Raises:
      TypeError: not a Python number (an array, a string, ...).
      ValueError: outside (0, 1], or NaN.
    """
    if isinstance(density, jax.Array):
        raise TypeError(
            f"`{call}` must be a Python number, got the array {density}: shapes "
            "depend on it. Under `optax.inject_hyperparams` name it in `static_args`."
        )
    if isinstance(density, bool) or not isinstance(density, numbers.Real):
        raise TypeError(f"`{call}` must be a number in (0, 1], got {density!r}.")
    if not 0 < float(density) <= 1:
        raise ValueError(
            f"`{call}` must lie in (0, 1], got {density}. It is the fraction of "
            "entries kept: pass 0.01 for one per cent."
        )
    return float(density)


def check_positive_int(call: str, value: Any, minimum: int = 1) -> int:
    """A Python int of at least ``minimum``.

    Raises:
      ValueError: anything else.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or int(value) < minimum
    ):
        raise ValueError(
            f"`{call}` must be a whole number of at least {minimum}, got {value!r}."
        )
    return int(value)


def check_number(
    call: str,
    value: Any,
    must: str,
    good: Callable[[float], bool],
    *,
    static: bool = False,
) -> None:
    """A number that is ``good``; arrays pass: traced ones cannot be looked at.

    Args:
      call: the argument in call syntax.
      value: what was given.
      must: what it must do, as in "be positive".
      good: whether a number does; False for NaN.
      static: shapes depend on it, so that arrays do not pass.

    Raises:
      TypeError: neither a number nor an array that may pass.
      ValueError: a number that is not good.
    """
    if isinstance(value, jax.Array):
        if static:
            raise TypeError(
                f"`{call}` must be a Python number, got the array {value}: shapes "
                "depend on it."
            )
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{call}` must be a number, got {value!r}.")
    if not good(float(value)):
        raise ValueError(f"`{call}` must {must}, got {value}.")


def check_fraction(call: str, value: Any, *, static: bool = False) -> None:
    """A number in [0, 1]; see `check_number`."""
    check_number(call, value, "lie in [0, 1]", lambda x: 0 <= x <= 1, static=static)


def check_axis_name(call: str, axis_name: Any) -> None:
    """The name of a mapped axis, a tuple of names, or an axis by groups.

    Raises:
      TypeError: anything else.
    """
    if isinstance(axis_name, AxisGroups):
        return
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"`{call}` must name the mapped axis, as in `jax.pmap(step, "
            f"axis_name='workers')`, got {axis_name!r}."
        )


def entries(density: float, n: int) -> int:
    """``k = ceil(density * n)``, in exact decimal arithmetic, at least 1 if n > 0.

    Rounding up keeps ``k / n >= density``, so the contraction bound holds.

    >>> entries(0.01, 300), entries(0.07, 100), entries(1e-6, 10), entries(0.5, 0)
    (3, 7, 1, 0)
    """
    return min(n, math.ceil(Fraction(repr(density)) * n))
