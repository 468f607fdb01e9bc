import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulation
from contract_table import AXIS, on_workers, sparse

import jaxsparse as js

WORKERS = 4
SHAPES = {"a": (3, 5), "b": (), "c": (0,), "d": (40,)}


def updates(workers=WORKERS):
    """Very different scales, so that one budget over all would go to one leaf."""
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=(workers, *shape)).astype(np.float32) * 100**i
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def reduce(reducer, x):
    """Mean and what was left, after one step."""
    run = lambda x: reducer.reduce(x, reducer.init(x))[:2]  # noqa: E731
    return on_workers(run, (None, 0))(x)


def flat(x):
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in x.values()], axis=1)


def test_one_budget_over_the_whole_model():
    mean, left = reduce(sparse(js.top_k(0.25)), updates())
    x = flat(updates())
    sent = simulation.top_k(x, 14)  # a quarter of 56
    got = np.concatenate([np.ravel(leaf) for leaf in mean.values()])
    np.testing.assert_allclose(got, sent.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(flat(left), x - sent)
    assert (mean["a"] == 0).all()  # the scales see to that


def test_a_budget_for_every_leaf():
    mean, left = reduce(sparse(js.top_k(0.25), scope="leaf"), updates())
    for name, k in {"a": 4, "b": 1, "c": 0, "d": 10}.items():
        x = updates()[name].reshape(WORKERS, -1)
        sent = simulation.top_k(x, k) if k else x
        np.testing.assert_allclose(np.ravel(mean[name]), sent.mean(0), rtol=1e-6)
        np.testing.assert_array_equal(left[name].reshape(WORKERS, -1), x - sent)


def test_places_left_empty_in_one_leaf_do_not_spill_into_the_next():
    # Of the first leaf nothing qualifies; its padding must not become an index.
    x = {"a": jnp.zeros((WORKERS, 8)), "b": jnp.full((WORKERS, 8), 2.0)}
    selection = js.threshold(1.0, max_density=0.5)
    mean, left = reduce(sparse(selection, scope="leaf"), x)
    np.testing.assert_array_equal(mean["a"], np.zeros(8))
    np.testing.assert_array_equal(mean["b"], [2] * 4 + [0] * 4)
    np.testing.assert_array_equal(left["b"][0], [0] * 4 + [2] * 4)


def test_overflow_is_the_sum_over_the_leaves():
    reducer = sparse(js.threshold(1.0, max_density=0.5), scope="leaf")
    x = {"a": jnp.full((WORKERS, 8), 2.0), "b": jnp.full((WORKERS, 6), 2.0)}

    def run(x):
        metrics = reducer.reduce(x, reducer.init(x))[2].metrics
        return metrics.overflow, metrics.selected

    overflow, selected = on_workers(run, None)(x)
    assert overflow == 4 + 3 and selected == 4 + 3


def test_random_selections_by_leaf_go_on_from_step_to_step():
    reducer = sparse(js.random_k(0.25), scope="leaf")
    ones = jax.tree.map(jnp.ones_like, updates())

    def run(x):
        def step(state, _):
            mean, _, state = reducer.reduce(x, state)
            return state, mean

        return jax.lax.scan(step, reducer.init(x), length=40)[1]

    means = on_workers(run, None)(ones)
    for name, k in {"a": 4, "b": 1, "d": 10}.items():
        drawn = np.reshape(means[name], (40, -1))
        np.testing.assert_array_equal(drawn.sum(1), k)
        assert (drawn.sum(0) > 0).all()  # everything has its turn


def test_a_priority_by_leaf_keeps_a_state_for_each():
    counting = js.Priority(
        init=lambda n: (jnp.zeros(n), jnp.zeros((), jnp.int32)),
        score=lambda state, x: jnp.abs(x) + state[0],
        observe=lambda state, mean, sent: (
            state[0] + (mean != 0),
            state[1] + mean.shape[0],
        ),
    )
    reducer = sparse(js.top_k(0.25, counting), scope="leaf")
    x = {"a": jnp.ones((WORKERS, 8)), "b": jnp.ones((WORKERS, 2, 2))}

    def run(x):
        state = reducer.init(x)
        for _ in range(2):
            _, _, state = reducer.reduce(x, state)
        return state.selection

    touched, sizes = on_workers(run, None)(x)
    # Ties go to the lower index: twice the first two of eight, the first of four.
    np.testing.assert_array_equal(touched, [2, 2, *[0] * 6, 2, 0, 0, 0])
    np.testing.assert_array_equal(sizes, [16, 8])


def test_the_codecs_loss_is_left():
    x = {"a": np.full((WORKERS, 3), 1 + 2.0**-10, np.float32)}
    mean, left = reduce(sparse(js.top_k(1.0), js.codec.bfloat16()), x)
    np.testing.assert_array_equal(mean["a"], 1)
    np.testing.assert_array_equal(left["a"], 2.0**-10)


def test_bfloat16_is_the_codec_by_default():
    x = {"a": np.full((WORKERS, 3), 1 + 2.0**-10, np.float32)}
    reducer = js.sparse(js.top_k(1.0), js.all_gather(), axis_name=AXIS)
    np.testing.assert_array_equal(reduce(reducer, x)[0]["a"], 1)


@functools.cache
def large():
    """Mean over two workers of more than 2**24 entries, and how many were left."""
    n = 2**24 + 3
    reducer = sparse(js.top_k(3 / n))

    @jax.jit
    @functools.partial(jax.vmap, out_axes=(None, 0), axis_name=AXIS)
    def run(worker):
        x = jnp.zeros(n).at[2**24 + 1].set(3.0 + worker).at[1].set(-1.0)
        mean, left, _ = reducer.reduce(x, reducer.init(x))
        at = jnp.flatnonzero(mean, size=8, fill_value=-1)
        return (at, mean[at[:2]]), jnp.sum(left != 0)

    return run(jnp.array([0.0, 1.0]))


@pytest.mark.report("gTop-k indices in float32")
def test_indices_above_2_to_the_24_are_exact():
    # 2**24 + 1 is no float32, and would be rounded to its neighbour.
    (at, mean), left = large()
    assert np.float32(2**24 + 1) == 2**24
    assert at.tolist() == [1, 2**24 + 1, *[-1] * 6]
    np.testing.assert_array_equal(mean, [-1.0, 3.5])
    assert left.tolist() == [0, 0]


@pytest.mark.report("gTop-k indices in float32")
@pytest.mark.parametrize("scope", ["global", "leaf"])
@pytest.mark.parametrize("memory", [js.stateless, js.error_feedback])
def test_models_beyond_int32_are_refused_at_init_without_allocating(memory, scope):
    init = memory(sparse(js.top_k(0.001), scope=scope)).init
    halves = lambda n: [  # noqa: E731
        jax.ShapeDtypeStruct((2**30,), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.bfloat16),
    ]
    jax.eval_shape(init, halves(2**30 - 2))
    with pytest.raises(ValueError, match=r"2147483647: indices are int32.*partition"):
        jax.eval_shape(init, halves(2**30 - 1))


def make(**kwargs):
    arguments = {"selection": js.top_k(0.1), "exchange": js.all_gather()}
    return js.sparse(**(arguments | {"axis_name": AXIS} | kwargs))


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("selection", 0.1, r"js\.top_k\(0\.01\)"),
        ("selection", js.top_k, r"js\.top_k\(0\.01\)"),
        ("selection", js.all_gather(), r"js\.top_k\(0\.01\)"),
        ("exchange", js.all_gather, r"js\.all_gather\(\)"),
        ("exchange", js.top_k(0.1), r"js\.all_gather\(\)"),
        ("exchange", "all_gather", r"js\.all_gather\(\)"),
        ("codec", "bfloat16", r"js\.codec\.bfloat16\(\)"),
        ("codec", js.codec.int8, r"js\.codec\.bfloat16\(\)"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused_with_an_example(argument, value, remedy):
    with pytest.raises(TypeError, match=rf"`sparse\({argument}=...\)`.*{remedy}.*got"):
        make(**{argument: value})


@pytest.mark.parametrize("scope", ["layer", None, "Leaf"])
def test_an_unknown_scope_is_refused(scope):
    with pytest.raises(ValueError, match=r"scope=.*'global' or 'leaf', got"):
        make(scope=scope)


@pytest.mark.parametrize("num_workers", [0, -2, "4", 4.0, True])
def test_a_number_of_workers_that_is_none_is_refused(num_workers):
    with pytest.raises(ValueError, match=r"num_workers=.*whole number of at least 1"):
        make(num_workers=num_workers)


def test_another_number_of_workers_than_promised_is_refused():
    reduce(make(num_workers=WORKERS), updates())
    with pytest.raises(
        ValueError, match=r"num_workers=.*is 8, but axis 'workers' has 4"
    ):
        reduce(make(num_workers=8), updates())


def test_a_state_made_for_another_tree_is_refused():
    reducer = make(selection=js.random_k(0.5), scope="leaf")
    state = reducer.init({"a": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"state of `sparse`.*uint32\[1\].*uint32\[2\]"
    ):
        jax.vmap(lambda x: reducer.reduce(x, state), axis_name=AXIS)(
            {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}
        )


REDUCERS = {
    "sparse": make,
    "dense": lambda: js.dense(axis_name=AXIS),
    "low_rank": lambda: js.low_rank(1, axis_name=AXIS),
    "sign_mean": lambda: js.sign_mean(axis_name=AXIS),
}
every_reducer = pytest.mark.parametrize("name", REDUCERS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, bool])
@every_reducer
def test_integer_and_complex_leaves_are_refused_at_init_and_reduce(name, dtype):
    reducer, bad = REDUCERS[name](), {"w": jnp.ones((2, 8, 8), dtype)}
    match = f"leaf `w` is {jnp.dtype(dtype)}.*`optax.partition`"
    with pytest.raises(TypeError, match=match):
        reducer.init(bad)
    state = reducer.init({"w": jnp.ones((8, 8))})
    with pytest.raises(TypeError, match=match):
        jax.vmap(lambda x: reducer.reduce(x, state), axis_name=AXIS)(bad)


MEMORIES = {
    "stateless": js.stateless,
    "error_feedback": js.error_feedback,
    "momentum_correction": js.momentum_correction,
}


@pytest.mark.parametrize("memory", MEMORIES)
@every_reducer
def test_gradients_that_shard_map_has_summed_are_refused_with_the_remedy(name, memory):
    tx = MEMORIES[memory](REDUCERS[name]())
    params, x = {"w": jnp.ones((8, 8))}, jnp.ones((WORKERS, 8))
    mesh = jax.sharding.Mesh(jax.devices()[:WORKERS], (AXIS,))
    spec = jax.sharding.PartitionSpec
    # Memories come in with a worker axis, so that what they are added to varies.
    state = tx.init(params)
    local = jax.tree.map(lambda _: memory != "stateless", state)
    shared, own = js.split(state, local)

    def run(params, x, varying):
        def step(params, x, shared, own):
            if varying:
                params = js.vary(params, axis_name=AXIS)
            grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
            own = jax.tree.map(lambda x: x[0], own)
            return tx.update(grads, js.merge(shared, own), params)[0]

        in_specs = (spec(), spec(AXIS), spec(), spec(AXIS))
        mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=spec(AXIS))
        return jax.eval_shape(mapped, params, x, shared, js.stack_workers(own, WORKERS))

    run(params, x, varying=True)
    with pytest.raises(
        ValueError, match=r"already summed.*js\.vary\(params.*check_vma"
    ):
        run(params, x, varying=False)
