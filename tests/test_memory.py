import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, sparse
from flax.training.train_state import TrainState

import jaxsparse as js

WORKERS, STEPS, RATE = 4, 6, 0.125
LOSSLESS = {
    "dense": lambda: js.dense(axis_name=AXIS),
    "density one": lambda: sparse(js.top_k(1.0)),
}
every_lossless = pytest.mark.parametrize("lossless", LOSSLESS)


def params():
    return {"a": jnp.arange(6.0).reshape(2, 3) / 4, "b": jnp.ones(5), "c": jnp.ones(())}


def targets(seed=0, steps=STEPS):
    """Multiples of 1/64 like the parameters, [steps, workers, ...]."""
    rng = np.random.default_rng(seed)
    draw = lambda p: rng.integers(-256, 256, (steps, WORKERS, *p.shape)) / 64  # noqa: E731
    return jax.tree.map(lambda p: jnp.asarray(draw(p), jnp.float32), params())


def given(params, x):
    """A gradient that does not depend on the parameters."""
    return x


def towards(params, x):
    """The gradient of half the squared distance from a worker's target."""
    return jax.tree.map(jnp.subtract, params, x)


def train(tx, data, gradient=given, params=params):
    """Parameters after every step, the same on all workers; every worker's state."""

    # out_axes None is the proof that all workers hold the same parameters.
    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 1), out_axes=(None, 0), axis_name=AXIS)
    def run(params, data):
        def step(carry, x):
            params, state = carry
            updates, state = tx.update(gradient(params, x), state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        carry = (params, tx.init(params))
        (_, state), path = jax.lax.scan(step, carry, data)
        return path, state

    return run(params(), data)


def train_plainly(tx, data, gradient=given, before=lambda g: g):
    """The same in one place: ``tx`` on the mean of the workers' gradients."""

    @jax.jit
    def run(params, data):
        def step(carry, x):
            params, state = carry
            grads = jax.vmap(lambda x: before(gradient(params, x)))(x)
            mean = jax.tree.map(lambda g: g.mean(0), grads)
            updates, state = tx.update(mean, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, tx.init(params)), data)[1]

    return run(params(), data)


def assert_close(got, expected, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


N, K = 30, 5


@functools.cache
def vectors(steps=8):
    shape = (steps, WORKERS, N)
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def means_and_state(tx, grads):
    """The means that a transformation yields for gradients [steps, workers, n]."""
    # Parameters of zero that take each update with the rate one add the means up.
    path, state = train(
        tx, jnp.asarray(grads), params=lambda: jnp.zeros(grads.shape[2])
    )
    return np.diff(np.asarray(path), axis=0, prepend=0), state


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_error_feedback_does_what_numpy_says(decay):
    tx = js.error_feedback(sparse(js.top_k(K / N)), decay)
    means, state = means_and_state(tx, vectors())
    expected, residual = simulation.error_feedback(vectors(), K, decay)
    np.testing.assert_allclose(means, expected, atol=5e-6)
    np.testing.assert_allclose(state.residual.value, residual, atol=2e-6)
    assert np.abs(residual).max() > 1  # or nothing was remembered


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_correction_follows_the_equations_of_dgc(nesterov, masking):
    tx = js.momentum_correction(sparse(js.top_k(K / N)), 0.9, nesterov, masking)
    means, state = means_and_state(tx, vectors())
    expected, v, u = simulation.momentum_correction(
        vectors(), K, 0.9, nesterov, masking
    )
    np.testing.assert_allclose(means, expected, atol=1e-5)
    np.testing.assert_allclose(state.velocity.value, v, atol=5e-6)
    np.testing.assert_allclose(state.momentum.value, u, atol=5e-6)


@pytest.mark.report("torchft#233")
@pytest.mark.parametrize("nesterov", [True, False])
@every_lossless
def test_a_lossless_step_is_momentum_sgd(lossless, nesterov):
    tx = optax.chain(
        js.momentum_correction(LOSSLESS[lossless](), 0.9, nesterov), optax.sgd(RATE)
    )
    expected = optax.sgd(RATE, momentum=0.9, nesterov=nesterov)
    path, _ = train(tx, targets(), towards)
    assert_close(path, train_plainly(expected, targets(), towards))


def test_without_momentum_momentum_correction_is_error_feedback():
    reducer = sparse(js.top_k(K / N))
    one, _ = means_and_state(js.momentum_correction(reducer, 0.0), vectors())
    other, _ = means_and_state(js.error_feedback(reducer), vectors())
    np.testing.assert_array_equal(one, other)


def test_stateless_forgets_what_was_left():
    means, state = means_and_state(js.stateless(sparse(js.top_k(K / N))), vectors())
    expected = [simulation.top_k(g, K).mean(0) for g in vectors()]
    np.testing.assert_allclose(means, expected, atol=2e-6)
    assert all(x[0].size == 1 for x in jax.tree.leaves(state))  # only the metrics


@pytest.mark.report("AiDotNet#911")
@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [(js.codec.float32, 0.0), (js.codec.int8, 2e-5)],
)
def test_twenty_steps_deliver_what_was_given_less_what_is_held(codec, tolerance):
    data = targets(seed=1, steps=20)
    tx = optax.chain(js.error_feedback(sparse(js.top_k(0.2), codec())), optax.sgd(RATE))
    path, state = train(tx, data)
    for start, end, held, x in zip(
        *map(jax.tree.leaves, (params(), path, state[0].residual.value, data)),
        strict=True,
    ):
        owed = x.sum(0).mean(0) - held.mean(0)
        np.testing.assert_allclose(end[-1], start - RATE * owed, atol=tolerance)
        assert np.abs(held).max() > 0


