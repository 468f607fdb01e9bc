import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training

from train import build, main, report
from train.data import Batches
from train.errors import SetupError
from train.history import read
from train.ledger import Ledger
from train.parallel import AXIS, Workers, start


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return training.splits_in(tmp_path_factory.mktemp("data"))


def ledger_of(config):
    """The bytes of a config's one method, without training."""
    [method] = config.run
    tx = build.optimizer(config, method)
    image = jnp.zeros((1, 8, 8, 1), jnp.uint8)
    params, _ = jax.eval_shape(
        build.task(config).init, jax.random.key(0), {"image": image}
    )
    return Ledger(tx, params, axis_name=AXIS, num_workers=config.num_workers)


def default_config(methods):
    from configs import digits

    return digits.get_config(methods)


SUMMARY = {
    "method",
    "workers",
    "steps",
    "accuracy",
    "loss",
    "payload_up_bytes",
    "payload_down_bytes",
    "payload_up_bytes_per_step",
    "payload_down_bytes_per_step",
    "dense_bytes",
    "dense_bytes_per_step",
    "ratio",
    "ratio_per_step",
    "step_ms",
}


def test_summary_says_what_was_sent(splits, tmp_path):
    config = training.config_of("topk", density=0.1)
    summary, text = training.run(config, tmp_path, splits)
    assert set(summary) == SUMMARY
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    up = summary["payload_up_bytes_per_step"]
    assert summary["payload_up_bytes"] == 6 * up
    # The one other worker's message comes down, and both hear whether to skip.
    assert summary["payload_down_bytes"] == 6 * summary["payload_down_bytes_per_step"]
    entries = summary["dense_bytes_per_step"] // 4
    assert 2 * np.ceil(0.1 * entries) < up < 4 * np.ceil(0.1 * entries)
    assert summary["ratio"] == summary["dense_bytes"] / summary["payload_up_bytes"]
    rows = read(tmp_path)
    assert [r["step"] for r in rows] == [0, 3, 6]
    assert [r["payload_up_bytes"] for r in rows] == [0, 3 * up, 6 * up]
    assert (rows[-1]["loss"], rows[-1]["accuracy"]) == (
        summary["loss"],
        summary["accuracy"],
    )
    assert "topk 6/6" in text


@pytest.mark.parametrize("num_workers", [1, 3])
def test_dense_training_is_training_with_one_large_batch(splits, tmp_path, num_workers):
    config = training.config_of("dense", num_workers=num_workers)
    summary, _ = training.run(config, tmp_path, splits)

    task, tx = build.task(config), optax.sgd(build.learning_rate(config), 0.9)
    batches = Batches(
        splits["train"], seed=0, num_workers=num_workers, batch_size=config.batch_size
    )
    whole = [
        jax.tree.map(np.concatenate, batches.at(step, range(num_workers)))
        for step in range(config.steps)
    ]
    params, _ = task.init(jax.random.key(config.seed), whole[0])
    state = tx.init(params)
    for batch in whole:
        grads = jax.grad(task.loss, has_aux=True)(params, {}, batch)[0]
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
    test = {"image": splits["test"].images, "label": splits["test"].labels}
    totals = task.evaluate(params, {}, {**test, "weight": np.ones(359)})

    assert summary["accuracy"] == totals.correct / 359
    np.testing.assert_allclose(summary["loss"], totals.loss / 359, rtol=1e-5)
    for name, array in training.saved(tmp_path, config.steps).items():
        if name.startswith("shared.params."):
            module, leaf = name.split(".")[2:]
            np.testing.assert_allclose(
                array, params[module][leaf], rtol=1e-4, atol=1e-6
            )


def test_bytes_follow_the_phases_of_a_warm_up(splits, tmp_path):
    warm_up = {"warmup_densities": (0.5, 0.25), "warmup_steps": 4}
    config = training.config_of(
        "dgc",
        eval_every=1,
        **{f"methods.dgc.{key}": value for key, value in warm_up.items()},
    )
    summary, _ = training.run(config, tmp_path, splits)
    ledger = ledger_of(config)
    ups = [ledger.per_step(phase)[0] for phase in (0, 0, 1, 1, 2, 2)]
    assert ups[0] > ups[2] > ups[4]
    sent = [row["payload_up_bytes"] for row in read(tmp_path)]
    assert list(np.diff(sent)) == ups
    assert summary["payload_up_bytes"] == sum(ups)
    assert summary["payload_up_bytes_per_step"] == ups[-1]


def test_bytes_follow_the_ladder_of_the_server(splits, tmp_path, monkeypatch):
    rungs, add = [], Ledger.add

    def noted(self, *, rung, **taken):
        rungs.append(rung)
        add(self, rung=rung, **taken)

    monkeypatch.setattr(Ledger, "add", noted)
    config = training.config_of("server", eval_every=1, density=0.1)
    training.run(config, tmp_path, splits)
    ledger = ledger_of(config)
    for way, name in enumerate(("up", "down")):
        steps = np.diff([row[f"payload_{name}_bytes"] for row in read(tmp_path)])
        assert list(steps) == [ledger.per_step(0, rung)[way] for rung in rungs]
        assert ledger.per_step(0, rungs[0])[way] > ledger.per_step(0, 0)[way]


