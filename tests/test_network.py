"""The study of time to an accuracy: what it makes of runs' files."""

import json
import runpy

from bench import plan, shapes
from study import network


def test_the_link_of_a_setup_carries_what_its_program_says():
    """On a ring of four: an all-reduce of all parameters, 2 * 3 / 4 of their bytes.

    And of one word more, by which all agree to skip a step.
    """
    config = runpy.run_path("configs/digits.py")["get_config"]("dense")
    n = shapes.entries(plan.model_of(config)[0])
    assert network.link_bytes("digits", "dense", 4) == 4 * (n + 1) * 3 // 2
    sparse = network.link_bytes("digits", "topk", 4)  # three messages of 1 % of entries
    assert 3 * 2 * n // 100 < sparse < 3 * 5 * n // 100


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