def test_small_updates_add_up_beside_large_ones_in_bfloat16():
    small = 2.0**-10  # 1 + 2**-10 is 1 in bfloat16
    tx = js.error_feedback(sparse(js.top_k(0.5)))

    def step(state, g):
        mean, state = tx.update(g, state)
        return state, mean

    @jax.jit
    @functools.partial(jax.vmap, axis_name=AXIS)
    def run(g):
        start = jnp.array([4.0, 1.0], jnp.bfloat16)
        _, state = tx.update(start, tx.init(g))
        return jax.lax.scan(step, state, jnp.broadcast_to(g, (8, 2)))

    state, means = run(jnp.tile(jnp.array([64.0, small], jnp.bfloat16), (2, 1)))
    assert means.dtype == jnp.bfloat16
    assert state.residual.value.dtype == jnp.float32
    np.testing.assert_array_equal(state.residual.value[0], [0, 1 + 8 * small])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("memory", [js.error_feedback, js.momentum_correction])
def test_memories_of_half_precision_parameters_are_float32_trees_like_them(
    memory, dtype
):
    half = jax.tree.map(lambda p: p.astype(dtype), params())
    state = memory(sparse(js.top_k(0.5))).init(half)
    for held in (x.value for x in state if isinstance(x, js.WorkerLocal)):
        assert jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, half)
        assert {x.dtype for x in jax.tree.leaves(held)} == {jnp.dtype("float32")}


STATES = {
    "global": lambda: js.error_feedback(sparse(js.top_k(0.5))),
    "leaf": lambda: js.error_feedback(sparse(js.top_k(0.5), scope="leaf")),
    "random leaf": lambda: js.error_feedback(sparse(js.random_k(0.5), scope="leaf")),
    "momentum": lambda: js.momentum_correction(sparse(js.top_k(0.5))),
    "dgc": lambda: js.dgc(0.1, axis_name=AXIS, clip_norm=1.0, warmup_steps=4),
    "power_sgd": lambda: js.power_sgd(1, axis_name=AXIS, start_step=2),
    "signs": lambda: js.ef_sign_sgd(axis_name=AXIS),
    "skip": lambda: js.skip_nonfinite(
        optax.chain(js.error_feedback(sparse(js.top_k(0.5))), optax.sgd(0.1)),
        axis_name=AXIS,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_map_params_finds_the_memories_and_nothing_else(name):
    tx = STATES[name]()
    state = tx.init({"w": jnp.zeros((5, 7)), "b": jnp.zeros(3)})
    mapped = optax.tree.map_params(tx, lambda x: x + 1, state)
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)
    ]
    changed = [
        path
        for path, x, y in zip(
            paths, *map(jax.tree.leaves, (state, mapped)), strict=True
        )
        if (x != y).any()
    ]
    held = r"(residual|momentum|velocity)\.value\['[wb]'\]$"
    assert changed == [path for path in paths if re.search(held, path)]
    assert len(changed) in (2, 4)


