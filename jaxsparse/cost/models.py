"""Models of communication: what N workers move in a step, and how long it takes.

N workers send k entries each; u entries are in their union. What a worker's link
carries one way, in entries:

=============  ==============================  =====================
model          a worker's link                 the server's link
=============  ==============================  =====================
decentralised  (N - 1) k                       none
central        k up, u down                    N k in, N u out
sharded        (N - 1) (k + u) / N             none
dense          2 (N - 1) / N n                 none
=============  ==============================  =====================

The decentralised cost knows nothing of the overlap of the selections, the server's is
linear in the union: with workers that choose alike, the server wins.

References:
  Wang, Liu, Wu, "Communication Usage Optimization of Gradient Sparsification with
  Aggregation", 2018: the decentralised and the central model. Its formulas are not
  public; these are our own derivation.
"""

from __future__ import annotations

from .sizes import Size, coded_bytes
from .steps import Step, Transfer, check, deal, gather, reduce


def decentralised(
    num_workers: int, k: float, n: float, size: Size = coded_bytes
) -> Step:
    """Every message to every worker, relayed on a ring: ``(N - 1) size(k)`` per link.

    Args:
      num_workers: N.
      k: entries that each worker selects; may be a mean.
      n: parameters.
      size: of a message, from ``sizes.py``. Options go in by ``functools.partial``.

    Raises:
      ValueError: an argument out of its range.

    >>> decentralised(8, 1000, 1_000_000).link
    24500
    """
    check("decentralised", num_workers, k, n)
    return Step(num_workers, (gather(num_workers, size(k, n)),))


def central(
    num_workers: int, k: float, union: float, n: float, size: Size = coded_bytes
) -> Step:
    """One server: ``size(k)`` up from each worker, ``size(u)`` down to each.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      union: u, entries that come down; with a limit at the server, what it lets pass.
      n: parameters.
      size: of a message, from ``sizes.py``.

    Raises:
      ValueError: an argument out of its range.

    >>> from jaxsparse.cost import entries
    >>> step = central(8, 1000, 4000, 1_000_000, entries)
    >>> step.up, step.down, step.server_link, step.total
    (1000, 4000, 40000, 40000)
    """
    check("central", num_workers, k, n, union)
    up, down = size(k, n), size(union, n)
    return Step(
        num_workers,
        (
            Transfer(up, 0, up, num_workers * up),
            Transfer(0, down, down, num_workers * down),
        ),
    )


def sharded(
    num_workers: int, k: float, union: float, n: float, size: Size = coded_bytes
) -> Step:
    """The server's role shared by the workers, each for n / N entries; no padding.

    Up: N - 1 parts of ``size(k / N)``; down: N - 1 times ``size(u / N)``. What the
    library's `server` pads and adds to this, ``programs.py`` has.

    Args:
      num_workers: N.
      k: entries that each worker selects.
      union: u, entries that come down.
      n: parameters.
      size: of a message, from ``sizes.py``.

    Raises:
      ValueError: an argument out of its range.

    >>> from jaxsparse.cost import entries
    >>> sharded(8, 1000, 4000, 1_000_000, entries).link
    4375.0
    """
    check("sharded", num_workers, k, n, union)
    rows = n / num_workers
    part, down = size(k / num_workers, rows), size(union / num_workers, rows)
    return Step(num_workers, (deal(num_workers, part), gather(num_workers, down)))


def dense(num_workers: int, n: int, bytes_per_entry: float = 4) -> Step:
    """Ring all-reduce of all parameters: ``2 (N - 1) / N`` times their bytes.

    >>> dense(8, 1_000_000).link
    7000000
    """
    check("dense", num_workers, n, n)
    return Step(num_workers, (reduce(num_workers, bytes_per_entry * n),))
