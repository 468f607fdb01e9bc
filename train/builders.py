"""Data sets as TensorFlow Datasets builders that need no TensorFlow.

TFDS's own builders of MNIST and its like need TensorFlow to write their examples, and a
network to fetch the source files. These read files that lie on the disk already, check
them against the sizes and checksums that TFDS has registered, and write array_record
files, which are read without TensorFlow.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from train.source_files import cifar_arrays, idx_array, verified

CIFAR10_TRAIN = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
CIFAR10_TEST = ["cifar-10-batches-bin/test_batch.bin"]


class LocalBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes examples of ``image`` and ``label`` from what lies on the disk already."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, source_dir: str = "", **kwargs):
        self.source_dir = Path(source_dir)
        super().__init__(**kwargs)

    @classmethod
    def wanted(cls) -> list[str]:
        """Names of what must lie in ``source_dir``, files or folders."""
        return []

    @classmethod
    def origin(cls) -> list[str]:
        """Where to get that, as lines of an error."""
        return []

    def described(self, **features) -> tfds.core.DatasetInfo:
        """The information that TFDS wants of a builder."""
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )


class ArrayBuilder(LocalBuilder, skip_registration=True):
    """Writes splits that are arrays in memory: images uint8, labels int."""

    IMAGE_SHAPE: tuple[int, int, int]
    SOURCE: type[tfds.core.DatasetBuilder] | None = None  # whose checksums are used

    @classmethod
    def wanted(cls):
        return list(cls.source_files())

    @classmethod
    def origin(cls):
        return [
            "Get the files from these addresses into one folder and pass it as "
            "--config.data.source_dir=FOLDER:",
            *(f"  {url}" for url in cls.SOURCE.url_infos),
            "Or let TFDS prepare them:",
            *prepared_elsewhere(cls.name),
        ]

    @classmethod
    def source_files(cls) -> dict[str, tfds.download.checksums.UrlInfo]:
        """Registered size and checksum of every source file, by file name."""
        if cls.SOURCE is None:
            return {}
        return {url.rpartition("/")[2]: i for url, i in cls.SOURCE.url_infos.items()}

    @abc.abstractmethod
    def arrays(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Images and labels of every split."""

    def read(self, name: str) -> bytes:
        """The verified bytes of one source file."""
        return verified(self.source_dir / name, self.source_files()[name])

    def _info(self) -> tfds.core.DatasetInfo:
        return self.described(
            image=tfds.features.Tensor(shape=self.IMAGE_SHAPE, dtype=np.uint8),
            label=tfds.features.ClassLabel(num_classes=10),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is ever fetched
        return {name: self._generate_examples(*a) for name, a in self.arrays().items()}

    def _generate_examples(self, images, labels) -> Iterator[tuple[int, dict]]:
        images = images.reshape(-1, *self.IMAGE_SHAPE)
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield key, {"image": image, "label": int(label)}


class Digits(ArrayBuilder, skip_registration=True):
    """1 797 scans of handwritten digits, 8 x 8 pixels of 0 to 16, from scikit-learn."""

    name = "digits"
    IMAGE_SHAPE = (8, 8, 1)
    # The published set has no test split. A fifth is kept for testing, drawn once and
    # for all: the seed of a run must not decide what it is tested on.
    TEST_FRACTION = 0.2
    SPLIT_SEED = 0

    def arrays(self):
        from sklearn.datasets import load_digits  # a second to import

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(self.SPLIT_SEED).permutation(len(images))
        test, train = np.split(order, [round(self.TEST_FRACTION * len(images))])
        images = images.astype(np.uint8)
        return {
            "train": (images[train], labels[train]),
            "test": (images[test], labels[test]),
        }


class Mnist(ArrayBuilder, skip_registration=True):
    """70 000 handwritten digits, 28 x 28."""

    name = "mnist"
    IMAGE_SHAPE = (28, 28, 1)
    SOURCE = tfds.image_classification.MNIST

    def arrays(self):
        return {
            split: (
                idx_array(self.read(f"{prefix}-images-idx3-ubyte.gz")),
                idx_array(self.read(f"{prefix}-labels-idx1-ubyte.gz")),
            )
            for split, prefix in (("train", "train"), ("test", "t10k"))
        }


class FashionMnist(Mnist, skip_registration=True):
    """70 000 pictures of clothes, in MNIST's format."""

    name = "fashion_mnist"
    SOURCE = tfds.image_classification.FashionMNIST


class Cifar10(ArrayBuilder, skip_registration=True):
    """60 000 small colour photographs, 32 x 32."""

    name = "cifar10"
    IMAGE_SHAPE = (32, 32, 3)
    SOURCE = tfds.image_classification.Cifar10

    def arrays(self):
        archive = self.read("cifar-10-binary.tar.gz")
        return {
            "train": cifar_arrays(archive, CIFAR10_TRAIN),
            "test": cifar_arrays(archive, CIFAR10_TEST),
        }


def prepared_elsewhere(name: str) -> list[str]:
    """How to have TFDS prepare a set of its own, as lines of an error."""
    return [
        "On a machine with TensorFlow and a network, run",
        f"  python -c \"import tensorflow_datasets as tfds; tfds.builder('{name}', "
        "data_dir='data', file_format='array_record').download_and_prepare()\"",
        f"and copy data/{name} to where config.data.data_dir is.",
    ]
