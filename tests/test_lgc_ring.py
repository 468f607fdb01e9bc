"""The ring-allreduce form; expected values from NumPy and from the laws."""

import math

import contract_table as table
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_table import AXIS, small
from test_lgc_server import gradients, run, top

import jaxsparse as js
from jaxsparse import lgc
from jaxsparse.lgc.autoencoder import latent_length

WORKERS, N, K = 4, 60, 12
DENSITY = K / N


def ring(**kwargs):
    """Float latents from the first step on, without a gate."""
    given = {"stages": (0, 0), "gate": math.inf, "codec": js.codec.float32()}
    return js.lgc_ring(
        DENSITY, axis_name=AXIS, **(given | {"latent_bits": 32} | kwargs)
    )


def contributed(x):
    """Which entries are among some worker's k / N largest."""
    return np.any([top(row, K // WORKERS) != 0 for row in x], axis=0)


def test_an_identity_on_the_leaders_support_is_scalecom():
    reducer = ring(code=lgc.identity(), support="leader")
    grads = gradients(5)
    means, _, state = run(js.error_feedback(reducer), grads)
    residual = np.zeros((WORKERS, N))
    for t, g in enumerate(grads):
        x = g + residual
        sent = np.where(top(x[t % WORKERS], K) != 0, x, 0)
        np.testing.assert_allclose(means[t], sent.mean(0), atol=1e-5)
        residual = x - sent
    np.testing.assert_allclose(state.residual.value, residual, atol=1e-5)


@pytest.mark.parametrize("bits", [16, 32])
def test_an_identity_on_a_contributed_support(bits):
    reducer = ring(code=lgc.identity(), support="contributed", latent_bits=bits)
    (g,) = gradients(1)
    means, metrics, _ = run(js.error_feedback(reducer), g[None])
    support = contributed(g)
    tolerance = 1e-5 if bits == 32 else np.abs(g).max() / (2**16 // 8 - 1)
    np.testing.assert_allclose(
        means[0], np.where(support, g.mean(0), 0), atol=tolerance
    )
    assert metrics[0].aggregated == metrics[0].selected == support.sum()
    assert np.all(means[0][~support] == 0)


def test_one_decoder_for_the_mean_and_ones_own_for_what_is_left():
    """The law of a code that is not affine: mean = D(mean z), left = x - D(z_i)."""
    code = small()
    reducer = ring(code=code, support="leader", rotate=False)
    (g,) = gradients(1, seed=4)
    means, _, state = run(js.error_feedback(reducer), g[None])
    params = state.reducer.reducer.params
    support = np.flatnonzero(top(g[0], K))
    signs = np.sign(g[0, support])
    scale = np.sqrt(np.mean(g[0, support] ** 2))
    z = jnp.stack([code.encode(params, x[support] * signs / scale) for x in g])
    decode = lambda z: np.asarray(code.decode(params, z, K, None)) * signs * scale  # noqa: E731
    wanted, left = np.zeros(N), np.array(g)
    wanted[support] = decode(z.mean(0))
    left[:, support] -= np.stack([decode(v) for v in z])
    np.testing.assert_allclose(means[0], wanted, atol=1e-5)
    np.testing.assert_allclose(state.residual.value, left, atol=1e-5)


def test_a_mean_as_code_sends_one_number():
    """Shared signs, and one magnitude for all: of the mean, not of each."""
    reducer = ring(code=lgc.mean(), support="leader", rotate=False)
    (g,) = gradients(1)
    means, _, _ = run(js.stateless(reducer), g[None])
    leading = top(g[0], K)
    projected = np.mean([(x * np.sign(leading))[leading != 0].mean() for x in g])
    np.testing.assert_allclose(means[0], np.sign(leading) * projected, atol=1e-5)


@pytest.mark.parametrize("support", ["leader", "contributed"])
def test_stages_are_dense_then_plain_values_then_latents(support):
    code = lgc.linear(4, 4)  # a rotation and back: nothing is lost
    reducer = ring(code=code, stages=(1, 2), support=support, rotate=False)
    g = gradients(1)[0]
    means, metrics, _ = run(js.stateless(reducer), np.stack([g] * 3))
    assert [int(m.phase) for m in metrics] == [0, 1, 2]
    assert [int(m.gate) for m in metrics] == [0, 0, 1]
    chosen = top(g[0], K) != 0 if support == "leader" else contributed(g)
    np.testing.assert_allclose(means[0], g.mean(0), atol=1e-6)
    wanted = np.where(chosen, g.mean(0), 0)
    np.testing.assert_allclose(means[1], wanted, atol=1e-6)
    # One step of training on a lossless code changes it next to nothing.
    np.testing.assert_allclose(means[2], wanted, atol=0.05)
    assert metrics[1].nmse < 1e-6


def test_the_gate_falls_back_and_rechecks():
    grads = gradients(7)
    closed = ring(code=lgc.mean(), gate=1e-9)
    means, metrics, _ = run(js.stateless(closed), grads)
    assert [int(m.fallbacks) for m in metrics] == [1, 2, 3, 4, 5, 6, 7]
    for g, mean in zip(grads, means, strict=True):
        np.testing.assert_allclose(
            mean, np.where(contributed(g), g.mean(0), 0), atol=1e-6
        )
    rechecked = ring(code=lgc.mean(), gate=1.0, recheck=3)
    _, metrics, _ = run(js.stateless(rechecked), grads)
    assert [int(m.gate) for m in metrics] == [1, 1, 0, 1, 1, 0, 1]
    # Measured only where plain values are at hand.
    assert [int(m.measured) for m in metrics] == [0, 0, 1, 1, 1, 2, 2]


def test_momentum_is_cleared_on_the_whole_support():
    tx = js.momentum_correction(ring(code=small(slope=1.0)), 0.9)
    (g,) = gradients(1)
    _, _, state = run(tx, g[None])
    support = contributed(g)
    momentum = np.asarray(state.momentum.value)
    assert np.all(momentum[:, support] == 0) and np.all(momentum[:, ~support] != 0)


def test_the_mean_of_correlated_workers_is_learned():
    """Shared structure: a wave of magnitudes, with signs and noise of the step."""
    rng = np.random.default_rng(6)
    steps, n = 56, 400
    wave = np.where(np.arange(n) % 4 == 0, 1 + 0.5 * np.sin(np.arange(n) / 25), 0.01)
    signs = rng.choice([-1.0, 1.0], size=(steps, 1, n))
    noise = 1 + 0.1 * rng.normal(size=(steps, WORKERS, n))
    grads = (1e-3 * wave * signs * noise).astype(np.float32)
    reducer = js.lgc_ring(0.25, axis_name=AXIS, stages=(0, 50), support="leader")
    _, metrics, _ = run(js.stateless(reducer), grads)
    assert metrics[0].nmse > 0.5
    assert metrics[49].nmse < 0.02 and metrics[50].gate == 1


def test_bytes_of_the_stages():
    k, n, workers = 1000, 1_000_000, 8
    reducer = js.lgc_ring(0.001, axis_name=AXIS)
    model = jax.ShapeDtypeStruct((1000, 1000), "float32")
    state = jax.eval_shape(reducer.init, model)
    jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])(model, state)
    traffic = js.traffic(jaxpr)
    share = k // workers
    said = 4 * (1 + table.index_words(share, n) + table.ceil_words(share))
    # 11 channels of 5 bits, as 8 workers with the levels 0 to 3 add up to less than
    # 32; six to a word; and the range.
    latent = 4 * math.ceil(11 * latent_length(k, 4) / 6) + 4
    compressed = js.payload_bytes(traffic, workers, phases=2, gate=1)
    assert compressed == (said + latent, 7 * said + latent)
    plain = said + 2 * k, 7 * (said + 2 * k)
    assert js.payload_bytes(traffic, workers, phases=1) == plain
    assert js.payload_bytes(traffic, workers, phases=2, gate=0) == plain
    costs = lgc.cost.ring(workers, k, n, lgc.convolutional(channels=11, slope=1.0))
    assert (costs.mean, costs.down) == compressed
    assert costs.plain_mean == plain[0]
    top_k = 4 * (1 + table.index_words(k, n)) + 2 * k
    assert compressed[0] < top_k / 4 and compressed[1] < 7 * top_k / 4


def test_small_leaves_are_sent_too_where_every_leaf_is_chosen_from():
    """Of every leaf each worker brings its share, rounded up: its largest entries."""
    sizes = {"a": 4, "b": 8, "c": 48}
    rng = np.random.default_rng(8)
    x = {k: rng.normal(size=(WORKERS, n)).astype(np.float32) for k, n in sizes.items()}
    reducer = ring(code=lgc.identity(), support="contributed", scope="leaf")
    step = jax.vmap(lambda x: reducer.reduce(x, reducer.init(x))[0], axis_name=AXIS)
    means = jax.jit(step)(x)
    for name, n in sizes.items():
        share = math.ceil(math.ceil(DENSITY * n) / WORKERS)
        support = np.any([top(row, share) != 0 for row in x[name]], axis=0)
        wanted = np.where(support, x[name].mean(0), 0)
        np.testing.assert_allclose(means[name][0], wanted, atol=1e-6)


def test_places_that_workers_fill_twice_make_plain_values_no_smaller():
    """All chose the same: of k places 1 / N is filled, with one magnitude for these."""
    g = np.where(np.arange(N) < K // WORKERS, -5.0, 0.0)
    grads = np.broadcast_to(g, (2, WORKERS, N)).astype(np.float32)
    reducer = ring(code=lgc.mean(), codec=js.codec.sign_mean(), gate=1e-9)
    means, metrics, _ = run(js.stateless(reducer), grads)
    assert int(metrics[0].gate) == 0  # plain values
    np.testing.assert_allclose(means[0], g, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", [js.lgc_server, js.lgc_ring])
@pytest.mark.parametrize(
    "code", [small(), small(slope=1.0), lgc.linear(4, 2), lgc.mean(), lgc.identity()]
)
def test_with_64_bits_it_traces_and_sends_the_same_bytes(form, code, dtype):
    reducer = form(DENSITY, axis_name=AXIS, code=code, stages=(1, 2))

    def bytes_of(dtype):
        x = jax.ShapeDtypeStruct((N,), dtype)
        state = jax.eval_shape(reducer.init, x)
        jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, WORKERS)])(x, state)
        traffic = js.traffic(jaxpr)
        ways = [{"phases": 1}, {"phases": 2, "gate": 0}, {"phases": 2, "gate": 1}]
        return [js.payload_bytes(traffic, WORKERS, **way) for way in ways]

    wanted = bytes_of("float32")
    with jax.enable_x64(True):
        assert bytes_of(dtype) == wanted


@pytest.mark.parametrize(
    "kwargs, wrong",
    [
        ({"support": "all"}, "support"),
        ({"latent_bits": 17}, "latent_bits"),
        ({"latent_bits": 8.0}, "latent_bits"),
        ({"latent_bits": jnp.array(8)}, "latent_bits"),
        ({"order": lgc.signed()}, "support"),
        ({"code": lgc.convolutional(innovation=True)}, "code"),
        ({"preset": "best"}, "preset"),
    ],
)
def test_wrong_values_are_named(kwargs, wrong):
    with pytest.raises(ValueError, match=rf"lgc_ring\({wrong}="):
        js.lgc_ring(0.01, axis_name=AXIS, **kwargs)
