"""Figures of the studies: axes with units, seeds as bands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MARKS = "osD^v<>p*hXd"


def panels(columns: int, *, sharey: bool = True) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many panels side by side."""
    figure = Figure(figsize=(6.5 * columns, 4.8), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False, sharey=sharey)[0]


def spread(samples: Sequence[Sequence[float]]) -> tuple[np.ndarray, ...]:
    """Mean, lowest and highest of each sample; samples may differ in size."""
    return tuple(
        np.array([of(sample) for sample in samples]) for of in (np.mean, np.min, np.max)
    )


def band(
    ax: Axes,
    xs: Sequence[float],
    samples: Sequence[Sequence[float]],
    label: str,
    **style: Any,
) -> None:
    """A line through the samples' means, a band from the lowest to the highest."""
    means, low, high = spread(samples)
    (line,) = ax.plot(xs, means, label=label, **style)
    ax.fill_between(xs, low, high, color=line.get_color(), alpha=0.15, lw=0)


def points(
    ax: Axes,
    xs: Sequence[float],
    samples: Sequence[Sequence[float]],
    label: str,
    **style: Any,
) -> None:
    """The means of the samples as points, bars from the lowest to the highest."""
    means, low, high = spread(samples)
    ax.errorbar(
        xs, means, [means - low, high - means], label=label, ls="", ms=5, **style
    )


def finish(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    """Grids, one legend below all panels, and the file."""
    shown: dict[str, Any] = {}
    for ax in axes:
        ax.grid(alpha=0.3)
        shown |= {
            label: handle
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
            if label not in shown
        }
    rows = -(-len(shown) // (3 * len(axes)))
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside lower center",
        ncols=3 * len(axes),
        fontsize=8,
    )
    figure.savefig(path, dpi=120)
