"""The bench and the plan: bytes from formulas, times only where they can't be wrong."""

import argparse
import json
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxsparse as js
from bench import (
    main,
    measure,
    plan,
    prediction,
    records,
    shapes,
    testbed,
    work,
    worker,
)
from bench.prediction import Cost
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


@pytest.mark.parametrize("parameters", ["1", "1000"])
def test_the_smallest_sizes_are_measured(parameters):
    tree = worker.tree_of(parameters)
    found = measure.measure("dense", tree, Workers(2), density=1.0, steps=1, burn_in=0)
    assert found["parameters"] == int(parameters)


@pytest.mark.parametrize("model", ["resnet", "0", "-5", "1e6", ""])
def test_unknown_models_are_answered_by_the_list(model):
    with pytest.raises(SetupError, match=r"--models=.*choose from lenet"):
        worker.check(options(models=[model]))


def options(**given):
    """A command line of the bench."""
    parser = argparse.ArgumentParser()
    worker.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "--steps=0 must be at least 1"),
        ({"burn_in": -1}, "--burn-in=-1 must be at least 0"),
        ({"workers": 0}, "--workers=0 must be at least 1"),
        ({"batch": -1}, "--batch=-1 must be at least 0"),
        ({"density": 2.0}, "--density.*got 2.0"),
        ({"density": float("nan")}, "--density.*got nan"),
        ({"methods": ["dense", "tpk"]}, "--methods=tpk: choose from dense"),
        ({"methods": ["topk,dense"]}, "--methods=topk,dense: choose from"),
        ({"batch": 2, "models": ["lenet"]}, "--batch=2 trains resnet50.*lenet"),
    ],
)
def test_what_cannot_be_measured_is_refused(given, message):
    worker.check(options(burn_in=0))
    with pytest.raises(SetupError, match=message):
        worker.check(options(**given))


def test_results_have_a_place_before_anything_is_measured(tmp_path):
    def check(write, folder):
        main.check_places(argparse.Namespace(write=write, workdir=tmp_path / folder))

    check(None, "new/folder")
    assert (tmp_path / "new/folder").is_dir()
    check("bench-hosts", "new")
    for name in ("nowhere", "end", ".*", ""):
        with pytest.raises(SetupError, match="has no place.*bench-hosts"):
            check(name, "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="--workdir="):
        check(None, "file/below")


def test_no_hosts_are_not_taken_for_none(tmp_path):
    given = options(hosts=0, rate=None)
    assert "bench.testbed" in main.commands(given)
    given.hosts = None
    assert "bench.testbed" not in main.commands(given)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("raise SetupError('--x=1')", 1),
        ("raise testbed.TestbedError('--rate=5')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", 128 + signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("print('unheard')", 128 + signal.SIGPIPE),
    ],
)
def test_commands_end_without_a_traceback(ends, status):
    """Also where nobody reads what they print: the pipe is closed at once."""
    program = "import os, signal; from bench.main import *\n"
    # As from a terminal; a shell has its background programs ignore it.
    program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += f"os.read(0, 1)\ndef main():\n  {ends}\ncommand(main)"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == status
    assert re.fullmatch(r"(error: --\w+=\d\n)?", said)


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
    wire = 8e6 / (100e6 * prediction.HEADERS)
    assert cost.step_ms(100e6, 5.0) == pytest.approx(25.0 + 1e3 * wire)


@pytest.mark.parametrize(("own", "link"), [(12.0, 1e4), (8.0, 3e6)])
def test_at_the_crossing_rate_both_take_the_same_time(own, link):
    dense, other = Cost("dense", 10.0, 2e6), Cost("topk", own, link)
    low, high = other.faster_between(dense)
    rate = high if low == 0 else low
    assert other.step_ms(rate) == pytest.approx(dense.step_ms(rate))
    inside, outside = (rate / 2, rate * 2) if low == 0 else (rate * 2, rate / 2)
    assert other.step_ms(inside) < dense.step_ms(inside)
    assert other.step_ms(outside) > dense.step_ms(outside)


def test_fewer_bytes_in_less_time_win_at_any_rate_more_in_more_at_none():
    dense = Cost("dense", 10.0, 2e6)
    assert Cost("x", 12.0, 3e6).faster_between(dense) == (0, 0)
    assert Cost("x", 10.0, 2e6).faster_between(dense) == (0, 0)
    assert Cost("x", 8.0, 1e6).faster_between(dense) == (0, float("inf"))


def test_advice_says_stay_dense_where_little_is_gained():
    dense, other = Cost("dense", 10.0, 1e4), Cost("topk", 10.0, 1e3)
    assert "Stay dense" in prediction.advice([dense, other], 1e9, 100.0)
    assert "Use topk" in prediction.advice([dense, other], 1e5, 100.0)


def test_records_of_the_bench_are_read(tmp_path):
    file = tmp_path / "bench.jsonl"
    record = {"model": "lenet", "workers": 4, "method": "dense", "step_ms": 3.0}
    record |= {"link_bytes": 100, "rate": None, "density": 0.01, "batch_size": None}
    others = [{"rate": "200mbit"}, {"batch_size": 8}]
    others = [{**record, "step_ms": 99.0, **other} for other in others]
    topk = {**record, "method": "topk", "density": 0.1}
    file.write_text("".join(json.dumps(r) + "\n" for r in (record, *others, topk)))
    assert records.recorded(file, "lenet", 4, 0.01) == [Cost("dense", 3.0, 100)]
    for workers, density in ((8, 0.01), (4, 0.1)):
        again = f"--models lenet --hosts {workers} --density {density}"
        with pytest.raises(SetupError, match=again):
            records.recorded(file, "lenet", workers, density)
    with pytest.raises(SetupError, match="--measured="):
        records.recorded(tmp_path / "none.jsonl", "lenet", 4, 0.01)


@pytest.mark.parametrize("text", ["3", '{"a": 1}', "[1]", "no JSON"])
def test_what_is_no_record_of_the_bench_is_refused(tmp_path, text):
    file = tmp_path / "bench.jsonl"
    file.write_text(text)
    with pytest.raises(SetupError, match="--measured="):
        records.recorded(file, "lenet", 4, 0.01)


def test_rates_are_words_that_can_be_read():
    assert prediction.named(9.999e8) == "1 Gbit/s"
    assert prediction.named(9.99e8) == "999 Mbit/s"
    assert prediction.named(4e12) == "4,000 Gbit/s"


def test_a_check_refuses_wrong_rates_before_it_measures():
    with pytest.raises(testbed.TestbedError, match="--rate=5"):
        plan.check(argparse.Namespace(rates=["1gbit", "5"]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": None}, "one of --model"),
        ({"parameters": 5}, "one of --model"),
        ({"workers": 1}, "--workers=1"),
        ({"compute_ms": -1.0}, "--compute-ms=-1.0"),
        ({"compute_ms": float("nan")}, "--compute-ms=nan"),
        ({"methods": ["tpk"]}, "--methods=tpk"),
        ({"model": "resnet"}, "--model=resnet: choose from lenet"),
        ({"model": None, "parameters": 0}, "--parameters=0"),
        ({"model": None, "config": "x.py", "measured": "y"}, "--measured=y.*--config"),
    ],
)
def test_wrong_questions_are_refused(wrong, message):
    given = {"model": "lenet", "parameters": None, "config": None, "rate": "1gbit"}
    given |= {"workers": 8, "compute_ms": None, "measured": None, **wrong}
    with pytest.raises(SetupError, match=message):
        plan.planned(options(**given))


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
