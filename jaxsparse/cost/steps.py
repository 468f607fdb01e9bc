"""A step as its transfers, and the time they take."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arguments import check_number, check_positive_int


class Transfer(NamedTuple):
    """One transfer of a step: what each worker says and hears, what links carry.

    Attributes:
      up: payload; what a worker has to say.
      down: payload; what a worker has to hear.
      link: what a worker's link carries, in its busier direction.
      server_link: what a central server's link carries, in its busier direction.
    """

    up: float
    down: float
    link: float
    server_link: float = 0


class Step(NamedTuple):
    """The transfers of a step, one after the other. Payload and link do not add up.

    All quantities are in the unit of the model's ``size``: bytes, or entries.
    """

    num_workers: int
    transfers: tuple[Transfer, ...]

    @property
    def up(self) -> float:
        """Payload of one worker; see `Transfer`."""
        return sum(transfer.up for transfer in self.transfers)

    @property
    def down(self) -> float:
        """Payload of one worker; see `Transfer`."""
        return sum(transfer.down for transfer in self.transfers)

    @property
    def link(self) -> float:
        """What one worker's link carries; see `Transfer`."""
        return sum(transfer.link for transfer in self.transfers)

    @property
    def server_link(self) -> float:
        """What the server's link carries, in and out."""
        return sum(transfer.server_link for transfer in self.transfers)

    @property
    def total(self) -> float:
        """What all workers' links carry: the traffic of the whole step."""
        return self.num_workers * self.link


def seconds(
    step: Step,
    *,
    bits_per_second: float,
    server_bits_per_second: float | None = None,
    latency_seconds: float = 0,
    compute_seconds: float = 0,
    select_seconds: float = 0,
) -> float:
    """Time of one step, whose parts follow one another.

    ``T = T_compute + T_select + sum over transfers of (max(link / rate, server_link /
    server_rate) + latency)``. Links carry their rate both ways at once.

    Args:
      step: in bytes.
      bits_per_second: rate of a worker's link.
      server_bits_per_second: rate of a central server's link; by default a worker's.
      latency_seconds: per transfer; a ring over many hops has a larger one.
      compute_seconds: gradients of one step.
      select_seconds: selection, coding and decoding.

    Raises:
      ValueError, TypeError: a rate that is not positive.

    >>> step = Step(8, (Transfer(2500, 0, 2500, server_link=20_000),))
    >>> seconds(step, bits_per_second=1e9)  # the server's 160 000 bits
    0.00016
    """
    rate = bits_per_second
    server_rate = rate if server_bits_per_second is None else server_bits_per_second
    for name, given in (("", rate), ("server_", server_rate)):
        call = f"seconds({name}bits_per_second=...)"
        check_number(call, given, "be positive", lambda x: x > 0)
    moving = sum(
        8 * max(transfer.link / rate, transfer.server_link / server_rate)
        for transfer in step.transfers
    )
    waiting = latency_seconds * len(step.transfers)
    return compute_seconds + select_seconds + moving + waiting


def gather(num_workers: int, size: float) -> Transfer:
    """All-gather of a message of each worker."""
    others = (num_workers - 1) * size
    return Transfer(size, others, others)


def deal(num_workers: int, part: float) -> Transfer:
    """All-to-all of parts: one goes to each worker, one's own stays."""
    others = (num_workers - 1) * part
    return Transfer(others, others, others)


def reduce(num_workers: int, size: float) -> Transfer:
    """All-reduce on a ring; whole bytes."""
    return Transfer(size, size, math.ceil(2 * (num_workers - 1) * size / num_workers))


def check(
    call: str, num_workers: int, k: float, n: float, union: float | None = None
) -> None:
    """Raises ValueError or TypeError where an argument is out of its range."""
    check_positive_int(f"{call}(num_workers=...)", num_workers)
    check_number(f"{call}(n=...)", n, "not be negative", lambda x: x >= 0)
    check_number(f"{call}(k=...)", k, f"lie in [0, n = {n}]", lambda x: 0 <= x <= n)
    if union is not None:
        most = min(num_workers * k, n)
        check_number(
            f"{call}(union=...)",
            union,
            f"lie in [0, min(N k, n) = {most}]",
            lambda x: 0 <= x <= most * (1 + 1e-9),
        )
