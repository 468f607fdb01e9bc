"""The studies of learned compression; bytes from the programs, estimates from laws."""

import argparse

import jax
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse.arguments import entries
from jaxsparse.codec import message_words
from study import information, learned, lgc, ratios, runs, variants
from study.simulation import AXIS, Setting

N = 20_000


@pytest.mark.parametrize("item", lgc.CONTROLS)
def test_every_control_makes_a_transformation(item):
    variant, density = lgc.resolved(item, 4, N)
    exchange = variants.exchange_of(variant, density, Setting(4, steps=40))
    model = jax.ShapeDtypeStruct((N,), "float32")
    state = jax.eval_shape(exchange.init, model)
    assert state.velocity.value.shape == (N,)


@pytest.mark.parametrize("other", ["lgc_server", "lgc_ring"])
def test_controls_at_equal_bits_say_as_much(other):
    k = entries(lgc.DENSITY, N)
    wanted = learned.payload(other, {}, 8, k, N).mean
    for codec in ("bfloat16", "sign_mean"):
        variant, density = lgc.resolved(f"topk:codec={codec}@={other}", 8, N)
        own, codec = entries(density, N), lgc.codec_of(variant)
        said, more = (4 * message_words(N, own + i, codec) for i in (0, 1))
        assert said <= wanted < more


@pytest.mark.parametrize(
    "variant, dense",
    [("lgc_ring", 0.1), ("lgc_ring:code=identity", 0.1), ("lgc_ring:dense=0", 0.0)],
)
def test_bytes_of_the_ring_are_those_of_its_program(variant, dense):
    setting = Setting(4, steps=40)
    exchange = variants.exchange_of(variant, 0.01, setting)
    model = jax.ShapeDtypeStruct((N,), "float32")
    jaxpr = jax.make_jaxpr(exchange.update, axis_env=[(AXIS, 4)])
    traffic = js.traffic(jaxpr(model, jax.eval_shape(exchange.init, model), model))
    stages = 2 if dense else 1  # before that of latents
    latent, plain = (
        js.payload_bytes(traffic, 4, phases=stages, gate=gate)[0] for gate in (1, 0)
    )
    figures = {"variant": variant, "workers": 4, "density": 0.01, "late": {"gate": 0.9}}
    said = lgc.said(figures, setting, N)
    assert said["up"] == pytest.approx(0.9 * latent + 0.1 * plain)
    training = js.payload_bytes(traffic, 4, phases=stages - 1)[0]
    whole = dense * 4 * N + (0.25 - dense) * training + 0.75 * said["up"]
    assert said["run"] == pytest.approx(whole)


def test_independent_gradients_share_the_estimates_bias_and_no_more():
    """Miller (1955): the bias is (B - 1)^2 / (2 n ln 2) bits; of H(Y) = log2 B."""
    rng, n = np.random.default_rng(0), 20_000
    x, y = rng.normal(size=(2, n))
    bias = (information.BINS - 1) ** 2 / (2 * n * np.log(2))
    shared = information.shared_information(x, y)
    assert shared == pytest.approx(bias / np.log2(information.BINS), rel=0.3)


def test_of_a_common_part_more_is_shared():
    """Two normals of correlation r share -log2(1 - r^2) / 2 bits; bins lose some."""
    rng, r = np.random.default_rng(1), 0.9
    common, *own = rng.normal(size=(3, 40_000))
    x, y = (np.sqrt(r) * common + np.sqrt(1 - r) * each for each in own)
    law = -0.5 * np.log2(1 - r**2) / np.log2(information.BINS)
    assert 0.8 * law < information.shared_information(x, y) < 1.05 * law
    figures = information.compared(x, y, rng)
    assert figures["correlation"] == pytest.approx(r, abs=0.01)
    assert figures["followed"] == pytest.approx(r, abs=0.02)
    assert figures["shuffled"] < 0.01


def test_zeros_in_both_share_a_bin():
    x = np.array([0.0] * 50 + [1.0, 2.0] * 25)
    assert len(np.unique(information.binned(x)[:50])) == 1


def test_ratios_are_those_of_the_layers():
    layers = ratios.Sizes(dense=100, top_k=1000, encoded=1_000_000)
    said = ratios.learned_code("lgc_ring", "improved", 8, layers, 0.001)
    code = js.lgc.convolutional(channels=11, slope=1.0)
    middle = js.lgc.cost.ring(8, 1000, 1_000_000, code)
    outside = 400 + 4 * message_words(1000, 1, js.codec.bfloat16())
    assert said.everything == outside + middle.mean
    assert said.training == outside + middle.plain_mean
    assert said.values == 400 + 4 + code.size(1000) * 5 / 8
    cells = ratios.ratios(said, 4 * sum(layers))
    steps = ratios.LENGTHS[0]
    dense = 4 * sum(layers)
    total = 200 * dense + 300 * said.training + (steps - 500) * said.everything
    assert cells[3] == f"{steps * dense / total:,.0f}"


@pytest.mark.slow
def test_the_study_leaves_a_table_and_a_figure(tmp_path, monkeypatch):
    def few_steps(arguments):
        arguments.workers, arguments.seeds = [2], [0]
        arguments.steps, arguments.data = 50, "digits"
        return runs.Runs(tmp_path, "digits", Setting(steps=50), str(tmp_path / "data"))

    monkeypatch.setattr(runs, "open_runs", few_steps)
    parser = argparse.ArgumentParser()
    lgc.add_arguments(parser)
    arguments = parser.parse_args([])
    arguments.quick, arguments.write, arguments.workdir = False, False, tmp_path
    arguments.claim = ["dense@1", "topk@0.01", "lgc_ring:code=linear@0.01"]
    arguments.controls = ["topk:codec=sign_mean,start=0.1@=lgc_server"]
    lgc.run(arguments)
    assert (tmp_path / "table.md").read_text().count("\n| ") == 6
    assert (tmp_path / "lgc-digits-50.png").exists()
