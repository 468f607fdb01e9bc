"""`scripts/train` on data with two bad examples: one has a NaN, one an infinity.

Steps that draw one of them are skipped by all workers. Run by `scripts/study soak`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from train import build, main
from train.splits import Split

BAD = {7: np.nan, 11: np.inf}  # by the number of the example


def poisoned(splits: dict[str, Any]) -> dict[str, Any]:
    """The training split with `BAD` in the middle of some images."""
    images = splits["train"].images.astype(np.float32)
    middle = images.shape[1] // 2
    for number, value in BAD.items():
        images[number, middle, middle] = value
    return {**splits, "train": Split(images, splits["train"].labels)}


if __name__ == "__main__":
    healthy = build.splits
    build.splits = lambda config: poisoned(healthy(config))
    main.run()
