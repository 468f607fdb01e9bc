import json
import shutil
import signal

import jax
import numpy as np
import pytest
import training

from train import checkpoint, lock
from train.errors import SetupError
from train.history import ROW, read
from train.loop import Stopped
from train.parallel import Workers


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return training.splits_in(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, splits):
    """A finished run of top-k, and its config."""
    config = training.config_of("topk")
    folder = tmp_path_factory.mktemp("undisturbed")
    training.run(config, folder, splits)
    return config, folder


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_a_resumed_run_ends_with_the_same_bits(
    undisturbed, splits, tmp_path, stop_after
):
    config, whole = undisturbed
    with pytest.raises(Stopped, match=f"after step {stop_after}"):
        training.run(config, tmp_path, splits, stop_after=stop_after)
    summary, text = training.run(config, tmp_path, splits)
    assert f"goes on after step {stop_after}" in text
    training.assert_same_run(whole, tmp_path, 6)
    wanted = json.loads((whole / "summary.json").read_text())
    assert {**summary, "step_ms": 0} == {**wanted, "step_ms": 0}


def test_dgc_resumes_in_its_warm_up(splits, tmp_path):
    """And what it owes follows a rate that rises in one part and falls in the other."""
    config = training.config_of(
        "dgc",
        **{
            "learning_rate.follow": True,
            "learning_rate.warmup_steps": 3,
            "methods.dgc.warmup_densities": (0.5, 0.25),
            "methods.dgc.warmup_steps": 4,
        },
    )
    training.run(config, tmp_path / "whole", splits)
    with pytest.raises(Stopped):
        training.run(config, tmp_path / "parts", splits, stop_after=3)
    training.run(config, tmp_path / "parts", splits)
    training.assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)


def test_shared_state_is_saved_once_and_residuals_for_each_worker(undisturbed):
    _, folder = undisturbed
    arrays = training.saved(folder, 6)
    kernels = {n: a.shape for n, a in arrays.items() if n.endswith("Dense_1.kernel")}
    [params] = [n for n in kernels if n.startswith("shared.params")]
    [residual] = [n for n in kernels if n.startswith("local.") and "residual" in n]
    assert kernels[params] == (4, 10)
    assert kernels[residual] == (2, 4, 10)
    assert (arrays[residual][0] != arrays[residual][1]).any()


def test_a_finished_run_is_not_trained_again(undisturbed, splits):
    config, folder = undisturbed
    written = (folder / "summary.json").read_text()
    summary, text = training.run(config, folder, splits)
    assert summary == json.loads(written)
    assert "finished before" in text
    assert "--fresh" in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "summary.json").unlink(),
        lambda folder: (folder / "summary.json").write_text('{"method": "to'),
        lambda folder: (folder / "summary.json").write_text("[]"),
        lambda folder: (folder / "history.jsonl").unlink(),
        lambda folder: (folder / "history.jsonl").write_text('{"step": 0, "lo'),
        lambda folder: [path.unlink() for path in folder.glob("*.json*")],
    ],
)
def test_a_finished_run_with_damaged_results_is_summarised_again(
    undisturbed, splits, tmp_path, damage
):
    config, finished = undisturbed
    folder = shutil.copytree(finished, tmp_path / "copy")
    damage(folder)
    summary, _ = training.run(config, folder, splits)
    wanted = json.loads((finished / "summary.json").read_text())
    assert {**summary, "step_ms": 0} == {**wanted, "step_ms": 0}
    assert json.loads((folder / "summary.json").read_text()) == summary
    evaluated, before = read(folder)[-1], read(finished)[-1]
    assert {**evaluated, "train_loss": 0} == {**before, "train_loss": 0}


STRANGE = json.dumps({**dict.fromkeys(sorted(ROW), 0), "step": "4"}) + "\n"


@pytest.mark.parametrize(
    "broken", ["{\n", "\n", "[]\n", '{"step": 1}\n', STRANGE, '{"step": 4']
)
def test_a_damaged_line_of_a_history_is_left_out(undisturbed, tmp_path, broken):
    _, finished = undisturbed
    first, *rest = (finished / "history.jsonl").read_text().splitlines(keepends=True)
    lines = [first, broken, *rest] if broken.endswith("\n") else [first, *rest, broken]
    (tmp_path / "history.jsonl").write_text("".join(lines))
    assert read(tmp_path) == read(finished)


