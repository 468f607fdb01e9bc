"""The examples of a split: in memory, or read from the disk when they are wanted.

Both give a batch by the examples' numbers. A training batch also has a draw, the seed
and the epoch: what is random in an example depends on these and on its number alone.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from train.errors import SetupError
from train.images import Size, centre_crop, random_crop, shift_and_flip

Draw = tuple[int, int]  # seed and epoch
RANDOM_IMAGES = 2  # apart from what else is drawn from the seed


class Split(NamedTuple):
    """Examples in memory."""

    images: np.ndarray  # shape=(examples, height, width, channels), dtype=uint8
    labels: np.ndarray  # shape=(examples,), dtype=int32; masks (..., h, w), dtype=uint8
    augment: bool = False  # whether a draw shifts and mirrors them

    @property
    def examples(self) -> int:
        return len(self.labels)

    def batch(self, chosen: np.ndarray, draw: Draw | None = None) -> dict[str, Any]:
        """Images and labels of these examples, in the shape of ``chosen``."""
        images, labels = self.images[chosen], self.labels[chosen]
        if self.augment and draw is not None:
            for place in np.ndindex(chosen.shape):
                rng = _generator(draw, chosen[place])
                images[place], labels[place] = shift_and_flip(
                    images[place], labels[place], rng
                )
        return {"image": images, "label": labels}


class LazySplit:
    """Encoded images of various sizes and their classes, on the disk."""

    def __init__(self, source: Sequence[dict], size: Size, augment: bool, folder: Path):
        """Reads nothing yet.

        Args:
          source: by number, ``{"image": bytes of a JPEG or PNG, "label": class}``.
          size: what images are brought to, height and width.
          augment: whether a draw crops at random and mirrors; else, and without a draw,
            the middle is taken.
          folder: of the files, for errors.
        """
        self._source, self._size, self._augment = source, tuple(size), augment
        self._folder, self._pool = folder, ThreadPoolExecutor()

    @property
    def examples(self) -> int:
        return len(self._source)

    def batch(self, chosen: np.ndarray, draw: Draw | None = None) -> dict[str, Any]:
        """Images and labels of these examples, in the shape of ``chosen``."""
        try:
            # Most of the time goes into decoding, which other threads can do meanwhile.
            read = list(self._pool.map(lambda i: self._read(i, draw), chosen.flat))
        except Exception as error:  # array_record raises whatever its C++ side finds
            raise unreadable(self._folder, error) from error
        images, labels = zip(*read, strict=True)
        return {
            "image": np.stack(images).reshape(*chosen.shape, *images[0].shape),
            "label": np.array(labels, np.int32).reshape(chosen.shape),
        }

    def _read(self, number: int, draw: Draw | None) -> tuple[np.ndarray, int]:
        example = self._source[int(number)]
        image = Image.open(io.BytesIO(example["image"])).convert("RGB")
        if self._augment and draw is not None:
            pixels = random_crop(image, self._size, _generator(draw, number))
        else:
            pixels = centre_crop(image, self._size)
        return pixels, example["label"]


def unreadable(folder: Path, error: Exception) -> SetupError:
    """What to say of prepared files that cannot be read."""
    return SetupError(
        f"The prepared data in {folder} cannot be read: {error}. Remove that folder; "
        "the next run prepares it again."
    )


def _generator(draw: Draw, number: int) -> np.random.Generator:
    seed, epoch = draw
    return np.random.default_rng([seed, RANDOM_IMAGES, epoch, int(number)])