def test_optax_tree_get_finds_the_memories():
    tx = optax.chain(js.error_feedback(sparse(js.top_k(0.5))), optax.adam(0.1))
    residual = optax.tree.get(tx.init(params()), "residual")
    assert jax.tree.structure(residual.value) == jax.tree.structure(params())
    state = js.momentum_correction(js.dense(axis_name=AXIS)).init(params())
    for name in ("velocity", "momentum"):
        assert isinstance(optax.tree.get(state, name), js.WorkerLocal)


def test_clipping_before_acts_on_every_worker():
    clip = optax.clip_by_global_norm(2.0)
    tx = optax.chain(clip, js.error_feedback(sparse(js.top_k(1.0))), optax.sgd(RATE))
    path, _ = train(tx, targets(), towards)
    before = lambda g: clip.update(g, clip.init(g))[0]  # noqa: E731
    assert_close(path, train_plainly(optax.sgd(RATE), targets(), towards, before))


AFTER = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "weight decay": lambda: optax.chain(
        optax.add_decayed_weights(0.25), optax.sgd(RATE, momentum=0.9)
    ),
    "global clipping": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(RATE)
    ),
    "schedule": lambda: optax.sgd(optax.linear_schedule(1.0, 0.1, 4)),
}


@pytest.mark.parametrize("after", AFTER)
def test_what_comes_after_sees_the_mean(after):
    tx = optax.chain(js.error_feedback(sparse(js.top_k(1.0))), AFTER[after]())
    path, _ = train(tx, targets(), towards)
    assert_close(path, train_plainly(AFTER[after](), targets(), towards), 1e-5)


def test_adamw_after_a_lossy_step_keeps_the_workers_together_and_learns():
    tx = optax.chain(
        optax.clip_by_global_norm(8.0),
        js.error_feedback(sparse(js.top_k(0.2), js.codec.bfloat16())),
        optax.adamw(0.2, weight_decay=1e-4),
    )
    data = jax.tree.map(lambda x: jnp.tile(x[:1], (80, *[1] * (x.ndim - 1))), targets())
    path, _ = train(tx, data, towards)
    for start, end, x in zip(
        *map(jax.tree.leaves, (params(), path, data)), strict=True
    ):
        optimum = x[0].mean(0)
        assert np.linalg.norm(end[-1] - optimum) < 0.5 * np.linalg.norm(start - optimum)


def test_inject_hyperparams_with_static_density_and_scheduled_momentum():
    def make(density, momentum, learning_rate):
        return optax.chain(
            js.momentum_correction(sparse(js.top_k(density)), momentum),
            optax.sgd(learning_rate),
        )

    schedule = lambda step: 0.5 + 0.1 * step  # noqa: E731
    tx = optax.inject_hyperparams(make, static_args="density")(
        density=1.0, momentum=schedule, learning_rate=RATE
    )
    path, state = train(tx, targets())
    for start, end, x in zip(
        *map(jax.tree.leaves, (params(), path, targets())), strict=True
    ):
        u, expected = 0, np.asarray(start)
        for step, mean in enumerate(np.asarray(x).mean(1)):
            u = schedule(step) * u + mean
            expected = expected - RATE * u
            np.testing.assert_allclose(end[step], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.hyperparams["momentum"], schedule(STEPS - 1))


