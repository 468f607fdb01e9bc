"""How large a union is, and up to which one a server is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from ..arguments import check_positive_int
from . import programs
from .steps import Step, check


def equal_union(
    num_workers: int,
    k: float,
    reading: Literal["central", "sharded", "receive"] = "sharded",
) -> float:
    """The union at which a server costs what the decentralised model costs, in entries.

    Below it the server wins. "Two models with the same cost" can be read in three ways:

    * ``"central"``: total traffic, one server.
      ``N (k + u) = N (N - 1) k``, so ``u = (N - 2) k``.
    * ``"sharded"``, the default, for that is what the library builds: total traffic,
      or a worker's link, with the server's role shared by the workers.
      ``(N - 1) (k + u) = N (N - 1) k``, so ``u = (N - 1) k``.
    * ``"receive"``: what a worker receives, if the server does not send back what this
      worker alone has chosen. Without overlap that is ``u - k = (N - 1) k``, so
      ``u = N k``, the largest union there is: the models cost the same without overlap,
      and for N > 2 any overlap makes the server cheaper. It fits the argument of the
      thesis best, and leaves the way up out of account.

    A result below k says that the server never wins: no union is smaller than k.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      reading: as above.

    Raises:
      ValueError: an argument out of its range.

    >>> [equal_union(8, 1000, r) for r in ("central", "sharded", "receive")]
    [6000, 7000, 8000]
    """
    check_positive_int("equal_union(num_workers=...)", num_workers)
    factors = {"central": -2, "sharded": -1, "receive": 0}
    if reading not in factors:
        raise ValueError(
            f"`equal_union(reading=...)` must be one of {list(factors)}, got "
            f"{reading!r}."
        )
    return (num_workers + factors[reading]) * k


def union_bounds(num_workers: int, k: float, n: float) -> tuple[float, float]:
    """The least and the most entries in a union of N selections of k.

    >>> union_bounds(8, 1000, 5000)
    (1000, 5000)
    """
    check("union_bounds", num_workers, k, n)
    return k, min(num_workers * k, n)


def expected_union(num_workers: int, k: float, n: float) -> float:
    """Union of N independent selections, uniformly random: ``n (1 - (1 - k/n)**N)``.

    Selections of gradients overlap more: this is what a union is to be compared with.

    >>> expected_union(2, 5, 10)
    7.5
    """
    check("expected_union", num_workers, k, n)
    if k >= n:
        return n
    return -n * math.expm1(num_workers * math.log1p(-k / n))


def server_wins_up_to(
    num_workers: int,
    k: int,
    n: int,
    *,
    cost: Callable[[Step], float] = lambda step: step.link,
    server: Callable[[int, int, int, int], Step] = programs.server,
    other: Callable[[int, int, int], Step] = programs.all_gather,
) -> int:
    """The largest union at which a server costs less than what does without.

    In entries, `equal_union` answers that by a formula; here the coding of indices,
    padding and time count too. The answer is for a union spread at random over the
    owners: see `programs.expected_busiest`.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      n: parameters.
      cost: what is compared; bytes of a worker's link by default. For time:
        ``lambda step: seconds(step, bits_per_second=1e9, latency_seconds=1e-4)``.
      server: ``(N, k, u, n) -> Step``; by default the library's, in bfloat16. Options
        go in by ``functools.partial``.
      other: ``(N, k, n) -> Step``; by default the library's `all_gather`.

    Returns:
      Entries; 0 where the server does not win even if all workers choose the same.

    Raises:
      ValueError: an argument out of its range.

    >>> [server_wins_up_to(N, 1000, 1_000_000) for N in (2, 3, 4, 8, 16)]
    [0, 1889, 2775, 6863, 15656]
    """
    least, most = (math.ceil(bound) for bound in union_bounds(num_workers, k, n))
    without = cost(other(num_workers, k, n))
    if not cost(server(num_workers, k, least, n)) < without:
        return 0
    while least < most:  # the cost rises with the union
        middle = (least + most + 1) // 2
        if cost(server(num_workers, k, middle, n)) < without:
            least = middle
        else:
            most = middle - 1
    return least
