"""The published source files of small data sets: checked, decoded to arrays."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from tensorflow_datasets.core.download.checksums import UrlInfo

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


def verified(path: Path, registered: UrlInfo) -> bytes:
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
