import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from contract_table import AXIS, SHAPES, dyadic, on_workers, sparse, stacked

import jaxsparse as js

WORKERS, N, K, STEPS = 4, 40, 5, 6


def gradients(seed=0, steps=STEPS, workers=WORKERS, n=N):
    """Multiples of 1/64; some entries are larger again and again, and others."""
    rng = np.random.default_rng(seed)
    scale = rng.geometric(0.3, n)
    return (scale * rng.integers(-90, 90, (steps, workers, n))) / np.float32(64)


def means(seed=1):
    """Sparse aggregates, one of them without anything."""
    x = simulation.top_k(gradients(seed, workers=1)[:, 0], 2 * K)
    x[3] = 0
    return x.astype(np.float32)


def scores(priority, seen, x, sent=None):
    """Scores of the same vector before the first and after every observation."""

    @jax.jit
    def run(seen, sent, x):
        def step(state, observed):
            state = priority.observe(state, *observed)
            return state, priority.score(state, x)

        state = priority.init(x.shape[0])
        later = jax.lax.scan(step, state, (seen, sent))[1]
        return jnp.concatenate([priority.score(state, x)[None], later])

    return np.asarray(run(seen, seen if sent is None else sent, x))


X = gradients(2, steps=1, workers=1)[0, 0]


def frequency(seen, window, weight):
    count = np.zeros((len(seen) + 1, N))
    for t in range(1, len(seen) + 1):
        count[t] = (seen[max(t - window, 0) : t] != 0).sum(0)
    return np.abs(X) * (1 + weight * count / window)


def average(seen, decay, of):
    e = np.zeros((len(seen) + 1, N))
    for t, mean in enumerate(seen):
        s = np.abs(mean) / max(np.abs(mean).max(), 1e-30)
        e[t + 1] = decay * e[t] + (1 - decay) * (s if of == "magnitude" else mean != 0)
    return e


@pytest.mark.parametrize("window", [1, 3, 32])
def test_frequency_counts_the_rounds_in_the_window(window):
    found = scores(js.frequency(window, weight=4.0), means(), X)
    np.testing.assert_allclose(found, frequency(means(), window, 4.0), rtol=1e-6)


def test_frequency_remembers_32_rounds_and_no_more():
    seen = np.zeros((40, N), np.float32)
    seen[:36, 0] = seen[::2, 1] = seen[0, 2] = 1
    full = scores(js.frequency(weight=1.0), seen, np.ones(N, np.float32))
    assert full[32].tolist()[:4] == [2, 1.5, 1 + 1 / 32, 1]
    assert full[33, 2] == 1  # forgotten
    assert full[-1].tolist()[:3] == [1 + 28 / 32, 1.5, 1]
    shorter = scores(js.frequency(31, weight=31.0), seen, np.ones(N, np.float32))
    assert shorter[-1].tolist()[:2] == [1 + 27, 1 + 15]


@pytest.mark.parametrize("of", ["magnitude", "support"])
@pytest.mark.parametrize("decay", [0.0, 0.75, 1.0])
def test_ema_is_numpys(of, decay):
    found = scores(js.ema(decay, 8.0, of=of), means(), X)
    wanted = np.abs(X) * (1 + 8 * average(means(), decay, of))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 0.25])
def test_penalty_is_numpys(factor):
    found = scores(js.penalty(0.75, 0.3, factor), means(), X)
    e = average(means(), 0.75, "support")
    assert (e > 0.3).any() and ((e > 0) & (e < 0.3)).any()
    wanted = np.abs(X) * np.where(e >= 0.3, 1, factor)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.9, 0.8, 0.7])
def test_penalty_is_passed_after_one_round_at_a_threshold_of_the_rest(decay):
    seen = np.ones((1, N), np.float32)
    penalty = js.penalty(decay, threshold=round(1 - decay, 2), factor=0.5)
    np.testing.assert_array_equal(scores(penalty, seen, X)[1], np.abs(X))


@pytest.mark.parametrize("mu", [0.1, 1.0, 10.0])
def test_reg_top_k_is_numpys(mu):
    g = gradients(3)
    sent = simulation.top_k(g.reshape(-1, N), K).reshape(g.shape).astype(np.float32)
    own, mean = sent[:, 0], sent.mean(1)
    found = scores(js.reg_top_k(mu, num_workers=WORKERS), mean, X, own)
    np.testing.assert_array_equal(found[0], np.abs(X))
    x = np.where(X == 0, 1, X)
    d = (mean - own / WORKERS) / (x / WORKERS)
    wanted = np.abs(X) * np.where(own != 0, np.tanh(np.abs(1 + d) / mu), 1)
    np.testing.assert_allclose(found[1:], wanted, rtol=1e-5)


