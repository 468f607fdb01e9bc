"""CamVid from a folder of PNG files; generated sets that stand in for real ones."""

import json
import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
import training
from PIL import Image

from train import build, data, generated
from train.builders import Cifar10
from train.camvid import SPLITS, Camvid
from train.checks import check
from train.errors import SetupError
from train.generated import GeneratedCamvid, GeneratedCifar10, GeneratedImagenet
from train.prepared import BUILDERS

SIZE = (12, 16)  # in the place of 360 x 480


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two pairs in every split."""
    monkeypatch.setattr(Camvid, "SIZE", SIZE)
    rng = np.random.default_rng(0)
    for split in SPLITS:
        for part, high, shape in (
            (split, 256, (*SIZE, 3)),
            (f"{split}annot", 12, SIZE),
        ):
            (tmp_path / part).mkdir()
            for i in range(2):
                pixels = rng.integers(0, high, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / f"{i}.png")
    return tmp_path


def load(folder, **settings):
    return data.load(
        "camvid", data_dir=str(folder / "data"), source_dir=str(folder), **settings
    )


def read(path):
    return np.asarray(Image.open(path))


def test_images_come_with_their_masks(folder):
    split = load(folder)["test"]
    assert split.images.dtype == split.labels.dtype == np.uint8
    order = {read(folder / "test" / f"{i}.png").tobytes(): i for i in range(2)}
    for image, mask in zip(split.images, split.labels, strict=True):
        name = f"{order.pop(image.tobytes())}.png"
        np.testing.assert_array_equal(mask, read(folder / "testannot" / name))
    assert not order


def test_they_are_resized_together(folder):
    split = load(folder, size=(6, 8))["train"]
    assert split.images.shape == (2, 6, 8, 3)
    np.testing.assert_array_equal(
        split.labels, load(folder)["train"].labels[:, 1::2, 1::2]
    )


def write(shape, high, path):
    pixels = np.full(shape, high, np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "trainannot" / "1.png").unlink(), "train/1.png has no partner"),
        (lambda f: (f / "val" / "0.png").unlink(), "valannot/0.png has no partner"),
        (
            lambda f: write((6, 16, 3), 0, f / "test" / "0.png"),
            "test/0.png is 16 x 6, wanted 16 x 12",
        ),
        (
            lambda f: write(SIZE, 12, f / "trainannot" / "0.png"),
            "trainannot/0.png has the label 12; labels are 0 to 10",
        ),
        (
            lambda f: write((*SIZE, 3), 5, f / "trainannot" / "0.png"),
            "one label for each pixel, got 3 channels",
        ),
        (
            lambda f: (f / "train" / "0.png").write_bytes(b"no image"),
            "train/0.png cannot be read",
        ),
        (lambda f: [p.unlink() for p in f.glob("val*/*")], "val holds no PNG images"),
        (
            lambda f: (f / "valannot").rename(f / "x"),
            "lacks valannot.",
        ),
    ],
)
def test_what_does_not_belong_together_is_named(folder, change, words):
    change(folder)
    with pytest.raises(SetupError) as error:
        load(folder)
    assert words in str(error.value)
    assert data.find_prepared("camvid", str(folder / "data")) is None


def test_without_a_folder_it_says_what_is_wanted(tmp_path):
    with pytest.raises(SetupError) as error:
        data.load("camvid", data_dir=str(tmp_path), source_dir="")
    for words in ("trainannot", "480 x 360", "--config.data.source_dir=FOLDER"):
        assert words in str(error.value)


FEW = {"train": 40, "val": 2, "validation": 40, "test": 20}
STAND_INS = {
    GeneratedCifar10: Cifar10,
    GeneratedCamvid: Camvid,
    GeneratedImagenet: tfds.builder_cls("imagenet2012"),
}


@pytest.mark.parametrize("made", STAND_INS, ids=lambda made: made.name)
def test_elements_of_a_stand_in_are_like_those_of_the_real_set(made, tmp_path):
    one, other = (
        cls(data_dir=str(tmp_path)).info.features for cls in (made, STAND_INS[made])
    )
    for key in ("image", "label"):
        assert one[key].get_tensor_info() == other[key].get_tensor_info()
    if one["label"].shape == ():
        assert one["label"].num_classes == other["label"].num_classes
    assert made.name.startswith("generated_")


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Loads a stand-in of few examples."""

    def load(made, **settings):
        few = {split: FEW[split] for split in made.EXAMPLES}
        monkeypatch.setattr(made, "EXAMPLES", few)
        return data.load(made.name, data_dir=str(tmp_path), source_dir="", **settings)

    return load


