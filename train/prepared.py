"""Prepared data sets: array_record files in a folder, found or written there."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import tensorflow_datasets as tfds
from absl import logging

from train.builders import (
    Cifar10,
    Digits,
    FashionMnist,
    LocalBuilder,
    Mnist,
    prepared_elsewhere,
)
from train.camvid import Camvid
from train.errors import SetupError
from train.generated import GeneratedCamvid, GeneratedCifar10, GeneratedImagenet

BUILDERS: dict[str, type[LocalBuilder]] = {
    builder.name: builder
    for builder in (
        *(Digits, Mnist, FashionMnist, Cifar10, Camvid),
        *(GeneratedCifar10, GeneratedImagenet, GeneratedCamvid),
    )
}
GENERATED = "generated_"  # how the names of sets begin that nobody has photographed

# Where a package brings the source files, what to say besides "get them".
PACKAGES = {
    "fashion_mnist": (
        "On Debian and Ubuntu: apt-get install dataset-fashion-mnist, then "
        "--config.data.source_dir=/usr/share/datasets/fashion-mnist"
    )
}


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
            f"those that can be prepared here ({known}). If it is one of TFDS's:\n"
            + "\n".join(prepared_elsewhere(name))
        )
    wanted = builder_class.wanted()
    if not source_dir or not all(Path(source_dir, w).exists() for w in wanted):
        if wanted:
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


def _how_to_get(
    builder_class: type[LocalBuilder], data_dir: str, source_dir: str
) -> str:
    name, wanted = builder_class.name, builder_class.wanted()
    missing = [w for w in wanted if not (source_dir and Path(source_dir, w).exists())]
    looked = f"config.data.source_dir={source_dir!r} lacks {', '.join(missing)}"
    if not source_dir:
        there = ", ".join(wanted)
        looked = f"config.data.source_dir is not set (wanted there: {there})"
    lines = [
        f"{name} is not there: {Path(data_dir, name)} holds no prepared array_record "
        f"files, and {looked}.",
        PACKAGES.get(name, ""),
        *builder_class.origin(),
    ]
    return "\n".join(line for line in lines if line)
