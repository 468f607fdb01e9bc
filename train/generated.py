"""Stand-ins for the sets that have to be got: made from a seed, nobody's photographs.

Every element is like the real set's, so that the same models train on it by the same
code, and nothing that is measured on them says anything about the real set. So all
names begin with ``generated_``. They can be learned: a class has a colour of its own,
and fields of its own colours, under noise.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from train.builders import Cifar10, LocalBuilder
from train.camvid import CLASSES, SPLITS, VOID, Camvid

SEED = 0  # the content of a set does not depend on the run
FIELDS = 4  # along each side
NOISE = 25.0  # standard deviation, of pixels of 0 to 255


class GeneratedCifar10(Cifar10, skip_registration=True):
    """Small images of 10 classes."""

    name = "generated_cifar10"
    SOURCE = None
    EXAMPLES = {"train": 2000, "test": 200}

    def arrays(self):
        return {
            split: _classified(part, count, self.IMAGE_SHAPE[:2])
            for part, (split, count) in enumerate(self.EXAMPLES.items())
        }


class GeneratedImagenet(LocalBuilder, skip_registration=True):
    """JPEG images of various sizes, of 40 among 1000 classes.

    Of 40, so that few examples and few steps are enough to see that something is
    learned.
    """

    name = "generated_imagenet"
    CLASSES = np.arange(0, 1000, 25)
    EXAMPLES = {"train": 1600, "validation": 160}
    SIDES = (64, 161)  # pixels, the end not included

    def _info(self):
        return self.described(
            image=tfds.features.Image(encoding_format="jpeg"),
            label=tfds.features.ClassLabel(num_classes=1000),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is ever fetched
        return {
            split: self._generate_examples(part, count)
            for part, (split, count) in enumerate(self.EXAMPLES.items())
        }

    def _generate_examples(self, part, count) -> Iterator[tuple[int, dict]]:
        for key in range(count):
            rng = np.random.default_rng([SEED, part, key])
            label = int(self.CLASSES[key % len(self.CLASSES)])
            size = tuple(rng.integers(*self.SIDES, size=2))
            file = io.BytesIO()
            Image.fromarray(picture(label, size, rng)).save(file, "JPEG")
            file.seek(0)
            yield key, {"image": file, "label": label}


class GeneratedCamvid(Camvid, skip_registration=True):
    """Images in squares, each of one of 11 classes or void, and their masks."""

    name = "generated_camvid"
    EXAMPLES = {"train": 32, "val": 8, "test": 8}
    SQUARE = 60  # pixels along each side

    @classmethod
    def wanted(cls):
        return []

    def pairs(self, split):
        colours = np.random.default_rng(SEED).uniform(0, 255, (CLASSES + 1, 3))
        for number in range(self.EXAMPLES[split]):
            rng = np.random.default_rng([SEED, SPLITS.index(split), number])
            squares = [n // self.SQUARE for n in self.SIZE]
            mask = rng.integers(0, VOID + 1, squares, dtype=np.uint8)
            mask = np.kron(mask, np.ones((self.SQUARE,) * 2, np.uint8))
            yield str(number), _noisy(colours[mask], rng), mask


def picture(label: int, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """An image of a class, uint8[height, width, 3]: its colour, fields and some noise.

    Args:
      label: the class.
      size: height and width.
      rng: of the noise.
    """
    own = np.random.default_rng([SEED, label])
    fields = own.uniform(0, 255, (FIELDS, FIELDS, 3))
    fields = (fields + fields[:, ::-1]) / 2  # it may come mirrored
    fields = (fields + own.uniform(0, 255, 3)) / 2
    rows, columns = (np.arange(n) * FIELDS // n for n in size)
    return _noisy(fields[rows][:, columns], rng)


def _noisy(clean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    noise = rng.normal(0, NOISE, clean.shape)
    return np.clip(clean + noise, 0, 255).astype(np.uint8)


def _classified(
    part: int, count: int, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Images of 10 classes, as many of each."""
    rng = np.random.default_rng([SEED, part])
    labels = np.arange(count) % 10
    return np.stack([picture(label, size, rng) for label in labels]), labels
