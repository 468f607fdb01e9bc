"""Images brought to a size, and splits that read them from the disk when wanted."""

import io

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from train import data, images
from train.errors import SetupError

SIZE = (6, 8)


def places(height, width):
    """Each pixel holds its row and its column, and is else black."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, 0 * rows], -1).astype(np.uint8)


def test_a_mask_is_resized_by_the_nearest_label():
    mask = np.arange(12, dtype=np.uint8).reshape(3, 4)
    twice = np.kron(mask, np.ones((2, 2), np.uint8))
    np.testing.assert_array_equal(images.resize(mask, (6, 8)), twice)
    np.testing.assert_array_equal(images.resize(twice, (3, 4)), twice[1::2, 1::2])


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_resized_channel_by_channel(channels):
    image = np.random.default_rng(0).integers(0, 256, (9, 6, channels), dtype=np.uint8)
    assert images.resize(image, (9, 6)) is image
    small = images.resize(image, (3, 2))
    assert small.shape == (3, 2, channels) and small.dtype == np.uint8
    flat = np.full((9, 6, channels), 7, np.uint8)
    assert (images.resize(flat, (4, 5)) == 7).all()


def test_the_centre_is_seven_eighths_of_what_fits():
    image = places(24, 16)  # higher than wanted: 16 columns, of which 14 are taken
    found = images.centre_crop(Image.fromarray(image), (14, 14))
    np.testing.assert_array_equal(found, image[5:19, 1:15])


def test_a_random_crop_is_a_part_of_the_image_and_half_of_them_are_mirrored():
    image, mirrored, areas = Image.fromarray(places(100, 120)), 0, []
    for seed in range(200):
        found = images.random_crop(image, (5, 5), np.random.default_rng(seed))
        rows, columns = (np.diff(found[..., i].astype(int), axis=i) for i in (0, 1))
        assert (rows >= 0).all()
        assert (columns >= 0).all() or (columns <= 0).all()
        mirrored += (columns <= 0).all()
        # 5 of 5 pixels show the whole, their middles 4 / 5 of it.
        high, wide = (np.ptp(found[..., i].astype(int)) * 5 / 4 for i in (0, 1))
        areas.append(high * wide / (100 * 120))
    assert 70 < mirrored < 130
    assert 0.05 < min(areas) < 0.15 and 0.8 < max(areas) < 1.05


def test_a_very_long_image_gives_its_centre():
    found = images.random_crop(
        Image.fromarray(places(1, 200)), (4, 4), np.random.default_rng(0)
    )
    assert found.shape == (4, 4, 3)


def test_a_mask_moves_as_its_image():
    mask = np.random.default_rng(0).integers(0, 12, (16, 24), dtype=np.uint8)
    seen = set()
    for seed in range(20):
        image, label = images.shift_and_flip(
            mask[..., None], mask, np.random.default_rng(seed)
        )
        np.testing.assert_array_equal(image[..., 0], label)
        assert label.shape == mask.shape
        seen.add(label.tobytes())
    assert len(seen) > 10


def test_a_shift_is_by_an_eighth_at_most():
    image = places(16, 24)
    for seed in range(50):
        found, label = images.shift_and_flip(
            image, np.int32(3), np.random.default_rng(seed)
        )
        assert label == 3
        middle = found[8, 12].astype(int)
        assert (
            abs(middle[0] - 8) <= 2 and min(abs(middle[1] - c) for c in (11, 12)) <= 3
        )


@pytest.fixture(scope="module")
def various(tmp_path_factory):
    """A folder with a set of 20 images of various sizes, one of them gray."""

    class Various(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "various"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(encoding_format="png"),
                "label": tfds.features.ClassLabel(num_classes=20),
            }
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {name: self._generate_examples() for name in ("train", "validation")}

        def _generate_examples(self):
            for i in range(20):
                rng = np.random.default_rng(i)
                shape = (*rng.integers(8, 20, size=2), 3)[: 2 if i == 7 else 3]
                file = io.BytesIO()
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(file, "PNG")
                file.seek(0)
                yield i, {"image": file, "label": i}

    folder = tmp_path_factory.mktemp("various")
    builder = Various(data_dir=str(folder))
    builder.download_and_prepare(
        file_format="array_record", download_dir=str(folder / "unused")
    )
    return folder


def load(folder, **settings):
    settings = {"size": SIZE, "test_split": "validation", "augment": True, **settings}
    return data.load("various", data_dir=str(folder), source_dir="", **settings)


def test_a_split_on_the_disk_gives_what_reading_gives(various):
    test = load(various)["test"]
    assert test.examples == 20
    source = tfds.builder_from_directory(various / "various" / "1.0.0").as_data_source(
        split="validation"
    )
    chosen = np.arange(20).reshape(4, 5)[::-1]
    batch = test.batch(chosen, draw=(0, 0))  # what is tested on is not changed
    assert batch["image"].shape == (4, 5, *SIZE, 3)
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    for place in np.ndindex(chosen.shape):
        example = source[int(chosen[place])]
        wanted = images.centre_crop(Image.fromarray(example["image"]), SIZE)
        np.testing.assert_array_equal(batch["image"][place], wanted)
        assert batch["label"][place] == example["label"]


def test_training_images_depend_on_seed_epoch_and_example_only(various):
    train = load(various)["train"]
    chosen = np.array([3, 1, 7])
    together = train.batch(chosen, draw=(5, 2))["image"]
    for image, number in zip(together, chosen, strict=True):
        alone = train.batch(np.array([number]), draw=(5, 2))["image"]
        np.testing.assert_array_equal(alone[0], image)
    for other in ((6, 2), (5, 3), None):
        assert (train.batch(chosen, draw=other)["image"] != together).any()
    plain = load(various, augment=False)["train"]
    np.testing.assert_array_equal(
        plain.batch(chosen, draw=(5, 2))["image"], train.batch(chosen)["image"]
    )


@pytest.mark.parametrize("lazy", [True, False])
def test_batches_of_changed_images_depend_on_seed_step_and_worker_only(various, lazy):
    split = load(various)["train"]
    if not lazy:
        numbers = np.arange(20)
        split = data.Split(split.batch(numbers)["image"], numbers, augment=True)
    batches = data.Batches(split, seed=3, num_workers=2, batch_size=4)
    together = batches.at(5, range(2))
    apart = [batches.at(5, [worker]) for worker in range(2)]
    for key in together:
        joined = np.concatenate([part[key] for part in apart])
        np.testing.assert_array_equal(together[key], joined)
    tested = data.evaluation_batches(split, workers=[1], num_workers=2, batch_size=4)
    first = next(tested)
    np.testing.assert_array_equal(
        first["image"][0], split.batch(np.arange(4, 8))["image"]
    )


def test_images_of_various_sizes_need_a_size(various):
    with pytest.raises(SetupError, match=r"config.data.size=\(\).*various sizes"):
        load(various, size=())


def test_a_split_that_is_not_there_is_named(various):
    with pytest.raises(SetupError, match="test_split='test'.*train, validation"):
        load(various, test_split="test")


def test_a_damaged_file_is_named_when_it_is_read(various):
    split = load(various)["train"]
    split._source = [{"image": b"no image", "label": 0}] * 20
    with pytest.raises(SetupError, match=r"1\.0\.0 cannot be read"):
        split.batch(np.arange(3))
