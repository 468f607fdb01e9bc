import json

import jax.numpy as jnp
import pytest

import jaxsparse as js
from study import results, runs, seeds, selection, variants
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
    for place in ("seeds-digits", "message"):
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


@pytest.mark.parametrize("variant", [*selection.VARIANTS, "dense", "regtopk:mu=0.5"])
def test_every_variant_makes_a_transformation(variant):
    exchange = variants.exchange_of(variant, 0.01, 4, 0.9)
    state = exchange.init({"w": jnp.zeros(300)})
    assert state.velocity.value["w"].shape == (300,)


def test_bytes_of_a_variant_are_those_of_its_exchange():
    figures = {"workers": 8, "selected": 100.0, "aggregated": 400.0, "variant": "ema"}
    step = js.cost.server(8, 100, 400, 10_000)
    assert variants.moved(figures, 10_000) == {"up": step.up, "down": step.down}
    led = variants.moved({**figures, "variant": "leader"}, 10_000)
    assert led["up"] == js.cost.shared_support(8, 100, 10_000).up


def test_a_run_is_trained_once_and_kept(tmp_path):
    """Two workers, a few steps: the second call reads the file."""
    data_dir = str(tmp_path / "data")
    kept = runs.Runs(tmp_path, "digits", Setting(steps=4, examples=4), data_dir)
    run = runs.Run("topk", 0.01, 2, 0)
    first = kept.get(run)
    file = next((tmp_path / "digits-4").iterdir())
    file.write_text(json.dumps({**first, "accuracy": 2.0}))
    assert kept.get(run)["accuracy"] == 2.0
    n = runs.entries_of_model(kept.task, kept.splits)
    assert first["selected"] == -(-n // 100)  # every worker sends k = ceil(n / 100)
    assert first["selected"] <= first["aggregated"] <= 2 * first["selected"]
