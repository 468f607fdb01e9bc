"""The study of time to an accuracy: what it makes of runs' files."""

import json

import pytest

from study import network


@pytest.mark.parametrize(("method", "link"), [("dense", 1.5), ("topk", 3)])
def test_a_link_carries_more_than_the_payload(method, link):
    """On a ring of four: an all-reduce 2 * 3 / 4, an all-gather three messages."""
    assert network.factor(method, 4) == link


def test_how_much_sooner_the_target_was_reached():
    found = {"dense": {"seconds": 60.0}, "topk": {"seconds": 12.0}}
    assert network.faster(found, "topk") == "5.0 x"
    found["topk"]["seconds"] = None  # never
    assert network.faster(found, "topk") == ""


def test_a_run_is_read_from_its_folder(tmp_path):
    row = {"loss": 1.0, "payload_up_bytes": 1, "payload_down_bytes": 1}
    lines = [{**row, "step": s, "accuracy": a} for s, a in ((0, 0.1), (20, 0.8))]
    (tmp_path / "history.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines)
    )
    (tmp_path / "summary.json").write_text(json.dumps({"step_ms": 5.0}))
    found = network.outcome(tmp_path)
    assert found["curve"] == [[0, 0.1], [20, 0.8]]
    assert found["step_ms"] == 5.0
