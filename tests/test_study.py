import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from study import (
    limit,
    repeats,
    reshard,
    results,
    runs,
    seeds,
    selection,
    server,
    time,
    variants,
)
from study.simulation import Setting


def test_a_table_takes_its_place_in_the_document(tmp_path, monkeypatch):
    document = tmp_path / "results.md"
    document.write_text(
        "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->"
    )
    monkeypatch.setattr(results, "DOCUMENT", document)
    results.publish("one", "new", tmp_path, write=True)
    wanted = "a\n<!-- one -->\nnew\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->"
    assert document.read_text() == wanted
    assert (tmp_path / "table.md").read_text() == "new\n"
    with pytest.raises(ValueError, match="no place `<!-- three -->`"):
        results.publish("three", "new", tmp_path, write=True)


def test_every_study_has_its_place_in_the_document():
    text = results.DOCUMENT.read_text()
    places = ("message", "largest", "repeats", "selection", "limit", "server", "time")
    for place in ("seeds-digits", "reshard", *places):
        assert f"<!-- {place} -->" in text


def test_mean_over_seeds_against_dense():
    def summary(method, accuracy, up):
        return {
            "method": method,
            "accuracy": accuracy,
            "payload_up_bytes_per_step": up,
            "ratio_per_step": 1000 / up,
        }

    dense = [summary("dense", a, 1000) for a in (0.9, 0.92)]
    topk = [summary("topk", a, 8) for a in (0.9, 0.91)]
    assert seeds.row(topk, dense) == [
        "topk",
        "90.50%",
        "90.00% 91.00%",
        "-0.50 points",
        "8 B",
        "125.0 x",
    ]


@pytest.mark.parametrize("item", [*selection.CLAIM, *selection.SEARCH])
def test_every_variant_makes_a_transformation(item):
    variant = item.rpartition("@")[0]
    exchange = variants.exchange_of(variant, 0.01, Setting(4))
    state = exchange.init({"w": jnp.zeros(300)})
    assert state.velocity.value["w"].shape == (300,)


def test_bytes_of_a_variant_are_those_of_its_exchange():
    figures = {"workers": 8, "selected": 100.0, "aggregated": 400.0, "variant": "ema"}
    step = js.cost.server(8, 100, 400, 10_000)
    assert variants.moved(figures, 10_000) == {"up": step.up, "down": step.down}
    apart = {**figures, "aggregated": 790.0}  # then all_gather costs less
    step = js.cost.all_gather(8, 100, 10_000)
    assert variants.moved(apart, 10_000) == {"up": step.up, "down": step.down}
    led = variants.moved({**figures, "variant": "leader"}, 10_000)
    assert led["up"] == js.cost.shared_support(8, 100, 10_000).up