def test_classes_of_a_stand_in_can_be_told_apart(few):
    """By the distance to the means of their training images."""
    small = {
        "cifar10": few(GeneratedCifar10),
        "imagenet": few(GeneratedImagenet, size=(16, 16), test_split="validation"),
    }
    for splits in small.values():
        train, test = (s.batch(np.arange(s.examples)) for s in splits.values())
        classes = np.unique(train["label"])
        means = [train["image"][train["label"] == c].mean(0) for c in classes]
        apart = [((test["image"] - m) ** 2).sum((1, 2, 3)) for m in means]
        found = classes[np.argmin(apart, axis=0)]
        assert (found == test["label"]).mean() > 0.9


def test_masks_of_a_stand_in_can_be_learned(few, monkeypatch):
    monkeypatch.setattr(GeneratedCamvid, "SIZE", (60, 120))
    monkeypatch.setattr(GeneratedCamvid, "SQUARE", 10)
    splits = few(GeneratedCamvid)
    train, test = splits["train"], splits["test"]
    assert set(np.unique(train.labels)) == set(range(12))
    means = np.stack([train.images[train.labels == c].mean(0) for c in range(12)])
    found = ((test.images[..., None, :] - means) ** 2).sum(-1).argmin(-1)
    assert (found == test.labels).mean() > 0.7


def test_a_stand_in_is_always_the_same(tmp_path):
    builder = GeneratedCamvid(data_dir=str(tmp_path))
    one, two = (next(builder.pairs("val")) for _ in range(2))
    np.testing.assert_array_equal(one[1], two[1])
    one, two = (generated.picture(c, (8, 8), np.random.default_rng(0)) for c in (0, 1))
    assert (one != two).any()


SETUPS = ("pspnet_camvid", "resnet101_imagenet", "resnet50_cifar10")


@pytest.mark.parametrize("setup", SETUPS)
def test_a_large_setup_has_a_small_run_on_generated_data(setup):
    path = training.ROOT / "configs" / f"{setup}.py"
    get_config = runpy.run_path(str(path))["get_config"]
    config = get_config("generated,lgc_ring")
    check(config)
    assert (config.setup, config.run) == (f"generated_{setup}", ("lgc_ring",))
    assert config.data.name in BUILDERS
    assert config.data.name.startswith("generated_")
    assert get_config("generated").run == get_config().run
    # All three stages are passed.
    stages = config.methods.lgc_ring
    assert 0 < stages.dense_until < stages.training_until < config.steps


def test_pspnet_gives_every_pixel_a_loss():
    from configs import pspnet_camvid

    config = pspnet_camvid.get_config("generated,dense")
    task = build.task(config)
    size = config.data.size
    batch = {
        "image": jax.ShapeDtypeStruct((2, *size, 3), "uint8"),
        "label": jax.ShapeDtypeStruct((2, *size), "uint8"),
    }
    params, model_state = jax.eval_shape(task.init, jax.random.key(0), batch)
    loss, after = jax.eval_shape(task.loss, params, model_state, batch)
    assert loss.shape == ()
    assert jax.tree.structure(after) == jax.tree.structure(model_state)


def test_results_on_generated_data_say_so(few, tmp_path):
    """Of a setup that is not made for them, too."""
    few(GeneratedCifar10)  # 40 images
    command = [
        sys.executable,
        "-m",
        "train.main",
        f"--config={training.ROOT}/configs/cifar10.py:dense",
        "--config.data.name=generated_cifar10",
        f"--config.data.data_dir={tmp_path}",
        "--config.model.channels=(1,)",
        "--config.model.hidden=1",
        "--config.num_workers=1",
        "--config.batch_size=4",
        "--config.steps=1",
        f"--workdir={tmp_path / 'run'}",
    ]
    output, _ = training.launch(command).communicate(timeout=120)
    assert "generated_cifar10, 1 workers; bytes of one of them" in output
    assert "generated_cifar10" in Path(tmp_path / "run" / "summary.json").read_text()
    [summary] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["setup"] == "generated_cifar10"
