"""Classes of pixels: loss and figures by NumPy from their definitions, without void."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training

from train import build, data, tasks
from train.errors import SetupError
from train.history import read

CLASSES, VOID = 4, 9


class Echo(nn.Module):
    """The image's channels are its logits; the auxiliary head's are twice as large."""

    @nn.compact
    def __call__(self, x, train):
        one = self.param("one", nn.initializers.ones, ())
        return x * one, 2 * x * one


class TwoHeads(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(8, (1, 1))(x))
        heads = [nn.Conv(self.num_classes, (1, 1))(x) for _ in range(2)]
        return tuple(heads)


class OneHead(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        return nn.Conv(self.num_classes, (1, 1))(x)


TASK = tasks.segmentation(Echo(), max_value=1.0, void=VOID)
ONE = {"one": jnp.ones(())}


def made_batch(seed=0, examples=6, size=(5, 7)):
    """The last class occurs neither in the truth nor among the predictions."""
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(examples, *size, CLASSES)).astype(np.float32)
    image[..., -1] = -9
    label = rng.choice([0, 1, 2, VOID], size=(examples, *size)).astype(np.uint8)
    return {"image": image, "label": label, "weight": np.ones(examples, np.float32)}


def cross_entropy(logits, label):
    """Of every pixel that is not void."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_p[label != VOID][np.arange((label != VOID).sum()), label[label != VOID]]


def iou_by_sets(truth, prediction):
    truth, prediction = truth[truth != VOID], prediction[truth != VOID]
    each = [
        ((truth == c) & (prediction == c)).sum()
        / ((truth == c) | (prediction == c)).sum()
        for c in {*truth, *prediction}
    ]
    return np.mean(each)


def test_loss_is_the_mean_over_pixels_of_both_heads():
    batch = made_batch()
    loss, model_state = TASK.loss(ONE, {}, batch)
    main, auxiliary = (
        cross_entropy(scale * batch["image"], batch["label"]).mean() for scale in (1, 2)
    )
    np.testing.assert_allclose(loss, main + 0.4 * auxiliary, rtol=1e-5)
    assert model_state == {}


def test_figures_are_those_of_their_definitions():
    batch = made_batch()
    totals = jax.device_get(TASK.evaluate(ONE, {}, batch))
    truth, prediction = batch["label"], batch["image"].argmax(-1)
    figures = {name: figure(totals) for name, figure in TASK.figures.items()}
    right = (truth == prediction)[truth != VOID]
    np.testing.assert_allclose(figures["mean_iou"], iou_by_sets(truth, prediction))
    np.testing.assert_allclose(figures["pixel_accuracy"], right.mean())
    wanted = cross_entropy(batch["image"], truth).mean()
    np.testing.assert_allclose(figures["loss"], wanted, rtol=1e-5)
    assert TASK.score == "mean_iou"


def test_what_is_void_changes_nothing():
    batch, other = made_batch(), made_batch()
    void = batch["label"] == VOID
    other["image"][void] = np.random.default_rng(1).normal(size=(void.sum(), CLASSES))
    assert TASK.loss(ONE, {}, batch)[0] == TASK.loss(ONE, {}, other)[0]
    one, two = (TASK.evaluate(ONE, {}, b) for b in (batch, other))
    assert one.loss == two.loss
    np.testing.assert_array_equal(one.confusion, two.confusion)


def test_nothing_but_void_is_no_loss_and_no_gradient():
    batch = made_batch()
    batch["label"][:] = VOID
    (loss, _), slope = jax.value_and_grad(TASK.loss, has_aux=True)(ONE, {}, batch)
    assert loss == 0 and slope["one"] == 0
    totals = jax.device_get(TASK.evaluate(ONE, {}, batch))
    assert [figure(totals) for figure in TASK.figures.values()] == [0, 0, 0]


def test_totals_add_up_over_batches_and_examples_of_no_weight_add_nothing():
    whole = made_batch()
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in (0, 2, 4)]
    parts.append({**parts[0], "weight": np.zeros(2, np.float32)})
    totals = TASK.evaluate(ONE, {}, whole)
    summed = jax.tree.map(
        lambda *x: np.sum(x, axis=0), *(TASK.evaluate(ONE, {}, p) for p in parts)
    )
    np.testing.assert_array_equal(summed.confusion, totals.confusion)
    np.testing.assert_allclose(summed.loss, totals.loss, rtol=1e-5)


def segmentation_config():
    config = training.config_of("dense", eval_batch_size=3)
    with config.unlocked():
        config.model = {"name": "two_heads", "num_classes": CLASSES}
    config.task, config.data.void = "segmentation", VOID
    return config


def test_the_trainer_reports_the_mean_iou_of_the_whole_test_split(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(build.MODELS, "two_heads", TwoHeads)
    config = segmentation_config()
    splits = {}
    for seed, (name, examples) in enumerate((("train", 16), ("test", 7))):
        rng = np.random.default_rng(seed)
        image = rng.integers(0, 17, (examples, 4, 4, 3), dtype=np.uint8)
        label = image.argmax(-1).astype(np.uint8)
        label[rng.random(label.shape) < 0.2] = VOID
        splits[name] = data.Split(image, label)
    summary, text = training.run(config, tmp_path, splits)
    arrays = training.saved(tmp_path, config.steps)
    params = {"Conv_0": {}, "Conv_1": {}, "Conv_2": {}}
    for name, array in arrays.items():
        if name.startswith("shared.params."):
            module, leaf = name.split(".")[2:]
            params[module][leaf] = array
    test = splits["test"]
    logits, _ = TwoHeads(CLASSES).apply({"params": params}, test.images / 16, False)
    wanted = iou_by_sets(test.labels, np.asarray(logits).argmax(-1))
    np.testing.assert_allclose(summary["mean_iou"], wanted, rtol=1e-6)
    assert "accuracy" not in summary
    assert [row["mean_iou"] for row in read(tmp_path)][-1] == summary["mean_iou"]
    assert f"mean IoU {wanted:.2%}" in text


@pytest.mark.parametrize(
    ("task", "model", "words"),
    [
        ("segmentation", "one_head", "two heads of logits"),
        ("segmentation", "lenet", "two heads of logits"),
        ("classification", "two_heads", "logits for every image"),
        ("detection", "lenet", "config.task='detection'.*classification, segmentation"),
    ],
)
def test_a_model_that_does_not_do_its_task_is_refused(task, model, words, monkeypatch):
    monkeypatch.setitem(build.MODELS, "two_heads", TwoHeads)
    monkeypatch.setitem(build.MODELS, "one_head", OneHead)
    config = segmentation_config()
    config.task, config.model.name = task, model
    batch = {"image": jnp.zeros((1, 16, 16, 3), jnp.uint8)}
    with pytest.raises(SetupError, match=words):
        jax.eval_shape(build.task(config).init, jax.random.key(0), batch)