def test_multi_steps_sends_the_average_of_its_micro_batches():
    tx = optax.MultiSteps(
        optax.chain(js.error_feedback(sparse(js.top_k(1.0))), optax.sgd(RATE)), 2
    )
    path, _ = train(tx, targets())
    pairs = jax.tree.map(lambda x: (x[0::2] + x[1::2]) / 2, targets())
    expected = train_plainly(optax.sgd(RATE), pairs)
    assert_close(jax.tree.map(lambda p: p[1::2], path), expected)
    # In between nothing moves.
    assert_close(
        jax.tree.map(lambda p: p[2::2], path), jax.tree.map(lambda p: p[:-1], expected)
    )


def test_multi_steps_around_a_lossy_memory_conserves():
    tx = optax.MultiSteps(
        optax.chain(js.error_feedback(sparse(js.top_k(0.2))), optax.sgd(RATE)), 2
    )
    path, state = train(tx, targets())
    held = state.inner_opt_state[0].residual.value
    for start, end, r, x in zip(
        *map(jax.tree.leaves, (params(), path, held, targets())), strict=True
    ):
        owed = (x.sum(0) / 2).mean(0) - r.mean(0)
        np.testing.assert_allclose(end[-1], start - RATE * owed, atol=1e-6)


def test_partition_compresses_some_leaves_and_averages_the_others():
    make = lambda reducer: optax.chain(  # noqa: E731
        js.error_feedback(reducer), optax.sgd(RATE)
    )
    labels = js.label_leaves(min_ndim=2)
    tx = optax.partition(
        {"sparse": make(sparse(js.top_k(1 / 3))), "dense": make(LOSSLESS["dense"]())},
        labels,
    )
    path, _ = train(tx, targets())
    exact = train_plainly(optax.sgd(RATE), targets())
    a = targets()["a"].reshape(STEPS, WORKERS, 6)
    means, _ = simulation.error_feedback(np.asarray(a, np.float64), 2)
    moved = -RATE * means.cumsum(0).reshape(STEPS, 2, 3)
    assert_close(path, {**exact, "a": params()["a"] + moved})
    assert np.abs(path["a"] - exact["a"]).max() > 0.1


@pytest.mark.report(
    "grace#21", "mxnet#13372", "tensorflow#40468", "PySyft#5587", "pytorch#47202"
)
def test_a_flax_train_state_trains():
    tx = optax.chain(
        js.momentum_correction(sparse(js.top_k(1.0)), 0.9), optax.sgd(RATE)
    )
    state = TrainState.create(apply_fn=None, params=params(), tx=tx)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 1), out_axes=None, axis_name=AXIS)
    def run(state, data):
        def step(state, x):
            return state.apply_gradients(grads=towards(state.params, x)), state.params

        state, _ = jax.lax.scan(step, state, data)
        return state.step, state.params

    count, end = run(state, targets())
    expected = train_plainly(optax.sgd(RATE, momentum=0.9), targets(), towards)
    assert count == STEPS
    assert_close(end, jax.tree.map(lambda p: p[-1], expected))


MEMORIES = {
    "error_feedback": lambda: js.error_feedback(sparse(js.top_k(0.5))),
    "momentum_correction": lambda: js.momentum_correction(sparse(js.top_k(0.5))),
}
every_memory = pytest.mark.parametrize("name", MEMORIES)


def update(tx, init_params, updates):
    """One step on two workers that hold the same."""
    step = lambda _: tx.update(updates, tx.init(init_params))[0]  # noqa: E731
    return jax.vmap(step, axis_name=AXIS)(jnp.arange(2))


@pytest.mark.report("pytorch#48670", "pytorch#49418")
@pytest.mark.parametrize(
    ("updates", "match"),
    [
        ({"a": jnp.ones(3)}, "leaf `b` has shape missing, at init it was"),
        ({"a": jnp.ones(4), "b": jnp.ones(2)}, r"leaf `a` has shape \(4,\)"),
        ({"a": jnp.ones((3, 1)), "b": jnp.ones(2)}, r"leaf `a` has shape \(3, 1\)"),
        ({"a": jnp.ones(3), "b": jnp.ones(2), "c": jnp.ones(1)}, "leaf `c` has shape"),
    ],
)
@every_memory
def test_a_tree_that_changed_since_init_is_refused(name, updates, match):
    known = {"a": jnp.ones(3), "b": jnp.ones(2)}
    message = rf"of `{name}`: {match}.*Call `init` with"
    with pytest.raises(ValueError, match=message):
        update(MEMORIES[name](), known, updates)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, bool])