def test_a_run_is_trained_once_and_kept(tmp_path):
    """Two workers, a few steps: the second call reads the file."""
    data_dir = str(tmp_path / "data")
    kept = runs.Runs(tmp_path, "digits", Setting(steps=4, examples=4), data_dir)
    run = runs.Run("topk", 0.01, 2, 0)
    first = kept.get(run)
    file = next((tmp_path / "digits-4-of-4").iterdir())
    file.write_text(json.dumps({**first, "accuracy": 2.0}))
    assert kept.get(run)["accuracy"] == 2.0
    n = runs.entries_of_model(kept.task, kept.splits)
    assert first["selected"] == -(-n // 100)  # every worker sends k = ceil(n / 100)
    assert first["selected"] <= first["aggregated"] <= 2 * first["selected"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize(
    "study",
    [
        repeats,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (limit, selection, time)),
    ],
)
def test_a_study_leaves_a_table_and_a_figure(study, folder, monkeypatch):
    """All on two workers and 50 steps; they share their runs."""

    def few_steps(arguments):
        arguments.workers, arguments.seeds, arguments.densities = [2], [0], [0.01]
        arguments.steps, arguments.data = 50, "digits"
        return runs.Runs(folder, "digits", Setting(steps=50), str(folder / "data"))

    monkeypatch.setattr(runs, "open_runs", few_steps)
    parser = argparse.ArgumentParser()
    study.add_arguments(parser)
    arguments = parser.parse_args([])
    arguments.quick, arguments.write = True, False
    arguments.workdir = folder / study.__name__
    arguments.workdir.mkdir()
    if study is time:
        arguments.variants = ["dense", "topk", "topk:limit=2"]
    study.run(arguments)
    table = (arguments.workdir / "table.md").read_text()
    assert table.count("\n| ") > 3
    assert list(arguments.workdir.glob("*.png"))


@pytest.mark.slow
def test_the_server_wins_where_the_model_says(monkeypatch):
    monkeypatch.setattr(server, "K", 200)
    monkeypatch.setattr(server, "ENTRIES", 20_000)
    monkeypatch.setattr(server, "SHARED", (0.0, 0.75, 0.9))
    found = server.compared(4)
    assert [f["server"] for f in found] == [f["model"] for f in found]
    assert [f["wins"] for f in found] == [False, True, True]
    for f, shared in zip(found, server.SHARED, strict=True):
        # Four selections of 200; what is not shared is disjoint.
        assert f["union"] == pytest.approx(200 * (4 - 3 * shared), rel=0.02)


def test_what_is_owed_is_kept_dropped_or_doubled(tmp_path, monkeypatch):
    """Four workers, then two, of a few steps each."""
    monkeypatch.setattr(reshard, "BEFORE", Setting(workers=4, examples=8))
    monkeypatch.setattr(reshard, "AFTER", Setting(workers=2, examples=4))
    state = {"q": np.ones(3), "owed": np.arange(8, dtype=np.float32).reshape(4, 2)}
    local = {"q": False, "owed": True}
    fresh = {"q": np.zeros(3), "owed": np.zeros((2, 2))}
    for how, wanted in (
        ("kept", [[1, 2], [5, 6]]),
        ("sum", [[2, 4], [10, 12]]),
        ("dropped", [[0, 0], [0, 0]]),
    ):
        found = reshard.changed(how, state, local, fresh)
        np.testing.assert_array_equal(found["owed"], wanted)
        np.testing.assert_array_equal(found["q"], state["q"])

    parser = argparse.ArgumentParser()
    reshard.add_arguments(parser)
    data_dir = f"--data-dir={tmp_path / 'data'}"
    arguments = parser.parse_args(["--steps=40", "--seeds", "0", data_dir])
    arguments.quick, arguments.write, arguments.workdir = False, False, tmp_path
    reshard.run(arguments)
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n| ") == 6
    assert (tmp_path / "reshard.png").exists()
    kept = json.loads((tmp_path / "topk-0.01-40.json").read_text())
    # All ways are one until the change, and none is like another after it.
    curves = [kept[f"{how}-0"]["curve"] for how in reshard.HOWS]
    assert [curve[:2] for curve in curves] == [curves[0][:2]] * 4
    assert [step for step, _ in curves[0]] == [10, 20, 30, 40]
    assert len({curve[2][1] for curve in curves}) == 4


def test_large_entries_are_remembered():
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(5, 40)).astype(np.float32)
    transform = repeats.remember(0.1)
    state = transform.init({"w": jnp.zeros(40)})
    update = jax.jit(transform.update)
    for g in grads:
        updates, state = update({"w": jnp.asarray(g)}, state)
        np.testing.assert_array_equal(updates["w"], g)
    largest = np.abs(grads) >= np.sort(np.abs(grads), axis=1)[:, -4, None]
    words = np.asarray(state.words.value["w"])
    for ago in range(5):
        np.testing.assert_array_equal(words >> ago & 1, largest[4 - ago])
    came = (largest[1] & largest[2:].any(0)).sum()
    assert repeats.again(words, 3) == (came, 4)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("foo", r"'foo': choose from dense, topk"),
        ("topk:weight=3", r"'topk' has no setting 'weight'; known: limit"),
        ("leader:limit=2", r"'leader' has no setting 'limit'; known: start"),
        ("ema:weight", r"'ema:weight'.*float"),
        ("frequency:window=2.7", r"window=2.7"),
    ],
)
def test_a_wrong_variant_is_told(variant, message):
    with pytest.raises(ValueError, match=message):
        variants.parse(variant)


def test_a_number_of_workers_that_does_not_divide_a_step_is_told(tmp_path):
    kept = runs.Runs(tmp_path, "digits", Setting(steps=4, examples=4), str(tmp_path))
    with pytest.raises(ValueError, match="4 examples .* among 3 workers"):
        kept.get(runs.Run("topk", 0.01, 3, 0))
