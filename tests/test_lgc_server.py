"""The parameter-server form; expected values from NumPy and from the laws."""

import functools
import math

import contract_table as table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, on_workers, small

import jaxsparse as js
from jaxsparse import lgc
from jaxsparse.arguments import entries
from jaxsparse.lgc.server_steps import innovation_share

WORKERS, N, K = 4, 60, 12
DENSITY = K / N
EXACT = dict.fromkeys(("codec", "latent", "innovation_codec"), js.codec.float32())


def server(**kwargs):
    """Latents from the first step on, without a gate."""
    given = {"stages": (0, 0), "gate": math.inf, **EXACT}
    return js.lgc_server(DENSITY, axis_name=AXIS, **(given | kwargs))


def gradients(steps, seed=0):
    shape = (steps, WORKERS, N)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(tx, grads):
    """Means, and metrics after every step; what is shared proves to be so."""
    state = tx.init(jnp.zeros(grads.shape[2:]))
    axes = js.state_axes(state)
    state, _ = table.stacked(state, WORKERS)

    def step(g, state):
        mean, state = tx.update(g, state)
        return mean, state, js.metrics(state)

    own = js.metrics(state)._asdict().fromkeys(js.metrics(state)._fields)
    own |= {"residual_norm": 0, "captured": 0}
    step = on_workers(step, (None, axes, type(js.metrics(state))(**own)), (0, axes))
    means, metrics = [], []
    for g in grads:
        mean, state, measured = step(jnp.asarray(g), state)
        means.append(mean)
        metrics.append(measured)
    return np.stack(means), metrics, state


def top(x, k):
    return simulation.top_k(x[None], k)[0]


def test_an_identity_with_a_whole_innovation_is_plain_top_k():
    """The leader speaks for itself alone, the others send their own k entries."""
    reducer = server(code=lgc.identity(), innovation=1.0, replay=0.0)
    grads = gradients(6)
    means, _, state = run(js.error_feedback(reducer), grads)
    wanted, residual = simulation.error_feedback(grads, K)
    np.testing.assert_allclose(means, wanted, atol=1e-5)
    np.testing.assert_allclose(state.residual.value, residual, atol=1e-5)


def test_everyone_replays_a_leader_that_changes():
    reducer = server(code=lgc.identity(), innovation=0.0, replay=1.0)
    grads = gradients(5)
    means, _, state = run(js.error_feedback(reducer), grads)
    residual = np.zeros((WORKERS, N))
    for t, g in enumerate(grads):
        x = g + residual
        sent = top(x[t % WORKERS], K)
        np.testing.assert_allclose(means[t], sent, atol=1e-5)
        residual = x - sent
    np.testing.assert_allclose(state.residual.value, residual, atol=1e-5)


def test_a_fixed_leader_is_the_first_worker():
    reducer = server(code=lgc.identity(), innovation=0.0, replay=1.0, rotate=False)
    grads = gradients(2)
    means, _, _ = run(js.stateless(reducer), grads)
    np.testing.assert_allclose(means, [top(g[0], K) for g in grads], atol=1e-6)


