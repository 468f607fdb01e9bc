"""A run whose gradients stay bad stops and names the first of them."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import training

from train import build
from train.data import Batches
from train.errors import RunError
from train.skips import Skips

MARK = 99  # a pixel that no digit has: it spoils the gradient of one leaf


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return training.splits_in(tmp_path_factory.mktemp("data"))


@pytest.fixture
def spoil(monkeypatch):
    """``spoil({step: (worker, (module, leaf))})``, steps counted from 1."""
    plan, task, at = {}, build.task, Batches.at

    def fragile(config):
        built = task(config)

        def loss(params, model_state, batch):
            value, model_state = built.loss(params, model_state, batch)
            for number, (_, (module, leaf)) in plan.items():
                marked = (batch["image"] == MARK + number).any()
                factor = jnp.where(marked, jnp.nan, 0.0)
                value += factor * params[module][leaf].sum()
            return value, model_state

        return built._replace(loss=loss)

    def marked(self, step, workers):
        batch = at(self, step, workers)
        if step + 1 in plan:
            batch["image"][plan[step + 1][0], 0, 0, 0] = MARK + step + 1
        return batch

    monkeypatch.setattr(build, "task", fragile)
    monkeypatch.setattr(Batches, "at", marked)
    return plan.update


def test_a_run_stops_and_names_step_worker_and_leaf(splits, tmp_path, spoil):
    spoil({2: (0, ("Dense_0", "bias"))})  # one alone does not count
    spoil({4: (1, ("Dense_1", "kernel")), 5: (0, ("Conv_0", "bias"))})
    config = training.config_of("topk", max_consecutive_skips=2, checkpoint_every=3)
    with pytest.raises(RunError) as error:
        training.run(config, tmp_path, splits)
    words = str(error.value)
    assert words.startswith("stopped at step 5: ")
    assert "config.max_consecutive_skips=2" in words
    where = "In step 4 worker 1's gradient of Dense_1/kernel was not finite (1 of 6"
    assert where in words
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["3"]
    saved = training.saved(tmp_path, 3)
    assert all(np.isfinite(x).all() for x in saved.values())


def test_steps_skipped_before_a_stop_count_after_it(splits, tmp_path, spoil):
    spoil({step: (1, ("Dense_1", "kernel")) for step in (3, 4, 5)})
    config = training.config_of("topk", max_consecutive_skips=3)
    with pytest.raises(training.Stopped):
        training.run(config, tmp_path, splits, stop_after=4)
    with pytest.raises(RunError, match="at step 5: of the latest 3.* In step 5 worker"):
        training.run(config, tmp_path, splits)


def test_the_state_waits_where_the_next_step_may_be_the_last():
    def may_end(limit, rows):
        skips, found = Skips(limit, start=0, look=str), []
        for step, in_a_row in enumerate(rows, 1):
            found.append(skips.may_end)
            skips.add(step, in_a_row)
        return [*found, skips.may_end]

    # What a checkpoint brings is not known before the first step.
    assert may_end(2, [0, 0, 1, 0]) == [True, False, False, True, False]
    assert may_end(1, [0, 0]) == [True, True, True]
    assert may_end(0, [1, 2, 3]) == [False] * 4
    with pytest.raises(RunError, match="at step 3: of the latest 2 .* In step 2 2"):
        may_end(2, [0, 1, 2])


class NetWithStatistics(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x, train):
        x = x.reshape(x.shape[0], -1)
        x = jnp.where(x.max() > 2, jnp.nan, x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(self.num_classes)(x)


def test_never_means_never_and_statistics_stay_good(
    splits, tmp_path, monkeypatch, spoil
):
    spoil({step: (1, ("Dense_0", "bias")) for step in (5, 6)})  # pixels above 2 * 16
    monkeypatch.setitem(build.MODELS, "with_statistics", NetWithStatistics)
    config = training.config_of("topk", max_consecutive_skips=0, checkpoint_every=4)
    with config.unlocked():
        config.model = {"name": "with_statistics", "num_classes": 10}
    training.run(config, tmp_path, splits)
    before, after = (training.saved(tmp_path, step) for step in (4, 6))
    means = [name for name in before if name.endswith("BatchNorm_0.mean")]
    assert len(means) == 1
    assert before[means[0]].any()
    np.testing.assert_array_equal(after[means[0]], before[means[0]])