def test_reg_top_k_damps_what_the_others_cancel():
    x = np.zeros(N, np.float32)
    x[:2] = 1
    own, mean = x, np.where(np.arange(N) == 0, 0, x)  # the others sent -1 at entry 0
    found = scores(js.reg_top_k(num_workers=2), mean[None], x, own[None])
    np.testing.assert_allclose(found[1, :2], [0, np.tanh(2.0)], rtol=1e-6)


SHARED = {
    "frequency": js.frequency(3, weight=4.0),
    "ema": js.ema(0.75, 16.0),
    "ema_support": js.ema(0.75, 4.0, of="support"),
    "penalty": js.penalty(0.75, factor=0.25),
}
LOCAL = {
    "frequency": js.frequency(3, weight=4.0, local=True),
    "ema": js.ema(0.75, 16.0, local=True),
    "penalty": js.penalty(0.75, factor=0.25, local=True),
    "reg_top_k": js.reg_top_k(num_workers=WORKERS),
}
every_shared = pytest.mark.parametrize("name", SHARED)
every_local = pytest.mark.parametrize("name", LOCAL)


@pytest.mark.parametrize("seen", [0.0, 1e-40, 3.4e38])
@pytest.mark.parametrize("name", [*SHARED, "reg_top_k"])
def test_scores_are_never_nan_and_never_negative(name, seen):
    priority = SHARED.get(name, LOCAL["reg_top_k"])
    observed = np.full((2, N), seen, np.float32)
    for x in (0.0, 1e-40, -1.0, 3.4e38):
        found = scores(priority, observed, np.full(N, x, np.float32))
        assert (found >= 0).all()


def test_the_magnitude_of_nothing_decays():
    seen = np.zeros((3, N), np.float32)
    seen[0, 0] = 2.0
    found = scores(js.ema(0.5, 8.0), seen, np.ones(N, np.float32))
    assert found[:, 0].tolist() == [1, 5, 3, 2]


@functools.cache
def compiled(selection, scope="global", shared=True):
    """Means and rests of steps with error feedback, and the selection's last state."""
    reducer = sparse(selection, scope=scope)

    def run(grads):
        def step(carry, g):
            left, state = carry
            mean, left, state = reducer.reduce(jax.tree.map(jnp.add, g, left), state)
            return (left, state), (mean, left)

        zero = jax.tree.map(lambda g: g[0] * 0, grads)
        (_, state), (mean, left) = jax.lax.scan(step, (zero, reducer.init(zero)), grads)
        return mean, left, state.selection

    return on_workers(run, (None, 0, None if shared else 0), in_axes=1)


def steps(selection, grads, **kwargs):
    mean, left, state = compiled(selection, **kwargs)(grads)
    return jax.tree.map(np.asarray, (mean, left, state))


@pytest.mark.parametrize(
    "priority",
    [
        js.frequency(weight=0.0),
        js.ema(weight=0.0),
        js.ema(weight=0.0, of="support", local=True),
        js.penalty(factor=1.0),
        js.reg_top_k(mu=1e-30, num_workers=WORKERS),
    ],
    ids=["frequency", "ema", "ema_local", "penalty", "reg_top_k"],
)
def test_without_weight_it_is_plain_top_k_bit_for_bit(priority):
    g = np.random.default_rng(5).normal(size=(STEPS, WORKERS, N)).astype(np.float32)
    mean, left, _ = steps(js.top_k(K / N), g)
    found = steps(js.top_k(K / N, priority), g, shared=is_shared(priority))
    np.testing.assert_array_equal(found[0], mean)
    np.testing.assert_array_equal(found[1], left)


def is_local(node):
    return isinstance(node, js.WorkerLocal)


def is_shared(priority):
    return not any(map(is_local, jax.tree.leaves(priority.init(1), is_leaf=is_local)))


def simulated(grads, k, score, observe, state, sizes=(N,)):
    """Error feedback in NumPy, per slice of the vector; ``score`` on all workers."""
    residual, out = np.zeros(grads.shape[1:]), []
    starts = np.cumsum([0, *sizes])
    states = [state(n) for n in sizes]
    for g in grads:
        x = g + residual
        sent = np.zeros_like(x)
        for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            q = np.float32(score(states[i], x[:, a:b]))
            chosen = simulation.top_k(q, k(b - a)) != 0
            sent[:, a:b] = np.where(chosen, x[:, a:b], 0)
        residual, mean = x - sent, sent.mean(0)
        for i, (a, b) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            states[i] = observe(states[i], mean[a:b])
        out.append(mean)
    return np.stack(out), residual, states


