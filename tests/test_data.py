import gzip
import hashlib
import io
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train import builders, data
from train.errors import SetupError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def url_info(content):
    return tfds.download.checksums.UrlInfo(
        size=tfds.core.utils.Size(len(content)),
        checksum=hashlib.sha256(content).hexdigest(),
        filename=None,
    )


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """A folder of small source files, registered in place of the published ones."""
    rng, files = np.random.default_rng(0), {}
    for prefix, n in (("train", 40), ("t10k", 16)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx(images))
        files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels))
    folder = tmp_path / "sources"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    infos = {f"http://x/{name}": url_info(c) for name, c in files.items()}
    monkeypatch.setattr(tfds.image_classification.FashionMNIST, "url_infos", infos)
    return folder


def load(name, tmp_path, source_dir=""):
    return data.load(name, data_dir=str(tmp_path / "data"), source_dir=str(source_dir))


def test_digits_are_built_in_and_split_once_for_all(tmp_path):
    splits = load("digits", tmp_path)
    assert splits["train"].images.shape == (1438, 8, 8, 1)
    assert splits["test"].images.shape == (359, 8, 8, 1)
    assert splits["train"].images.dtype == np.uint8
    assert splits["train"].images.max() == 16
    again = load("digits", tmp_path)
    np.testing.assert_array_equal(splits["test"].images, again["test"].images)


def test_prepared_once_then_read_without_sources(fashion, tmp_path):
    first = load("fashion_mnist", tmp_path, fashion)
    assert sorted(np.bincount(first["train"].labels)) == [4] * 10
    again = load("fashion_mnist", tmp_path, source_dir="")
    np.testing.assert_array_equal(first["train"].images, again["train"].images)


def test_missing_sources_say_what_to_run(tmp_path):
    with pytest.raises(SetupError) as error:
        load("fashion_mnist", tmp_path)
    for words in (
        "apt-get install dataset-fashion-mnist",
        "--config.data.source_dir=",
        "train-images-idx3-ubyte.gz",
        "file_format='array_record'",
    ):
        assert words in str(error.value)


def test_one_missing_file_is_named(fashion, tmp_path):
    (fashion / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(SetupError, match="lacks t10k-labels-idx1-ubyte.gz") as error:
        load("fashion_mnist", tmp_path, fashion)
    assert "lacks t10k-labels-idx1-ubyte.gz, " not in str(error.value)


def test_corrupt_source_names_file_and_both_checksums(fashion, tmp_path):
    path = fashion / "train-labels-idx1-ubyte.gz"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    with pytest.raises(SetupError) as error:
        load("fashion_mnist", tmp_path, fashion)
    for words in (
        str(path),
        hashlib.sha256(good).hexdigest(),
        hashlib.sha256(path.read_bytes()).hexdigest(),
    ):
        assert words in str(error.value)
    assert data.find_prepared("fashion_mnist", str(tmp_path / "data")) is None


def test_unknown_set_lists_the_known_ones(tmp_path):
    with pytest.raises(SetupError, match="'imagenet'.*cifar10, digits"):
        load("imagenet", tmp_path)


def test_unwritable_data_dir_is_named(tmp_path):
    (tmp_path / "data").write_text("a file where a folder is wanted")
    with pytest.raises(SetupError, match="config.data.data_dir"):
        load("digits", tmp_path)


def test_a_gzip_file_without_its_name_and_time_is_the_published_one(monkeypatch):
    name, time = "train-labels-idx1-ubyte.gz", 1504176606
    buffer = io.BytesIO()
    stem = name.removesuffix(".gz")
    with gzip.GzipFile(stem, "wb", fileobj=buffer, mtime=time) as file:
        file.write(b"labels")
    published = buffer.getvalue()
    flags_and_time = bytes([0]) + struct.pack("<I", 7)
    stripped = published[:3] + flags_and_time + published[8:10]
    stripped += published[10 + len(stem) + 1 :]
    assert gzip.decompress(stripped) == b"labels"
    path = Path(os.devnull).with_name(name)
    monkeypatch.setattr(Path, "read_bytes", lambda self: stripped)
    assert builders.verified(path, url_info(published)) == published


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="dataset-fashion-mnist not installed")
def test_debians_files_are_the_published_ones():
    infos = builders.FashionMnist.source_files()
    assert len(infos) == 4
    for name, info in infos.items():
        content = builders.verified(DEBIAN / name, info)
        assert len(content) == int(info.size)


def test_cifar_archive(tmp_path, monkeypatch):
    rng, buffer, images = np.random.default_rng(0), io.BytesIO(), {}
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in builders.CIFAR10_TRAIN + builders.CIFAR10_TEST:
            images[name] = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
            records = b"".join(
                bytes([label]) + image.transpose(2, 0, 1).tobytes()
                for label, image in enumerate(images[name])
            )
            entry = tarfile.TarInfo(name)
            entry.size = len(records)
            tar.addfile(entry, io.BytesIO(records))
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(buffer.getvalue())
    infos = {f"http://x/{path.name}": url_info(buffer.getvalue())}
    monkeypatch.setattr(tfds.image_classification.Cifar10, "url_infos", infos)
    splits = load("cifar10", tmp_path, tmp_path)
    assert splits["train"].images.shape == (15, 32, 32, 3)
    order = np.argsort(splits["test"].labels)
    wanted = images[builders.CIFAR10_TEST[0]]
    np.testing.assert_array_equal(splits["test"].images[order], wanted)


