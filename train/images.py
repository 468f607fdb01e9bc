"""Pictures brought to one size, and changed at random for training.

Images are uint8[height, width, channels], masks uint8[height, width] of labels; a size
is ``(height, width)``.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

Size = tuple[int, int]

# Of an image's area and of width / height, as ImageNet's training has used them since
# Szegedy et al., "Going Deeper with Convolutions", 2015.
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
CENTRE = 224 / 256  # of the shorter side: what is tested on
ATTEMPTS = 10
SHIFT = 8  # a shift of up to this part of a side: 4 pixels of 32, as usual for CIFAR-10


def resize(image: np.ndarray, size: Size) -> np.ndarray:
    """Bilinear over whole pixels, an image or, by the nearest label, a mask."""
    if image.shape[:2] == tuple(size):
        return image
    if image.ndim == 2:
        rows, columns = (_nearest(*n) for n in zip(image.shape, size, strict=True))
        return image[rows][:, columns]
    height, width = image.shape[:2]
    channels = [
        cut(Image.fromarray(image[..., i]), (0, 0, width, height), size)
        for i in range(image.shape[2])
    ]
    return np.stack(channels, -1)


def centre_crop(image: Image.Image, size: Size) -> np.ndarray:
    """The middle, as large as it can be and a little less, brought to the size."""
    scale = CENTRE * min(image.height / size[0], image.width / size[1])
    height, width = scale * size[0], scale * size[1]
    left, top = (image.width - width) / 2, (image.height - height) / 2
    return cut(image, (left, top, left + width, top + height), size)


def random_crop(image: Image.Image, size: Size, rng: np.random.Generator) -> np.ndarray:
    """A part of random area and ratio at a random place; mirrored half of the times."""
    for _ in range(ATTEMPTS):
        area = rng.uniform(*AREA) * image.width * image.height
        ratio = math.exp(rng.uniform(*np.log(RATIO)))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if width <= image.width and height <= image.height:
            left = rng.uniform(0, image.width - width)
            top = rng.uniform(0, image.height - height)
            found = cut(image, (left, top, left + width, top + height), size)
            break
    else:  # a very long image
        found = centre_crop(image, size)
    return found[:, ::-1] if rng.random() < 0.5 else found


def shift_and_flip(
    image: np.ndarray, label: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The same, shifted by up to an eighth and mirrored half of the times.

    What comes in at the border is mirrored there, so that a mask moves as its image.

    Args:
      image: the image.
      label: its mask, or its class, which stays as it is.
      rng: what draws the change.
    """
    margins = [n // SHIFT for n in image.shape[:2]]
    rows, columns = (rng.integers(0, 2 * margin + 1) for margin in margins)
    mirrored = rng.random() < 0.5

    def change(x: np.ndarray) -> np.ndarray:
        if x.ndim < 2:
            return x
        height, width = x.shape[:2]
        edges = [(margin, margin) for margin in margins] + [(0, 0)] * (x.ndim - 2)
        x = np.pad(x, edges, "reflect")
        x = x[rows : rows + height, columns : columns + width]
        return x[:, ::-1] if mirrored else x

    return change(image), change(np.asarray(label))


def cut(
    image: Image.Image, box: tuple[float, float, float, float], size: Size
) -> np.ndarray:
    """What lies in the box ``(left, top, right, bottom)``, at the given size."""
    resized = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized)


def _nearest(length: int, wanted: int) -> np.ndarray:
    """For each of ``wanted`` places the one of ``length`` whose middle is nearest."""
    return ((np.arange(wanted) + 0.5) * length / wanted).astype(int)