@every_memory
def test_integer_and_complex_leaves_are_refused_at_init_and_update(name, dtype):
    good, bad = {"w": jnp.ones(3)}, {"w": jnp.ones(3, dtype)}
    message = f"leaf `w` is {jnp.dtype(dtype)}.*`optax.partition`"
    with pytest.raises(TypeError, match=message):
        MEMORIES[name]().init(bad)
    with pytest.raises(TypeError, match=message):
        update(MEMORIES[name](), good, bad)


@pytest.mark.parametrize(
    "wrong", [js.top_k(0.1), optax.sgd(0.1), None, js.all_gather(), "dense"]
)
@pytest.mark.parametrize(
    "memory", [js.stateless, js.error_feedback, js.momentum_correction]
)
def test_what_is_no_reducer_is_refused(memory, wrong):
    message = rf"`{memory.__name__}\(...\)` takes a Reducer.*got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=message):
        memory(wrong)


@pytest.mark.report("horovod#2108", "horovod#2192")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("memory", [js.error_feedback, js.momentum_correction])
def test_what_rounding_to_half_precision_takes_is_kept(dtype, memory):
    """The mean of 1, 1.0078125 and 1 is no bfloat16, nor 2e-8 a float16."""
    options = {} if memory is js.error_feedback else {"momentum": 0.0}
    codec = js.codec.float32()
    reducer = js.sparse(js.top_k(1.0), js.all_gather(), axis_name=AXIS, codec=codec)
    tx = memory(reducer, **options)
    g = jnp.array([[1.0, 6e-8], [1.0078125, 0.0], [1.0, 0.0]], dtype)
    steps = 50

    def run(g):
        def body(carry, _):
            state, given = carry
            mean, state = tx.update(g, state)
            return (state, given + mean.astype(jnp.float32)), None

        start = (tx.init(g), jnp.zeros(2))
        (state, delivered), _ = jax.lax.scan(body, start, None, length=steps)
        kept = state.residual if memory is js.error_feedback else state.velocity
        return delivered, kept.value

    delivered, kept = jax.jit(jax.vmap(run, axis_name=AXIS))(g)
    given = steps * np.asarray(g, np.float64).sum(0)
    held = np.asarray(kept, np.float64).sum(0)
    np.testing.assert_allclose(3 * delivered[0] + held, given, rtol=1e-5, atol=1e-9)


def test_a_memory_stays_finite_at_the_edge_of_the_range():
    """2.5e38 twice is beyond float32: what is held back is clamped, not infinite."""
    tx = js.error_feedback(js.sparse(js.top_k(0.5), js.all_gather(), axis_name=AXIS))
    g = jnp.array([[2.5e38, 2e38]] * 2)

    def run(g):
        state = tx.init(g)
        for given in (g, g, 0 * g, 0 * g, 0 * g):
            mean, state = tx.update(given, state)
        return mean, state.residual.value

    mean, residual = jax.jit(jax.vmap(run, axis_name=AXIS))(g)
    assert np.isfinite(mean).all() and np.isfinite(residual).all()


def test_decay_may_be_a_float64_array():
    """As ``optax.inject_hyperparams`` passes it where parameters are float64."""
    with jax.enable_x64(True):
        tx = js.error_feedback(js.dense(axis_name=AXIS), jnp.float64(0.5))
        g = jnp.ones((2, 3), jnp.float64)
        step = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name=AXIS)
        mean, state = jax.eval_shape(step, g)
    assert mean.dtype == jnp.float64 and state.residual.value.dtype == jnp.float32