def test_removing_a_run_leaves_other_files(splits, tmp_path):
    training.run(training.config_of("dense"), tmp_path, splits)
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.remove(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("methods", "overrides", "words"),
    [
        ("topk", {"model.hidden": 5}, ["parameter Dense_0/kernel", "[32, 5]"]),
        ("topk", {"num_workers": 4}, ["workers: 2 there, 4 in this run"]),
        ("dgc", {}, ["method: topk there, dgc in this run"]),
        ("topk", {"seed": 3}, ["config.seed: 0 there, 3 in this run"]),
        ("topk", {"density": 0.5}, ["config.method.selection.density: 0.01 there"]),
        ("topk", {"steps": 7}, ["config.steps: 6 there, 7 in this run"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    undisturbed, splits, methods, overrides, words
):
    _, folder = undisturbed
    with pytest.raises(SetupError) as error:
        training.run(training.config_of(methods, **overrides), folder, splits)
    for word in (*words, str(folder), "--fresh", "--workdir"):
        assert word in str(error.value)


def test_settings_that_change_no_figure_may_differ(undisturbed, splits):
    _, folder = undisturbed
    config = training.config_of("topk", checkpoint_every=1, checkpoints_kept=1)
    training.run(config, folder, splits)


def state_cut_short(path):
    for data in (path / "state").rglob("d/*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def record_cut_short(path):
    (path / "run" / "metadata").write_text("{")


def placement_emptied(path):
    (path / "state" / "_sharding").write_bytes(b"")


def placement_flipped(path):
    """A bit of what says where an array lay, inside its text."""
    file = path / "state" / "_sharding"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(b"shape") - 2] ^= 0x55  # a quotation mark
    file.write_bytes(bytes(damaged))


@pytest.mark.parametrize(
    "damage",
    [state_cut_short, record_cut_short, placement_emptied, placement_flipped],
)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    undisturbed, splits, tmp_path, damage
):
    _, whole = undisturbed
    config = training.config_of("topk", checkpoint_every=2)
    with pytest.raises(Stopped):
        training.run(config, tmp_path, splits, stop_after=4)
    damage(tmp_path / "checkpoints" / "4")
    _, text = training.run(config, tmp_path, splits)
    assert f"{tmp_path / 'checkpoints' / '4'} cannot be read" in text
    assert "goes on after step 2" in text
    training.assert_same_run(whole, tmp_path, 6)
    assert training.saved(tmp_path, 4)  # a new one has taken its place


def test_damaged_checkpoints_alone_are_refused_and_left(splits, tmp_path):
    config = training.config_of("topk", checkpoint_every=2)
    with pytest.raises(Stopped):
        training.run(config, tmp_path, splits, stop_after=4)
    for step in ("2", "4"):
        record_cut_short(tmp_path / "checkpoints" / step)
    with pytest.raises(SetupError) as error:
        training.run(config, tmp_path, splits)
    assert str(tmp_path / "checkpoints") in str(error.value)
    assert "--fresh" in str(error.value)
    left = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert left == {"2", "4"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_program_leaves_a_whole_checkpoint(number, splits, tmp_path):
    # Saves at every step, so that a kill is likely to hit it while it saves.
    config = training.config_of("topk", steps=60, checkpoint_every=1, eval_every=30)
    data_dir = tmp_path / "data"
    training.splits_in(data_dir)
    process = training.launch(training.command(config, tmp_path, data_dir))
    training.wait_for_checkpoint(process, tmp_path / "topk")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert "The same command goes on from there" in output
    assert not (tmp_path / "topk" / "summary.json").exists()

    # What is left is good for going on to the same end.
    config.checkpoint_every = 1000
    _, text = training.run(config, tmp_path / "topk", splits)
    assert "goes on after step" in text
    training.run(config, tmp_path / "whole", splits)
    training.assert_same_run(tmp_path / "whole", tmp_path / "topk", 60)


def test_a_folder_has_one_run_at_a_time(splits, tmp_path):
    config = training.config_of("topk", steps=4000, checkpoint_every=1)
    data_dir = tmp_path / "data"
    training.splits_in(data_dir)
    arguments = training.command(config, tmp_path, data_dir)
    first = training.launch(arguments)
    training.wait_for_checkpoint(first, tmp_path / "topk")
    second = training.launch([*arguments, "--fresh"])
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert output.startswith(f"error: Another run is using {tmp_path / 'topk'}")
    assert first.poll() is None
    assert any((tmp_path / "topk" / "checkpoints").iterdir())  # not made fresh

    first.kill()
    first.communicate(timeout=60)
    with lock.only_user(tmp_path / "topk", Workers(config.num_workers)):
        pass


# --- Another number of workers ------------------------------------------------------


@pytest.fixture
def restored(monkeypatch):
    """What every restore gave, by name."""
    found, restore = [], checkpoint.Checkpoints.restore

    def watched(self, shared, local):
        result = restore(self, shared, local)
        found.append(jax.device_get(checkpoint._by_path(*result[:2])))
        return result

    monkeypatch.setattr(checkpoint.Checkpoints, "restore", watched)
    return found


def stopped(config, folder, splits, after):
    with pytest.raises(Stopped, match=f"after step {after}"):
        training.run(config, folder, splits, stop_after=after)
    return training.saved(folder, after)


def test_a_run_goes_on_with_half_the_workers_and_with_all_again(
    splits, tmp_path, restored
):
    four, two = (training.config_of("ema_limit", num_workers=n) for n in (4, 2))
    before = stopped(four, tmp_path, splits, 2)
    between = stopped(two, tmp_path, splits, 4)
    summary, text = training.run(four, tmp_path, splits)
    assert (
        "4 workers in place of 2, the mean of what they owe is kept; "
        "16 examples a step in place of 8, dealt out anew" in text
    )
    assert summary["workers"] == 4 and summary["steps"] == 6
    assert [row["step"] for row in read(tmp_path)] == [0, 3, 6]

    # Pairs are averaged, then each is copied; what is shared stays.
    halved, doubled = restored
    kinds = set()
    for name, x in before.items():
        if name.startswith("shared."):
            np.testing.assert_array_equal(halved[name], x, err_msg=name)
            np.testing.assert_array_equal(doubled[name], between[name], err_msg=name)
        elif "exchange.residual" not in name:
            pairs = x.reshape(2, 2, *x.shape[1:]).mean(1)
            np.testing.assert_allclose(halved[name], pairs, rtol=1e-6, err_msg=name)
            copies = np.repeat(between[name], 2, 0)
            np.testing.assert_array_equal(doubled[name], copies, err_msg=name)
            kinds |= {k for k in ("momentum", "velocity", "residual") if k in name}
    assert kinds & {"velocity", "residual"}
    # The servers hold the same entries, wherever they lie now.
    [shard] = [n for n in before if n.endswith("exchange.residual.value")]
    for old, new in ((before, halved), (between, doubled)):
        entries = [np.sort(np.ravel(s[shard])) for s in (old, new)]
        assert old[shard].shape != new[shard].shape
        np.testing.assert_array_equal(*(e[e != 0] for e in entries))
    assert before[shard].any()


def test_a_change_of_workers_falls_back_from_a_damaged_checkpoint(
    splits, tmp_path, restored
):
    config = training.config_of("topk", num_workers=4, checkpoint_every=2)
    stopped(config, tmp_path, splits, 4)
    record_cut_short(tmp_path / "checkpoints" / "4")
    two = training.config_of("topk", num_workers=2)
    _, text = training.run(two, tmp_path, splits)
    assert f"{tmp_path / 'checkpoints' / '4'} cannot be read" in text
    assert "goes on after step 2" in text and "2 workers in place of 4" in text
    assert len(restored) == 1


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({"num_workers": 2}, True),
        ({"num_workers": 8}, True),
        ({"num_workers": 2, "batch_size": 8}, True),  # 16 examples a step, as before
        ({"num_workers": 2, "batch_size": 6}, False),
        ({"batch_size": 8}, False),
        ({"num_workers": 2, "seed": 1}, False),
        ({"num_workers": 2, "batch_size": 8, "density": 0.5}, False),
    ],
)
def test_only_workers_may_change_and_their_batch_if_a_step_has_as_many_examples(
    changes, may
):
    there, here = (
        checkpoint.identity(training.config_of("topk", **overrides), "topk", {})
        for overrides in ({"num_workers": 4}, {"num_workers": 4, **changes})
    )
    assert checkpoint._may_change(there, here) == may


def test_the_examples_of_a_step_may_be_kept(splits, tmp_path):
    stopped(training.config_of("topk", num_workers=4), tmp_path, splits, 2)
    config = training.config_of("topk", num_workers=2, batch_size=8)
    _, text = training.run(config, tmp_path, splits)
    assert "2 workers in place of 4" in text
    assert "16 examples a step in place of 16" in text


def test_a_checkpoint_with_other_state_is_refused(splits, tmp_path):
    stopped(training.config_of("topk"), tmp_path, splits, 2)
    record = tmp_path / "checkpoints" / "2" / "run" / "metadata"
    written = json.loads(record.read_text())
    config = training.config_of("dgc")
    stopped(config, tmp_path / "dgc", splits, 2)
    other = tmp_path / "dgc" / "checkpoints" / "2" / "run" / "metadata"
    other.write_text(json.dumps(written))  # as if an older program had written it
    with pytest.raises(SetupError, match="another version of the program"):
        training.run(training.config_of("topk"), tmp_path / "dgc", splits)