def test_innovations_mend_the_largest_errors():
    reducer = server(code=lgc.mean(), innovation=0.25, replay=0.5)
    (g,) = gradients(1)
    means, _, state = run(js.error_feedback(reducer), [g][:1] * np.ones((1, 1, 1)))
    leading = top(g[0], K)
    support = leading != 0
    rec = np.sign(leading) * np.abs(leading[support]).mean()
    total, left = np.zeros(N), np.zeros_like(g)
    for i, x in enumerate(g):
        part = rec * (1.0 if i == 0 else 0.5)
        mended = top(np.where(top(x, K) != 0, x - part, 0.0), K // 4)
        total += (part + mended) / WORKERS
        left[i] = x - part - mended
    np.testing.assert_allclose(means[0], total, atol=1e-5)
    np.testing.assert_allclose(state.residual.value, left, atol=1e-5)


def test_a_mean_as_code_is_sign_and_mean_magnitude():
    reducer = server(code=lgc.mean(), innovation=0.0, replay=1.0)
    (g,) = gradients(1)
    means, metrics, _ = run(js.stateless(reducer), g[None])
    leading = top(g[0], K)
    magnitudes = np.abs(leading[leading != 0])
    np.testing.assert_allclose(
        means[0], np.sign(leading) * magnitudes.mean(), atol=1e-6
    )
    # NMSE of a mean is the variance over the mean square.
    wanted = magnitudes.var() / (magnitudes**2).mean()
    np.testing.assert_allclose(metrics[0].nmse, wanted, rtol=1e-5)
    assert metrics[0].selected == K / WORKERS and metrics[0].aggregated == K


def test_a_decoder_with_the_innovation_inside():
    """Values decoded for each worker on the leader's support, entries elsewhere."""
    code = small(innovation=True)
    reducer = server(code=code, order=lgc.signed(), innovation=0.25, rotate=False)
    (g,) = gradients(1, seed=3)
    means, _, state = run(js.error_feedback(reducer), g[None])
    params = state.reducer.reducer.params
    leading = top(g[0], K)
    support = np.argsort(leading)
    support = support[leading[support] != 0]
    scale = np.sqrt(np.mean(g[0, support] ** 2))
    z = code.encode(params, jnp.asarray(g[0, support] / scale))
    total, left = np.zeros(N), np.array(g)
    for i, x in enumerate(g):
        innovation = top(x, K // 4)
        helped = jnp.asarray(innovation[support] / scale)
        part = innovation.copy()
        part[support] = np.asarray(code.decode(params, z, K, helped)) * scale
        total += part / WORKERS
        left[i] -= part
    np.testing.assert_allclose(means[0], total, atol=1e-5)
    np.testing.assert_allclose(state.residual.value, left, atol=1e-5)


def test_stages_are_dense_then_top_k_then_latents():
    reducer = server(code=lgc.mean(), stages=(1, 2), innovation=0.0, replay=1.0)
    g = gradients(1)[0]
    means, metrics, _ = run(js.stateless(reducer), np.stack([g] * 3))
    assert [int(m.phase) for m in metrics] == [0, 1, 2]
    np.testing.assert_allclose(means[0], g.mean(0), atol=1e-6)
    np.testing.assert_allclose(means[1], simulation.top_k(g, K).mean(0), atol=1e-6)
    # The counter of leaders starts with the training.
    leading = top(g[1], K)
    wanted = np.sign(leading) * np.abs(leading[leading != 0]).mean()
    np.testing.assert_allclose(means[2], wanted, atol=1e-6)


def test_a_closed_gate_sends_plain_values_on_the_same_support():
    kwargs = {"code": lgc.mean(), "innovation": 0.0, "replay": 1.0}
    grads = gradients(7)
    plain, metrics, _ = run(js.stateless(server(**kwargs, gate=1e-9)), grads)
    latent, open_metrics, _ = run(js.stateless(server(**kwargs)), grads)
    assert [int(m.fallbacks) for m in metrics] == [1, 2, 3, 4, 5, 6, 7]
    assert all(m.gate == 0 for m in metrics)
    assert all(m.gate == 1 and m.fallbacks == 0 for m in open_metrics)
    for t, g in enumerate(grads):
        np.testing.assert_allclose(plain[t], top(g[t % WORKERS], K), atol=1e-6)
    np.testing.assert_array_equal(plain != 0, latent != 0)
    # Both measure the same.
    for a, b in zip(metrics, open_metrics, strict=True):
        np.testing.assert_allclose(a.nmse, b.nmse, rtol=1e-5)
        assert a.measured == b.measured


def test_an_open_gate_is_rechecked_on_schedule():
    reducer = server(code=lgc.mean(), gate=1.0, recheck=3)
    _, metrics, _ = run(js.stateless(reducer), gradients(7))
    assert [int(m.gate) for m in metrics] == [1, 1, 0, 1, 1, 0, 1]
    assert int(metrics[-1].fallbacks) == 2 and int(metrics[-1].measured) == 7


def structured(steps, n=400, seed=5):
    """Signs at random; the magnitudes of large entries follow their coordinate."""
    rng = np.random.default_rng(seed)
    wave = 1 + 0.5 * np.sin(np.arange(n) / 25)
    large = np.arange(n) % 4 == 0
    signs = rng.choice([-1.0, 1.0], size=(steps, WORKERS, n))
    noise = 1 + 0.02 * rng.normal(size=(steps, WORKERS, n))
    return (1e-3 * signs * noise * np.where(large, wave, 0.1)).astype(np.float32)


def test_the_autoencoder_learns_what_has_structure():
    """An error below 0.01, of which one mean magnitude leaves the wave's variance."""
    grads = structured(56)
    magnitudes = np.abs(grads[-1, 0, ::4])
    assert magnitudes.var() / np.mean(magnitudes**2) > 0.05
    reducer = js.lgc_server(0.25, axis_name=AXIS, stages=(0, 50))
    _, metrics, _ = run(js.stateless(reducer), grads)
    assert metrics[0].nmse > 0.5
    assert all(m.gate == 1 and m.nmse < 0.01 for m in metrics[50:])


def test_momentum_is_cleared_on_the_whole_support():
    """Wherever something of a worker was applied, that is; all of it under replay."""
    reducer = server(code=small(), innovation=0.25, replay=1.0)
    tx = js.momentum_correction(reducer, 0.9)
    grads = gradients(1)
    _, _, state = run(tx, grads)
    momentum = np.asarray(state.momentum.value)
    support = top(grads[0, 0], K) != 0
    assert np.all(momentum[:, support] == 0)
    for i in range(WORKERS):
        elsewhere = momentum[i, ~support]
        # The innovation's entries, and no others.
        assert np.sum(elsewhere == 0) <= K // 4
        assert np.sum(elsewhere != 0) >= N - K - K // 4


def test_dense_and_compressed_steps_leave_the_code_alone():
    reducer = server(code=small(), stages=(1, 2))
    tx = js.stateless(reducer)
    grads = gradients(3)
    params = lambda state: jax.tree.leaves(state.reducer.params)  # noqa: E731
    found = [params(tx.init(jnp.zeros(N)))]
    found += [params(run(tx, grads[: i + 1])[2]) for i in range(3)]
    same = [
        all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        for before, after in zip(found, found[1:], strict=False)
    ]
    assert same == [True, False, True]


@functools.cache
def traffic(form, preset):
    reducer = form(0.001, axis_name=AXIS, preset=preset)
    model = jax.ShapeDtypeStruct((1000, 1000), "float32")
    state = jax.eval_shape(reducer.init, model)
    jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, 8)])(model, state)
    return js.traffic(jaxpr)