def test_sets_that_tfds_prepared_itself_are_used(tmp_path):
    class Official(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "mnist"
        VERSION = tfds.core.Version("3.0.1")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {
                "train": self._generate_examples(6),
                "test": self._generate_examples(2),
            }

        def _generate_examples(self, n):
            for i in range(n):
                png = io.BytesIO()
                Image.fromarray(np.full((28, 28), 9 * i, np.uint8)).save(png, "PNG")
                png.seek(0)
                yield i, {"image": png, "label": i}

    builder = Official(data_dir=str(tmp_path / "data"))
    builder.download_and_prepare(
        file_format="array_record", download_dir=str(tmp_path / "unused")
    )
    splits = load("mnist", tmp_path)
    assert splits["train"].images.shape == (6, 28, 28, 1)
    np.testing.assert_array_equal(
        splits["train"].images[:, 0, 0, 0], 9 * splits["train"].labels
    )


def test_interrupted_preparation_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    def interrupted(self, images, labels):
        yield 0, {"image": np.zeros((8, 8, 1), np.uint8), "label": 0}
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builders.Digits, "_generate_examples", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("digits", tmp_path)
    # What a killed process leaves behind: its folder is complete but for the name.
    load("digits", tmp_path)
    whole = tmp_path / "data" / "digits" / "1.0.0"
    whole.rename(whole.with_name("incomplete.ABCDEF_1.0.0"))
    assert data.find_prepared("digits", str(tmp_path / "data")) is None
    assert len(load("digits", tmp_path)["train"].labels) == 1438


def test_two_processes_may_prepare_at_once(tmp_path, monkeypatch):
    arrays = builders.Digits.arrays

    def slower_than_another(self):
        monkeypatch.setattr(builders.Digits, "arrays", arrays)
        load("digits", tmp_path)  # the other process, from start to end
        return arrays(self)

    monkeypatch.setattr(builders.Digits, "arrays", slower_than_another)
    assert len(load("digits", tmp_path)["train"].labels) == 1438


def test_damaged_prepared_files_are_named(tmp_path):
    load("digits", tmp_path)
    [path] = (tmp_path / "data" / "digits" / "1.0.0").glob("digits-train*")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SetupError, match="1.0.0 cannot be read"):
        load("digits", tmp_path)


def make_batches(seed=0, examples=103, num_workers=4, batch_size=5):
    split = data.Split(
        np.arange(examples, dtype=np.uint8).reshape(-1, 1, 1, 1), np.arange(examples)
    )
    return data.Batches(
        split, seed=seed, num_workers=num_workers, batch_size=batch_size
    )


def test_every_worker_has_its_own_shard():
    batches = make_batches()
    seen = [set() for _ in range(4)]
    for step in range(20 * batches.steps_per_epoch):
        for worker in range(4):
            seen[worker].update(batches.indices(step, worker))
    assert sorted(len(s) for s in seen) == [25, 26, 26, 26]
    assert len(set.union(*seen)) == 103


def test_an_epoch_shows_every_example_once_and_the_next_in_another_order():
    batches = make_batches(examples=100)
    assert batches.steps_per_epoch == 5
    first = np.concatenate([batches.indices(s, 0) for s in range(5)])
    second = np.concatenate([batches.indices(s, 0) for s in range(5, 10)])
    assert len(set(first)) == 25
    assert set(first) == set(second)
    assert list(first) != list(second)


def test_batches_depend_on_seed_step_and_worker_only():
    together = make_batches().at(7, range(4))
    apart = [make_batches().at(7, workers) for workers in (range(2), range(2, 4))]
    for key in together:
        split = np.concatenate([part[key] for part in apart])
        np.testing.assert_array_equal(together[key], split)
    other = make_batches(seed=1).at(7, range(4))
    assert not np.array_equal(together["label"], other["label"])


def test_more_than_a_shard_in_a_batch_is_refused():
    with pytest.raises(SetupError, match="config.batch_size=26 on each of 4"):
        make_batches(examples=103, batch_size=26)


@pytest.mark.parametrize("examples", [1, 11, 12, 13, 100])
def test_evaluation_sees_every_example_exactly_once(examples):
    split = data.Split(np.zeros((examples, 1, 1, 1), np.uint8), np.arange(examples))
    seen = []
    parts = [
        data.evaluation_batches(split, workers=w, num_workers=4, batch_size=3)
        for w in (range(2), range(2, 4))
    ]
    for part in parts:
        for batch in part:
            assert batch["label"].shape == (2, 3)
            seen += list(batch["label"][batch["weight"] == 1])
    assert sorted(seen) == list(range(examples))
