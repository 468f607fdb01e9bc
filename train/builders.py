"""Data sets as TensorFlow Datasets builders that need no TensorFlow.

TFDS's own builders of MNIST and its like need TensorFlow to write their examples, and a
network to fetch the source files. These read files that lie on the disk already, check
them against the sizes and checksums that TFDS has registered, and write array_record
files, which are read without TensorFlow.
"""

from __future__ import annotations

import abc
import gzip
import hashlib
import io
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from train.errors import SetupError

# Debian's build (package dataset-fashion-mnist) drops name and time from the headers of
# the gzip files, to be reproducible. With both put back the files are the published
# ones, byte for byte. Seconds since 1970.
GZIP_TIMES = {
    "train-images-idx3-ubyte.gz": 1504176606,
    "train-labels-idx1-ubyte.gz": 1504176606,
    "t10k-images-idx3-ubyte.gz": 1504176627,
    "t10k-labels-idx1-ubyte.gz": 1504176627,
}
GZIP_HEADER = struct.Struct("<3sBIBB")  # magic, flags, time, extra flags, system
GZIP_HAS_NAME = 8

CIFAR10_TRAIN = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
CIFAR10_TEST = ["cifar-10-batches-bin/test_batch.bin"]


class ArrayBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes splits that are arrays in memory: images uint8, labels int."""

    VERSION = tfds.core.Version("1.0.0")
    IMAGE_SHAPE: tuple[int, int, int]
    SOURCE: type[tfds.core.DatasetBuilder] | None = None  # whose checksums are used

    def __init__(self, *, source_dir: str = "", **kwargs):
        self.source_dir = Path(source_dir)
        super().__init__(**kwargs)

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
        features = {
            "image": tfds.features.Tensor(shape=self.IMAGE_SHAPE, dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
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


BUILDERS = {b.name: b for b in (Digits, Mnist, FashionMnist, Cifar10)}


def verified(path: Path, registered: tfds.download.checksums.UrlInfo) -> bytes:
    """The content of a source file, or an error if it isn't the published one."""
    data = path.read_bytes()
    if _sha256(data) == registered.checksum:
        return data
    restored = _with_gzip_header(data, path.name)
    if _sha256(restored) == registered.checksum:
        return restored
    raise SetupError(
        f"{path} is not the published file: its SHA-256 is {_sha256(data)} "
        f"({len(data)} bytes), expected {registered.checksum} "
        f"({int(registered.size)} bytes). Remove it and get a new copy."
    )


def idx_array(data: bytes) -> np.ndarray:
    """Decodes a gzip file in MNIST's IDX format: magic, one size per axis, bytes."""
    data = gzip.decompress(data)
    ndim = data[3]
    shape = struct.unpack_from(f">{ndim}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def cifar_arrays(archive: bytes, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Decodes CIFAR-10's binary version: records of a label and 3 planes of 32 x 32."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        files = [tar.extractfile(name).read() for name in names]
    records = np.frombuffer(b"".join(files), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1), records[:, 0]


def _with_gzip_header(data: bytes, name: str) -> bytes:
    """The same gzip file with its name and time in the header, where known."""
    if name not in GZIP_TIMES or len(data) < GZIP_HEADER.size:
        return data
    magic, flags, _, extra, system = GZIP_HEADER.unpack_from(data)
    header = GZIP_HEADER.pack(
        magic, flags | GZIP_HAS_NAME, GZIP_TIMES[name], extra, system
    )
    stem = name.removesuffix(".gz").encode() + b"\0"
    return header + stem + data[GZIP_HEADER.size :]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
