"""Data: TensorFlow Datasets on array_record files, read without TensorFlow.

A batch depends on the seed, the step and the worker's number, and on nothing else: not
on how many hosts there are, not on what was read before. So a resumed run needs no
position but its step, and two hosts read what one host would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from train.errors import SetupError
from train.images import resize
from train.prepared import find_prepared, prepare
from train.splits import LazySplit, Split, unreadable


def load(
    name: str,
    *,
    data_dir: str,
    source_dir: str,
    test_split: str = "test",
    size: tuple[int, ...] = (),
    augment: bool = False,
) -> dict[str, Split | LazySplit]:
    """The splits ``train`` and ``test``, prepared first where needed.

    Images of one size are read into memory. Those of various sizes, such as ImageNet's,
    stay on the disk.

    Args:
      name: a key of ``BUILDERS``, or any image classification set of TFDS that lies in
        ``data_dir`` as array_record files.
      data_dir: where prepared sets lie and are written to.
      source_dir: where the published source files lie; empty if nowhere.
      test_split: the set's own name of what is tested on.
      size: height and width that images are brought to; () for images as they are.
      augment: whether training images are shifted or cropped, and mirrored, at random.
    """
    builder = find_prepared(name, data_dir)
    if builder is None:
        prepare(name, data_dir=data_dir, source_dir=source_dir)
        builder = find_prepared(name, data_dir)
    if test_split not in builder.info.splits:
        raise SetupError(
            f"config.data.test_split={test_split!r} is no split of {name}; choose from "
            f"{', '.join(builder.info.splits)}."
        )
    return {
        "train": _split(builder, "train", size, augment),
        "test": _split(builder, test_split, size, augment=False),
    }


class Batches:
    """Training batches: a fixed shard for each worker, in a new order every epoch."""

    def __init__(
        self, split: Split | LazySplit, *, seed: int, num_workers: int, batch_size: int
    ):
        """Deals the examples out to the workers, in an order drawn from the seed.

        Args:
          split: the examples.
          seed: of the dealing and of every epoch's order.
          num_workers: over all processes.
          batch_size: examples of one worker's batch.
        """
        examples = split.examples
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
        epoch = step // self.steps_per_epoch
        return self._split.batch(chosen, draw=(self._seed, epoch))


def evaluation_batches(
    split: Split | LazySplit,
    *,
    workers: Sequence[int],
    num_workers: int,
    batch_size: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Every example of a split exactly once, spread over the workers.

    The last batch is filled up with examples of ``weight`` 0, so that all batches have
    one shape.
    """
    examples, per_step = split.examples, num_workers * batch_size
    for start in range(0, examples, per_step):
        numbers = np.arange(start, start + per_step).reshape(num_workers, batch_size)
        numbers = numbers[list(workers)]
        chosen = np.minimum(numbers, examples - 1)
        weight = (numbers < examples).astype(np.float32)
        yield {**split.batch(chosen), "weight": weight}


def _split(
    builder: tfds.core.DatasetBuilder, split: str, size: tuple[int, ...], augment: bool
) -> Split | LazySplit:
    """A split in memory if all its images have one size, else one on the disk."""
    folder = Path(builder.data_path)
    lazy = None in builder.info.features["image"].shape
    if lazy and not size:
        raise SetupError(
            "config.data.size=() leaves images as they are, and those of "
            f"{builder.name} have various sizes. Set it with "
            "--config.data.size='(HEIGHT, WIDTH)'."
        )
    try:
        if lazy:
            encoded = {"image": tfds.decode.SkipDecoding()}
            source = builder.as_data_source(split=split, decoders=encoded)
            return LazySplit(source, size, augment, folder)
        source = builder.as_data_source(split=split)
        examples = source.__getitems__(range(len(source)))
        images, labels = (
            np.stack([np.asarray(example[key]) for example in examples])
            for key in ("image", "label")
        )
    except Exception as error:  # array_record raises whatever its C++ side finds
        raise unreadable(folder, error) from error
    if size:
        images = np.stack([resize(image, size) for image in images])
    if labels.ndim == 1:
        labels = labels.astype(np.int32)  # classes, else masks
    elif size:
        labels = np.stack([resize(mask, size) for mask in labels])
    return Split(images, labels, augment)
