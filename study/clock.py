"""How long a call takes on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def median_seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a call and its result's arrival; half as many calls warm up."""
    taken = []
    for _ in range(repeats + repeats // 2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[-repeats:])