def payload(phase, gate, form=js.lgc_server, preset="improved"):
    return js.payload_bytes(traffic(form, preset), 8, phases=phase, gate=gate)


def test_bytes_of_the_stages():
    k, n, m = 1000, 1_000_000, 275  # 0.4 k, less k / 8
    words = lambda k: table.index_words(k, n)  # noqa: E731
    own = 4 * (words(k) + k // 2)
    innovation = 4 * (words(m) + table.ceil_words(m) + 1)  # signs, and a scale
    support = 4 * (2 + words(k) + table.ceil_words(k))
    length = math.ceil((k + 1) / 16) - 1  # m positions are 16 m + 15 entries
    latent = 2 * length + 4 * math.ceil(2 * length / 128)  # int8, a scale to 128
    leader = support + 4 * math.ceil(latent / 4)
    assert payload(0, 1) == (4 * n, 4 * n)
    assert payload(1, 1) == (own, 7 * own)
    assert payload(2, 1) == (leader + innovation, leader + 7 * innovation)
    plain = support + 2 * k
    assert payload(2, 0) == (plain + innovation, plain + 7 * innovation)
    # Only the leader says its part.
    costs = lgc.cost.server(8, k, n, lgc.convolutional(channels=2))
    assert costs.leader == leader + innovation and costs.others == innovation
    assert costs.mean == leader / 8 + innovation < own / 4.7
    assert costs.plain_mean == plain / 8 + innovation
    assert costs.down == 4 * (words(k + 8 * m) + (k + 8 * m) // 2)


def test_bytes_of_the_papers_presets():
    """A list of 20 bits an entry says the order; latents and values are float32."""
    k, n, m = 1000, 1_000_000, 10
    support, latent = 4 * math.ceil(20 * k / 32), 16 * (math.ceil((k + 1) / 16) - 1)
    exact = {"codec": js.codec.float32(), "order": lgc.signed()}
    code = lgc.convolutional((64, 128, 256, 64), innovation=True)
    innovation = 4 * (table.index_words(m, n) + m)
    lead = 8 + support + latent
    assert payload(2, 1, preset="paper")[0] == lead + innovation
    float32 = {"latent": js.codec.float32(), "innovation_codec": js.codec.float32()}
    costs = lgc.cost.server(8, k, n, code, innovation=0.01, **float32, **exact)
    assert (costs.leader, costs.others) == (lead + innovation, innovation)
    assert costs.mean == lead / 8 + innovation

    up = payload(2, 1, js.lgc_ring, "paper")
    assert up == (4 + support + latent,) * 2
    code = lgc.convolutional((64, 128, 256, 64))
    costs = lgc.cost.ring(8, k, n, code, contributed=False, latent_bits=32, **exact)
    assert (costs.leader, costs.others) == (up[0], latent)
    assert costs.mean == (4 + support) / 8 + latent and costs.down == up[1]


@pytest.mark.parametrize(
    "kwargs, wrong",
    [
        ({"stages": (5, 3)}, "stages"),
        ({"stages": (-1, 3)}, "stages"),
        ({"preset": "best"}, "preset"),
        ({"innovation": 1.5}, "innovation"),
        ({"replay": -0.1}, "replay"),
        ({"gate": 0.0}, "gate"),
        ({"recheck": 0}, "recheck"),
        ({"recheck": 2**32}, "recheck"),
        ({"seed": 2**63}, "seed"),
        ({"scope": "layer"}, "scope"),
        ({"seed": -1}, "seed"),
        ({"num_workers": 0}, "num_workers"),
        ({"training": lgc.Training(0.0)}, "training"),
        ({"training": lgc.Training(steps=0)}, "training"),
    ],
)
def test_wrong_values_are_named(kwargs, wrong):
    with pytest.raises(ValueError, match=rf"lgc_server\({wrong}=\.\.\.\)"):
        js.lgc_server(0.01, axis_name=AXIS, **kwargs)


@pytest.mark.parametrize("argument", ["gate", "innovation", "replay", "rotate"])
def test_arrays_that_shapes_or_branches_depend_on_are_refused(argument):
    with pytest.raises(TypeError, match=rf"lgc_server\({argument}=\.\.\.\)"):
        js.lgc_server(0.01, axis_name=AXIS, **{argument: jnp.array(0.5)})


def test_an_innovation_is_a_whole_number_of_entries():
    """0.4 k less a quarter as leader: 0.15 of 20 are 3."""
    share = innovation_share("auto", 4)
    assert [entries(share, k) for k in (20, 1000)] == [3, 150]


@pytest.mark.parametrize(
    "argument", ["code", "order", "latent", "innovation_codec", "codec", "training"]
)
def test_wrong_kinds_are_named(argument):
    with pytest.raises(TypeError, match=rf"lgc_server\({argument}=\.\.\.\)"):
        js.lgc_server(0.01, axis_name=AXIS, **{argument: optax.adam})