@pytest.mark.parametrize("scope", ["global", "leaf"])
def test_a_training_with_ema_on_the_support_is_numpys(scope):
    g = gradients(7)
    sizes = (N,) if scope == "global" else (11, 29)
    wanted, rest, states = simulated(
        g,
        k=lambda n: -(-n // 8),
        score=lambda e, x: np.abs(x) * (1 + 4 * e),
        observe=lambda e, mean: 0.75 * e + 0.25 * (mean != 0),
        state=np.zeros,
        sizes=sizes,
    )
    parts = np.split(g, np.cumsum(sizes)[:-1], axis=-1)
    selection = js.top_k(1 / 8, SHARED["ema_support"])
    mean, left, state = steps(selection, dict(enumerate(parts)), scope=scope)
    np.testing.assert_array_equal(np.concatenate([*mean.values()], -1), wanted)
    last = np.concatenate([*left.values()], -1)[:, -1]
    np.testing.assert_array_equal(last, rest)
    np.testing.assert_allclose(state, np.concatenate(states), rtol=1e-6)


@every_shared
def test_workers_choose_more_alike(name):
    plain, _, _ = steps(js.top_k(K / N), gradients(8, steps=20))
    # Out axes None prove that the state is the same on all workers.
    found, _, state = steps(js.top_k(K / N, SHARED[name]), gradients(8, steps=20))
    assert state.shape == (N,)
    assert np.count_nonzero(found[5:]) < 0.95 * np.count_nonzero(plain[5:])


@every_shared
def test_the_state_costs_no_traffic(name):
    def traffic(selection):
        reducer = sparse(selection, exchange=js.server(), workers=WORKERS)
        x = jnp.zeros(N)
        state = reducer.init(x)
        axis_env = [(AXIS, WORKERS)]
        return js.traffic(jax.make_jaxpr(reducer.reduce, axis_env=axis_env)(x, state))

    assert traffic(js.top_k(K / N, SHARED[name])) == traffic(js.top_k(K / N))


@every_local
def test_local_state_is_marked_and_differs(name):
    selection = js.top_k(K / N, LOCAL[name])
    assert not is_shared(LOCAL[name])
    reducer = sparse(selection)
    state, axes = stacked(reducer.init(jnp.zeros(N)), WORKERS)
    step = on_workers(reducer.reduce, (None, 0, axes), (0, axes))
    # What is not marked proves to be the same on all workers by out axes None.
    for g in gradients(9, steps=2):
        _, _, state = step(g, state)
    (local,) = filter(is_local, jax.tree.leaves(state.selection, is_leaf=is_local))
    own = np.asarray(local.value)
    assert own.shape == (WORKERS, N) and (own[0] != own[1]).any()


def test_a_local_ema_follows_what_the_worker_itself_sent():
    g = gradients(10, steps=1)
    sent = simulation.top_k(g[0], K) != 0
    selection = js.top_k(K / N, js.ema(0.75, of="support", local=True))
    state = steps(selection, g, shared=False)[2]
    np.testing.assert_array_equal(state.value, 0.25 * sent)


def waiting(priority, exploration=0.0, length=120):
    """How entries of error feedback wait: a hot set of 4 of 16, and 12 that trickle.

    Returns |x| of every entry before each step, and which of them were sent.
    """
    n, k = 16, 4
    g = jnp.where(jnp.arange(n) < 4, 1.0, 1 / 8)
    selection = js.top_k(k / n, priority, exploration=exploration)

    @jax.jit
    def run(state):
        def step(carry, _):
            left, state = carry
            x = g + left
            chosen = jnp.zeros(n, bool).at[selection.select(x, state)[0]].set(True)
            sent = jnp.where(chosen, x, 0)
            state = selection.observe(state, sent, sent)
            return (x - sent, state), (x, chosen)

        return jax.lax.scan(step, (jnp.zeros(n), state), length=length)[1]

    return map(np.asarray, run(selection.init(n)))


@pytest.mark.parametrize(
    ("priority", "ratio"),
    [
        (js.frequency(4, weight=7.0), 8),
        (js.ema(0.5, 7.0, of="support"), 8),
        (js.ema(0.5, 7.0), 8),
        (js.penalty(0.5, factor=1 / 8), 8),
        (js.magnitude(), 1),
    ],
    ids=["frequency", "ema_support", "ema", "penalty", "magnitude"],
)
def test_no_entry_waits_for_longer_than_the_ratio_of_factors(priority, ratio):
    """Chosen at the latest when ``|x|`` is more than ``ratio`` times the threshold."""
    x, chosen = waiting(priority)
    threshold = np.where(chosen, x, np.inf).min(1, keepdims=True)
    assert chosen[x > ratio * threshold].all()
    assert chosen.any(0).all()  # nobody starves
    if ratio > 1:
        assert (~chosen[x > 2 * threshold]).any()  # but it does take longer


def test_a_factor_of_zero_starves_and_exploration_feeds():
    penalty = js.penalty(factor=0.0)
    x, chosen = waiting(penalty)
    assert not chosen[1:, 4:].any() and x[-1, 4:].min() > 5
    x, chosen = waiting(penalty, exploration=0.2)
    assert chosen[:, 4:].any(0).all() and x[-1].max() < 5
    # One of four places, for the largest magnitude that has no other.
    assert (chosen.sum(1) == 4).all()


def test_exploration_takes_the_largest_of_the_rest():
    never = js.Priority(
        init=lambda n: (),
        score=lambda state, x: jnp.where(jnp.arange(x.shape[0]) < 4, 1.0, 0.0),
        observe=lambda state, mean, sent: state,
    )
    x = jnp.array([1.0, 2, 3, 4, 5, -9, 7, jnp.nan])
    for share, own in ((0.0, []), (0.25, [7]), (0.5, [7, 5]), (1.0, [7, 5, 6, 4])):
        indices, _ = js.top_k(0.5, never, exploration=share).select(x, ())
        # First in importance, so that a server has a place for them.
        assert indices.tolist() == [*own, *range(4 - len(own))]


def test_a_schedule_of_densities_keeps_its_average():
    ema = js.ema(0.5, 4.0, of="support")
    reducer = js.phases(
        [(3, sparse(js.top_k(0.5, ema))), (None, sparse(js.top_k(K / N, ema)))]
    )
    g = gradients(11)

    def run(g):
        def step(state, x):
            mean, _, state = reducer.reduce(x, state)
            return state, (mean, state.reducer.selection)

        return jax.lax.scan(step, reducer.init(g[0]), g)[1]

    mean, states = map(np.asarray, on_workers(run, None, in_axes=1)(g))
    e, wanted = np.zeros(N), []
    for t, x in enumerate(g):
        k = N // 2 if t < 3 else K
        chosen = simulation.top_k(np.abs(x) * (1 + 4 * e), k) != 0
        wanted.append(np.where(chosen, x, 0).mean(0))
        e = 0.5 * e + 0.5 * (wanted[-1] != 0)
        np.testing.assert_allclose(states[t], e)
    np.testing.assert_array_equal(mean, wanted)


def test_priorities_of_a_tree_with_odd_leaves():
    x = dyadic(12, {**SHAPES, "empty": (0,), "one": (1,)}, WORKERS)
    grads = jax.tree.map(lambda v: v[None], x)
    _, _, state = steps(js.top_k(0.1, SHARED["ema"]), grads, scope="leaf")
    assert state.shape == (7 + 55 + 1 + 1,) and np.isfinite(state).all()


@pytest.mark.parametrize("scope", ["global", "leaf"])
def test_another_number_of_workers_than_promised_is_refused(scope):
    selection = js.top_k(K / N, js.reg_top_k(num_workers=8))
    message = r"`reg_top_k\(num_workers=...\)` is 8, but axis .* has 4.*num_workers=4"
    with pytest.raises(ValueError, match=message):
        steps(selection, gradients(), shared=False, scope=scope)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: js.frequency(0), r"`frequency\(window=...\)`.*at least 1, got 0"),
        (lambda: js.frequency(2.0), r"`frequency\(window=...\)`.*whole number"),
        (lambda: js.frequency(33), r"window=.*at most 32, got 33.*`ema`"),
        (lambda: js.frequency(weight=-1), r"`frequency\(weight=...\)`.*got -1"),
        (lambda: js.ema(1.5), r"`ema\(decay=...\)` must lie in \[0, 1\], got 1.5"),
        (lambda: js.ema(weight=float("nan")), r"`ema\(weight=...\)`.*got nan"),
        (lambda: js.ema(weight=float("inf")), r"`ema\(weight=...\)`.*got inf"),
        (lambda: js.ema(of="max"), r"`ema\(of=...\)` must be 'magnitude' or"),
        (lambda: js.penalty(decay=-0.1), r"`penalty\(decay=...\)`.*got -0.1"),
        (lambda: js.penalty(threshold=2), r"`penalty\(threshold=...\)`.*got 2"),
        (lambda: js.penalty(factor=1.1), r"`penalty\(factor=...\)`.*got 1.1"),
        (lambda: js.reg_top_k(0, num_workers=2), r"`reg_top_k\(mu=...\)`.*got 0"),
        (lambda: js.reg_top_k(num_workers=0), r"`reg_top_k\(num_workers=...\)`"),
        (lambda: js.top_k(0.1, exploration=2), r"`top_k\(exploration=...\)`.*got 2"),
    ],
)
def test_arguments_out_of_range_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
