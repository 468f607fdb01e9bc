"""A run whose steps are skipped one after another stops, and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsparse import tree
from train.errors import RunError

UNKNOWN = -1


class Skips:
    """Counts steps skipped in a row, and ends the run when there are too many.

    The state does not move while steps are skipped. So the gradients of the first of
    them can be made again, and to know whose were bad costs a normal step nothing.
    """

    def __init__(self, limit: int, start: int, look: Callable[[int], str]):
        """Counts nothing yet.

        Args:
          limit: so many skipped steps in a row end the run; 0 for never.
          start: the step that the run goes on from.
          look: ``step -> words``: whose gradient is not finite, at the present state.
        """
        self._limit, self._start, self._look = limit, start, look
        self._in_a_row = UNKNOWN  # what a checkpoint brings is told by the first step

    @property
    def may_end(self) -> bool:
        """Whether the next step may be the last: the state must not move after it."""
        if self._limit == 0:
            return False
        return self._in_a_row == UNKNOWN or self._in_a_row + 1 >= self._limit

    def add(self, step: int, in_a_row: int) -> None:
        """Notes a step; no later one may have begun if `may_end`.

        Args:
          step: its number, from 1.
          in_a_row: steps skipped in a row, this one the latest; 0 if it was taken.

        Raises:
          RunError: as many as the limit, in all processes alike.
        """
        self._in_a_row = in_a_row
        if self._limit == 0 or in_a_row < self._limit:
            return
        first = max(step - in_a_row, self._start) + 1
        raise RunError(
            f"stopped at step {step}: of the latest {in_a_row} steps each had a "
            "gradient that is not finite, and was skipped "
            f"(config.max_consecutive_skips={self._limit}). "
            f"In step {first} {self._look(first)}. The last checkpoint stays. Lower "
            "config.learning_rate.peak, or look at that worker's examples; "
            "--config.max_consecutive_skips=0 goes on whatever comes."
        )


def first_bad(finite: np.ndarray, params: Any) -> str:
    """Where gradients are bad, in words: the first worker and its first leaf.

    Args:
      finite: bool[workers, leaves].
      params: whose leaves these are.

    Example:
      >>> finite = np.array([[True, True], [True, False]])
      >>> first_bad(finite, {"a": 0.0, "b": 0.0})
      "worker 1's gradient of b was not finite (1 of 2 leaves there, 1 of 2 workers)"
    """
    bad = ~finite
    if not bad.any():
        return "all gradients are finite when they are made again"
    worker = int(bad.any(axis=1).argmax())
    path, _ = jax.tree_util.tree_leaves_with_path(params)[bad[worker].argmax()]
    return (
        f"worker {worker}'s gradient of {tree.name(path)} was not finite "
        f"({bad[worker].sum()} of {bad.shape[1]} leaves there, "
        f"{bad.any(axis=1).sum()} of {len(bad)} workers)"
    )
