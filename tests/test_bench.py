"""The bench and the plan: bytes from formulas, times only where they can't be wrong."""

import argparse
import json

import jax
import numpy as np
import pytest

import jaxsparse as js
from bench import main, measure, plan, shapes, work, worker
from bench.plan import Cost
from train.errors import SetupError
from train.parallel import Workers

TREE = {
    "a": jax.ShapeDtypeStruct((40, 50), "float32"),
    "b": jax.ShapeDtypeStruct((48,), "float32"),
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet", 61_706),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("transformer", 124_439_808),
    ],
)
def test_models_have_the_literatures_sizes(name, parameters):
    assert shapes.entries(shapes.MODELS[name]()) == parameters


@pytest.mark.parametrize("parameters", [1, 4096, 2048 * 2048, 5_000_001])
def test_a_tree_of_any_size(parameters):
    assert shapes.entries(worker.tree_of(str(parameters))) == parameters


@pytest.mark.parametrize("model", ["resnet", "0", "-5", "1e6", ""])
def test_unknown_models_are_answered_by_the_list(model):
    with pytest.raises(SetupError, match=r"--models=.*choose from lenet"):
        worker.tree_of(model)


@pytest.fixture(scope="module")
def figures():
    """Of dense averaging and top-k on two workers."""
    workers = Workers(2)
    return {
        method: measure.measure(method, TREE, workers, density=0.01, steps=3, burn_in=2)
        for method in ("dense", "topk")
    }


def test_bytes_are_the_programs(figures):
    """Dense: a ring of two moves what it has; top-k: one message each way."""
    assert figures["dense"]["payload_up_bytes"] == 4 * 2048
    assert figures["dense"]["link_bytes"] == 4 * 2048
    message = js.cost.all_gather(2, 21, 2048)
    assert figures["topk"]["payload_up_bytes"] == message.up
    assert figures["topk"]["link_bytes"] == message.link


def test_times_and_memory_are_plausible(figures):
    for found in figures.values():
        assert 0 < found["step_ms_lowest"] <= found["step_ms"]
        assert found["step_ms"] <= found["step_ms_highest"]
        assert "nic_sent_bytes" not in found  # there is no network between them
        # Parameters and gradient at least.
        assert found["memory_vectors"] >= 2
    more = figures["topk"]["memory_vectors"] - figures["dense"]["memory_vectors"]
    assert more >= 0.9  # the residual


def test_a_plan_takes_a_ladders_last_rung():
    """As many bytes as when all selections differ: no fewer than the union of all."""
    tx = js.error_feedback(
        js.sparse(js.top_k(0.01), js.server(), axis_name=measure.AXIS, num_workers=4)
    )
    link = measure.said(tx, TREE, 4)[2]
    ideal = js.cost.sharded(4, 21, 84, 2048).link
    assert ideal < link < 3 * ideal


def test_predictions_follow_the_formula():
    cost = Cost("topk", own_ms=20.0, link_bytes=1e6)
    wire = 8e6 / (100e6 * plan.HEADERS)
    assert cost.step_ms(100e6, 5.0) == pytest.approx(25.0 + 1e3 * wire)


@pytest.mark.parametrize("own", [5.0, 12.0])
def test_at_the_break_even_rate_both_take_the_same_time(own):
    dense, other = Cost("dense", 10.0, 2e6), Cost("topk", own, 1e4)
    rate = other.break_even(dense)
    if own < dense.own_ms:
        assert rate == float("inf")
    else:
        assert other.step_ms(rate) == pytest.approx(dense.step_ms(rate))
        assert other.step_ms(rate / 2) < dense.step_ms(rate / 2)
        assert other.step_ms(rate * 2) > dense.step_ms(rate * 2)


def test_a_method_that_says_more_and_takes_longer_never_wins():
    assert Cost("x", 12.0, 3e6).break_even(Cost("dense", 10.0, 2e6)) == 0


def test_advice_says_stay_dense_where_little_is_gained():
    dense, other = Cost("dense", 10.0, 1e4), Cost("topk", 10.0, 1e3)
    assert "Stay dense" in plan.advice([dense, other], 1e9, 100.0)
    assert "Use topk" in plan.advice([dense, other], 1e5, 100.0)


def test_records_of_the_bench_are_read(tmp_path):
    file = tmp_path / "bench.jsonl"
    record = {"model": "lenet", "workers": 4, "method": "dense", "step_ms": 3.0}
    record |= {"link_bytes": 100, "rate": None}
    limited = {**record, "rate": "200mbit", "step_ms": 99.0}
    file.write_text("".join(json.dumps(r) + "\n" for r in (record, limited)))
    assert plan.recorded(file, "lenet", 4) == [Cost("dense", 3.0, 100)]
    with pytest.raises(SetupError, match="scripts/bench --models lenet --hosts 8"):
        plan.recorded(file, "lenet", 8)
    with pytest.raises(SetupError, match="--measured="):
        plan.recorded(tmp_path / "none.jsonl", "lenet", 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, "one of --model"),
        ({"parameters": 5}, "one of --model"),
        ({"workers": 1}, "--workers=1"),
        ({"compute_ms": -1.0}, "--compute-ms=-1.0"),
    ],
)
def test_wrong_questions_are_refused(wrong, message):
    given = {"model": "lenet", "parameters": None, "config": None, "rate": "1gbit"}
    given |= {"workers": 8, "compute_ms": None, **wrong}
    with pytest.raises(SetupError, match=message):
        plan.planned(argparse.Namespace(**given))


def test_the_table_compares_with_dense_of_the_same_model():
    def record(model, method, ms):
        return {"model": model, "method": method, "step_ms": ms}

    found = [record("a", "dense", 10.0), record("a", "topk", 2.0)]
    found += [record("b", "topk", 1.0)]
    rows = main.table(found).splitlines()[2:]
    assert [row.split("|")[-2].strip() for row in rows] == ["1.0 x", "5.0 x", ""]


def test_gradients_differ_between_workers_and_repeat():
    one, two = (work.gradients(TREE, range(2), 0) for _ in range(2))
    np.testing.assert_array_equal(one["a"], two["a"])
    assert one["a"].shape == (2, 40, 50)
    assert np.any(one["a"][0] != one["a"][1])
