"""The step time of a method at a link rate, and what to do about it.

    step = compute + method + 8 link_bytes / (rate * 0.945)

`compute` is the gradient of a worker's batch, `method` what memory, selection, coding
and the optimizer take without a network; 0.945 of a rate is left by the headers of
Ethernet, IP and TCP. Parts follow one another: no transfer is hidden behind the
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from study.results import markdown

HEADERS = 0.945  # 1448 bytes of payload in the 1538 of an Ethernet frame and its gap


class Cost(NamedTuple):
    """What a method takes."""

    method: str
    own_ms: float  # without the network
    link_bytes: float

    def step_ms(self, rate: float, compute_ms: float = 0.0) -> float:
        """Milliseconds of a step at ``rate`` bits per second.

        >>> Cost("dense", 10.0, 945_000).step_ms(8e6, compute_ms=5.0)
        1015.0
        """
        return compute_ms + self.own_ms + 8e3 * self.link_bytes / (rate * HEADERS)

    def faster_between(self, dense: Cost) -> tuple[float, float]:
        """Bits per second between which this method is faster than ``dense``.

        >>> Cost("topk", 30.0, 0).faster_between(Cost("dense", 10.0, 945_000))
        (0.0, 400000000.0)
        """
        saved, more = dense.link_bytes - self.link_bytes, self.own_ms - dense.own_ms
        if saved <= 0 and more >= 0:
            return 0.0, 0.0
        if saved >= 0 and more <= 0:
            return 0.0, float("inf")
        crossing = 8e3 * saved / (more * HEADERS)
        return (0.0, crossing) if saved > 0 else (crossing, float("inf"))


def advice(found: Sequence[Cost], rate: float, compute_ms: float) -> str:
    """What to do, in a sentence.

    >>> dense, topk = Cost("dense", 10.0, 945_000), Cost("topk", 30.0, 945)
    >>> print(advice([dense, topk], 1e9, 100.0))
    Stay dense: no method is faster at 1 Gbit/s.
    >>> print(advice([dense, topk], 1e7, 100.0))
    Use topk: 7.0 times faster than dense at 10 Mbit/s, faster up to 400 Mbit/s.
    """
    best = min(found, key=lambda cost: cost.step_ms(rate, compute_ms))
    dense = next(cost for cost in found if cost.method == "dense")
    if best.method == "dense":
        return f"Stay dense: no method is faster at {named(rate)}."
    gain = dense.step_ms(rate, compute_ms) / best.step_ms(rate, compute_ms)
    if gain < 1.1:
        return f"Stay dense: {best.method} would save {1 - 1 / gain:.0%} of a step."
    return (
        f"Use {best.method}: {gain:.1f} times faster than dense at {named(rate)}, "
        f"faster {between(*best.faster_between(dense))}."
    )


def named(rate: float) -> str:
    """A rate in words.

    >>> named(2.5e9), named(5e7)
    ('2.5 Gbit/s', '50 Mbit/s')
    """
    rate = float(f"{rate:.3g}")
    return f"{rate / 1e9:,g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def between(low: float, high: float) -> str:
    """A range of rates in words.

    >>> between(0.0, 4e8), between(4e8, float("inf")), between(0.0, float("inf"))
    ('up to 400 Mbit/s', 'from 400 Mbit/s on', 'at any rate')
    """
    if high == 0:
        return "at no rate"
    if high < float("inf"):
        return f"up to {named(high)}"
    return f"from {named(low)} on" if low else "at any rate"


def table(found: Sequence[Cost], rate: float, compute_ms: float) -> str:
    """All methods, the fastest first."""
    dense = next(cost for cost in found if cost.method == "dense")
    header = ["method", "without network", "on the link", "step", "faster than dense"]
    rows = [
        [
            cost.method,
            f"{cost.own_ms:.1f} ms",
            f"{cost.link_bytes:,.0f} B",
            f"{cost.step_ms(rate, compute_ms):,.1f} ms",
            "" if cost is dense else between(*cost.faster_between(dense)),
        ]
        for cost in sorted(found, key=lambda cost: cost.step_ms(rate))
    ]
    return markdown(header, rows)