def test_a_step_with_an_undefined_gradient_costs_no_message(
    splits, tmp_path, monkeypatch
):
    task = build.task

    def fragile(config):
        """A task whose loss is undefined on a black picture."""
        built = task(config)

        def loss(params, model_state, batch):
            value, model_state = built.loss(params, model_state, batch)
            black = (batch["image"] == 0).all(axis=(1, 2, 3)).any()
            return value / jnp.where(black, 0.0, 1.0) * 1.0, model_state

        return built._replace(loss=loss)

    at = Batches.at

    def one_black_picture(self, step, workers):
        batch = at(self, step, workers)
        if step == 3:
            batch["image"][-1, 0] = 0  # of the last worker only
        return batch

    monkeypatch.setattr(build, "task", fragile)
    monkeypatch.setattr(Batches, "at", one_black_picture)
    config = training.config_of("topk", eval_every=1)
    training.run(config, tmp_path, splits)
    ledger = ledger_of(config)
    sent, skipped = ledger.per_step(0)[0], ledger.per_step(0, finite=False)[0]
    assert skipped < sent / 2
    rows = read(tmp_path)
    steps = list(np.diff([row["payload_up_bytes"] for row in rows]))
    assert steps == [sent, sent, sent, skipped, sent, sent]
    assert rows[3]["loss"] == rows[4]["loss"] != rows[5]["loss"]


@pytest.mark.parametrize("method", ["topk", "dgc", "random_k"])
def test_default_sends_110_times_fewer_bytes_than_dense(method):
    ledger = ledger_of(default_config(method))
    last = {"topk": 0, "dgc": 3, "random_k": 0}[method]
    up, _ = ledger.per_step(last)
    assert ledger.dense_per_step >= 110 * up


class NetWithStatistics(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(4)(x.reshape(x.shape[0], -1))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(self.num_classes)(x)


def test_only_the_first_step_compiles(splits, tmp_path):
    lowered = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            lowered.append(event) if "jaxpr_to_mlir" in event else None
        )
    )
    counts = []
    for steps in (1, 2, 5):  # the first run also makes what all runs share
        lowered.clear()
        config = training.config_of("topk", steps=steps)
        training.run(config, tmp_path / str(steps), splits)
        counts.append(len(lowered))
    assert counts[1] == counts[2] == 3  # initial state, evaluation, step


def test_batch_statistics_are_each_workers_own(splits, tmp_path, monkeypatch):
    monkeypatch.setitem(build.MODELS, "with_statistics", NetWithStatistics)
    config = training.config_of("topk")
    with config.unlocked():
        config.model = {"name": "with_statistics", "num_classes": 10}
    training.run(config, tmp_path, splits)
    arrays = training.saved(tmp_path, config.steps)
    [mean] = [
        a for n, a in arrays.items() if n.endswith("batch_stats.BatchNorm_0.mean")
    ]
    assert mean.shape == (2, 4)
    assert (mean[0] != mean[1]).any()


def test_parameters_that_would_differ_are_found_before_training(
    splits, tmp_path, monkeypatch
):
    without_exchange = lambda num_workers: optax.identity()  # noqa: E731
    monkeypatch.setitem(build.TRANSFORMS, "dense", without_exchange)
    with pytest.raises(ValueError, match="parameters would differ between workers"):
        training.run(training.config_of("dense"), tmp_path, splits)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_run_folder_is_found_before_training(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder is wanted")
    with pytest.raises(SetupError, match="cannot be written.*--workdir"):
        main.make_folder(tmp_path / "runs" / "topk")


def test_too_few_devices_say_what_to_do():
    with pytest.raises(
        SetupError, match="num_workers=9 needs 9 devices.*JAX_PLATFORMS"
    ):
        Workers(9)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_workers": 3, "num_processes": 2}, "belong together"),
        ({"num_workers": 0}, "positive multiple"),
        (
            {
                "num_workers": 3,
                "coordinator": "localhost:1",
                "num_processes": 2,
                "process_id": 0,
            },
            "config.num_workers=3 .*number of processes, 2",
        ),
    ],
)
def test_workers_that_cannot_be_dealt_out_are_refused(flags, words):
    with pytest.raises(SetupError, match=words):
        start(**flags)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (999_600, "1 MB"),
        (2**50, "1.13e+03 TB"),
    ],
)
def test_bytes_for_people(count, text):
    assert report.human_bytes(count) == text


def test_the_program_leaves_a_table_a_picture_and_summaries(tmp_path):
    config = training.config_of("dense,topk")
    process = training.launch(training.command(config, tmp_path, tmp_path / "data"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    summaries = json.loads((tmp_path / "summary.json").read_text())
    assert [s["method"] for s in summaries] == ["dense", "topk"]
    for s in summaries:
        own = json.loads((tmp_path / s["method"] / "summary.json").read_text())
        assert own == s
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    for words in ("2 workers", "accuracy", "ratio", "topk 6/6", "results.png"):
        assert words in output

    # One method by itself, finished before: the comparison keeps the others.
    config = training.config_of("topk")
    process = training.launch(training.command(config, tmp_path, tmp_path / "data"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "summary.json").read_text()) == summaries[::-1]


def test_what_a_user_can_put_right_comes_without_a_traceback(tmp_path):
    arguments = [sys.executable, "-m", "train.main", "--config.data.name=digit"]
    process = training.launch([*arguments, f"--workdir={tmp_path}"])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.startswith("error: config.data.name='digit'")
    assert "Traceback" not in output
