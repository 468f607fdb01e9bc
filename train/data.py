"""Data: TensorFlow Datasets on array_record files, read without TensorFlow.

A batch depends on the seed, the step and the worker's number, and on nothing else: not
on how many hosts there are, not on what was read before. So a resumed run needs no
position but its step, and two hosts read what one host would.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from train.builders import BUILDERS, ArrayBuilder
from train.errors import SetupError

# Where a package brings the source files, what to say besides "get them".
PACKAGES = {
    "fashion_mnist": (
        "On Debian and Ubuntu: apt-get install dataset-fashion-mnist, then "
        "--config.data.source_dir=/usr/share/datasets/fashion-mnist"
    )
}


class Split(NamedTuple):
    images: np.ndarray  # shape=(examples, height, width, channels), dtype=uint8
    labels: np.ndarray  # shape=(examples,), dtype=int32


def load(name: str, *, data_dir: str, source_dir: str) -> dict[str, Split]:
    """Reads the splits ``train`` and ``test``, preparing them first where needed.

    Args:
      name: a key of ``BUILDERS``, or any image classification set of TFDS that lies in
        ``data_dir`` as array_record files.
      data_dir: where prepared sets lie and are written to.
      source_dir: where the published source files lie; empty if nowhere.
    """
    builder = find_prepared(name, data_dir)
    if builder is None:
        prepare(name, data_dir=data_dir, source_dir=source_dir)
        builder = find_prepared(name, data_dir)
    return {split: _read(builder, split) for split in ("train", "test")}


def find_prepared(name: str, data_dir: str) -> tfds.core.DatasetBuilder | None:
    """The newest complete version of a set in ``data_dir``, ours or TFDS's own.

    A set that is being prepared, or whose preparation was interrupted, lies in a folder
    ``incomplete.*`` and is not looked at.
    """
    for info in sorted(
        Path(data_dir, name).glob("[0-9]*/dataset_info.json"), reverse=True
    ):
        builder = tfds.builder_from_directory(info.parent)
        if builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
            return builder
    return None


def prepare(name: str, *, data_dir: str, source_dir: str) -> None:
    """Writes a set's array_record files from its source files, or says what lacks."""
    builder_class = BUILDERS.get(name)
    if builder_class is None:
        known = ", ".join(sorted(BUILDERS))
        raise SetupError(
            f"config.data.name={name!r}: no such data set in {data_dir}, and none of "
            f"those that can be prepared here ({known})."
        )
    files = [Path(source_dir, file) for file in builder_class.source_files()]
    if not source_dir or not all(file.is_file() for file in files):
        if files:
            raise SetupError(_how_to_get(builder_class, data_dir, source_dir))
    logging.info("Preparing %s in %s (once)", name, data_dir)
    tfds.disable_progress_bar()
    try:
        builder = builder_class(data_dir=data_dir, source_dir=source_dir)
        with (
            tempfile.TemporaryDirectory() as unused,
            contextlib.redirect_stdout(io.StringIO()),  # it speaks of downloads
        ):
            builder.download_and_prepare(
                download_dir=unused,
                download_config=tfds.download.DownloadConfig(try_download_gcs=False),
                file_format="array_record",
            )
    except OSError as error:
        # TFDS renames a finished folder into place, which fails if another process of
        # this run was faster. Then its files are as good as ours.
        if find_prepared(name, data_dir) is None:
            raise SetupError(
                f"config.data.data_dir={data_dir!r} cannot be written: {error}. "
                "Choose another with --config.data.data_dir=FOLDER."
            ) from error


class Batches:
    """Training batches: a fixed shard for each worker, in a new order every epoch."""

    def __init__(self, split: Split, *, seed: int, num_workers: int, batch_size: int):
        """Deals the examples out to the workers, in an order drawn from the seed.

        Args:
          split: the examples.
          seed: of the dealing and of every epoch's order.
          num_workers: over all processes.
          batch_size: examples of one worker's batch.
        """
        examples = len(split.labels)
        self.steps_per_epoch = examples // num_workers // batch_size
        if self.steps_per_epoch == 0:
            raise SetupError(
                f"config.batch_size={batch_size} on each of {num_workers} workers is "
                f"more than the {examples} training examples. Lower it."
            )
        self._split, self._seed, self._batch_size = split, seed, batch_size
        dealt = np.random.default_rng([seed, 0]).permutation(examples)
        self._shards = [dealt[worker::num_workers] for worker in range(num_workers)]

    def indices(self, step: int, worker: int) -> np.ndarray:
        """The examples that make up one worker's batch at one step, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        shard = self._shards[worker]
        # A shard's order leaves another remainder out every time.
        order = np.random.default_rng([self._seed, 1, epoch, worker]).permutation(shard)
        return order[position * self._batch_size :][: self._batch_size]

    def at(self, step: int, workers: Sequence[int]) -> dict[str, np.ndarray]:
        """The batches of these workers, stacked along a leading worker axis."""
        chosen = np.stack([self.indices(step, worker) for worker in workers])
        return {
            "image": self._split.images[chosen],
            "label": self._split.labels[chosen],
        }


def evaluation_batches(
    split: Split, *, workers: Sequence[int], num_workers: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Every example of a split exactly once, spread over the workers.

    The last batch is filled up with examples of ``weight`` 0, so that all batches have
    one shape.
    """
    examples, per_step = len(split.labels), num_workers * batch_size
    for start in range(0, examples, per_step):
        numbers = np.arange(start, start + per_step).reshape(num_workers, batch_size)
        numbers = numbers[list(workers)]
        chosen = np.minimum(numbers, examples - 1)
        yield {
            "image": split.images[chosen],
            "label": split.labels[chosen],
            "weight": (numbers < examples).astype(np.float32),
        }


def _read(builder: tfds.core.DatasetBuilder, split: str) -> Split:
    """Decodes a whole split into memory: these sets are small."""
    try:
        source = builder.as_data_source(split=split)
        examples = source.__getitems__(range(len(source)))
        return Split(
            images=np.stack([example["image"] for example in examples]),
            labels=np.array([example["label"] for example in examples], np.int32),
        )
    except Exception as error:  # array_record raises whatever its C++ side finds
        raise SetupError(
            f"The prepared data in {builder.data_path} cannot be read: {error}. Remove "
            "that folder; the next run prepares it again."
        ) from error


def _how_to_get(
    builder_class: type[ArrayBuilder], data_dir: str, source_dir: str
) -> str:
    name, files = builder_class.name, builder_class.source_files()
    missing = [f for f in files if not (source_dir and Path(source_dir, f).is_file())]
    looked = f"config.data.source_dir={source_dir!r} lacks {', '.join(missing)}"
    if not source_dir:
        looked = f"config.data.source_dir is not set (wanted there: {', '.join(files)})"
    lines = [
        f"{name} is not there: {Path(data_dir, name)} holds no prepared array_record "
        f"files, and {looked}.",
        PACKAGES.get(name, ""),
        "Or get the files from these addresses into one folder and pass it as "
        "--config.data.source_dir=FOLDER:",
        *(f"  {url}" for url in builder_class.SOURCE.url_infos),
        "Or, on a machine with TensorFlow and a network, run",
        f"  python -c \"import tensorflow_datasets as tfds; tfds.builder('{name}', "
        "data_dir='data', file_format='array_record').download_and_prepare()\"",
        f"and copy data/{name} into {data_dir}.",
    ]
    return "\n".join(line for line in lines if line)
