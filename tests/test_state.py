import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, sparse, stacked
from flax.training.train_state import TrainState

import jaxsparse as js

WORKERS = 4


def params():
    return {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


def batch():
    return jnp.arange(4.0).reshape(2, 2)


def gradient(params, batch):
    loss = lambda p: jnp.mean((batch @ p["w"] + p["b"] - 1) ** 2)  # noqa: E731
    return jax.grad(loss)(params)


def compressor():
    return js.error_feedback(sparse(js.top_k(0.5)))


def step_of(tx):
    """``(params, opt_state), batch -> (params, opt_state)``."""

    def step(state, batch):
        current, opt_state = state
        updates, opt_state = tx.update(gradient(current, batch), opt_state, current)
        return optax.apply_updates(current, updates), opt_state

    return step


def local_of(step, state, **kwargs):
    return js.local_leaves(
        step, state, batch(), axis_name=AXIS, num_workers=WORKERS, **kwargs
    )


def names(mask):
    """The last named fields of the paths of the local leaves."""
    paths = jax.tree_util.tree_leaves_with_path(mask)
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, x in paths if x}


SETUPS = {
    "sgd": (lambda: optax.chain(compressor(), optax.sgd(0.1)), "residual sent_norm"),
    "adam after": (
        lambda: optax.chain(compressor(), optax.adam(0.1)),
        "residual sent_norm",
    ),
    "adam before": (
        lambda: optax.chain(optax.scale_by_adam(), compressor(), optax.scale(-0.1)),
        "residual mu nu sent_norm",
    ),
    "momentum correction": (
        lambda: optax.chain(
            js.momentum_correction(sparse(js.top_k(0.5))), optax.sgd(0.1)
        ),
        "velocity momentum sent_norm",
    ),
    "dense with momentum": (
        lambda: optax.chain(
            js.momentum_correction(js.dense(axis_name=AXIS)), optax.sgd(0.1)
        ),
        "momentum velocity",
    ),
    "multi steps": (
        lambda: optax.MultiSteps(optax.chain(compressor(), optax.adam(0.1)), 2),
        "residual acc_grads sent_norm",
    ),
    "power sgd": (
        lambda: optax.chain(
            js.error_feedback(js.low_rank(1, axis_name=AXIS)), optax.adam(0.1)
        ),
        "residual",
    ),
    "random, skipping, injected": (
        lambda: js.skip_nonfinite(
            optax.chain(
                js.error_feedback(sparse(js.random_k(0.5))),
                optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
            ),
            axis_name=AXIS,
        ),
        "residual sent_norm",
    ),
    "phases": (
        lambda: optax.chain(
            js.dgc(0.1, axis_name=AXIS, clip_norm=1.0, warmup_steps=4), optax.sgd(0.1)
        ),
        "velocity momentum sent_norm",
    ),
    "partition": (
        lambda: optax.partition(
            {
                "sparse": optax.chain(compressor(), optax.adam(0.1)),
                "dense": optax.chain(
                    js.stateless(js.dense(axis_name=AXIS)), optax.adam(0.1)
                ),
            },
            js.label_leaves(min_ndim=2),
        ),
        "residual sent_norm",
    ),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_local_are_exactly_the_leaves_that_differ_between_workers(setup):
    make, fields = SETUPS[setup]
    tx = make()
    step, state = step_of(tx), (params(), tx.init(params()))
    local = local_of(step, state)

    found = names(local)
    for field in fields.split():
        assert any(field in name.split("/") for name in found), field
    allowed = set(fields.split())
    assert all(allowed & set(name.split("/")) for name in found)

    # The shared part is proven to stay so, step after step; the other does differ.
    @jax.jit
    @functools.partial(
        jax.vmap, in_axes=(None, 0, 0), out_axes=(None, 0), axis_name=AXIS
    )
    def run(shared, own, batch):
        return js.split(step(js.merge(shared, own), batch), local)

    shared, own = js.split(state, local)
    own = js.stack_workers(own, WORKERS)
    scales = jnp.array([1.0, -2.0, 3.0, -4.0])
    for _ in range(3):
        shared, own = run(shared, own, scales[:, None, None] * batch())
    for path, x in jax.tree_util.tree_leaves_with_path(own):
        # What dense averaging leaves is nothing, on all workers alike.
        nothing = "dense" in setup and "velocity" in jax.tree_util.keystr(path)
        assert nothing or x[0].size <= 3 or (x[0] != x[1]).any()


def test_what_is_marked_is_local_whatever_it_holds():
    tx = optax.chain(js.error_feedback(js.dense(axis_name=AXIS)), optax.sgd(0.1))
    state = (params(), tx.init(params()))
    found = names(local_of(step_of(tx), state))
    assert found == {f"1/0/residual/value/{leaf}" for leaf in params()}


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.masked(compressor(), {"w": True, "b": False}),
        optax.partition(
            {"sparse": compressor(), "dense": optax.sgd(0.1)},
            js.label_leaves(min_ndim=2),
        ),
        optax.chain(
            js.stateless(js.dense(axis_name=AXIS)),
            optax.stateless(lambda u, p: {**u, "b": u["b"] + jax.lax.axis_index(AXIS)}),
        ),
    ],
    ids=["forgotten", "masked", "partition", "axis index"],
)
def test_parameters_that_would_differ_are_an_error_that_names_the_leaf(tx):
    match = "parameters would differ.*leaf `b`.*axis 'workers'.*js.dense"
    with pytest.raises(ValueError, match=match):
        local_of(step_of(tx), (params(), tx.init(params())))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(3)(x))
        return nn.Dense(1)(x)


class TrainStateWithStatistics(TrainState):
    batch_stats: dict


def test_batch_statistics_of_a_flax_model_are_local_and_its_parameters_shared():
    net = Net()
    variables = net.init(jax.random.key(0), batch())
    state = TrainStateWithStatistics.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.chain(compressor(), optax.adam(0.1)),
    )

    def step(state, batch):
        def loss(params):
            out, updated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch,
                mutable=["batch_stats"],
            )
            return jnp.mean(out**2), updated["batch_stats"]

        grads, statistics = jax.grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=statistics)
        return state, {"loss": 0.0}  # an auxiliary output

    local = local_of(step, state)
    assert set(jax.tree.leaves(local.batch_stats)) == {True}
    assert set(jax.tree.leaves(local.params)) == {False}
    assert local.step is False
    assert set(jax.tree.leaves(local.opt_state[0].residual)) == {True}
    assert set(jax.tree.leaves(local.opt_state[1])) == {False}
    back = js.merge(*js.split(state, local))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_a_leaf_that_is_local_through_others_is_found():
    # d gets c of the step before, c gets b, b gets a, a the batch.
    def step(state, batch):
        a, b, c = (state[k] for k in "abc")
        return {**state, "a": batch, "b": a, "c": b, "d": c, "e": state["e"] + 1}

    state = {k: jnp.zeros((2, 2)) for k in "abcde"} | {"params": jnp.zeros(1)}
    local = local_of(step, state)
    expected = {k: k in "abcd" for k in "abcde"} | {"params": False}
    assert local == expected


def test_random_keys_are_local_only_where_they_depend_on_the_worker():
    def step(state, batch):
        index = jax.lax.axis_index(AXIS)
        return state | {
            "own": jax.random.fold_in(state["own"], index),
            "all": jax.random.split(state["all"])[0],
        }

    state = {"own": jax.random.key(0), "all": jax.random.key(1), "params": jnp.zeros(1)}
    assert local_of(step, state) == {"own": True, "all": False, "params": False}


class State(NamedTuple):
    weights: jax.Array
    seen: jax.Array
    nothing: None = None


def swap(state, batch):
    return State(state.weights + jax.lax.pmean(batch.sum(), AXIS), batch)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda s: s, swap),
        (lambda s: s, lambda s, b: (swap(s, b), "aux", b)),
        (tuple, lambda s, b: tuple(swap(State(*s), b))),
        (list, lambda s, b: list(swap(State(*s), b))),
        (
            lambda s: {"params": s.weights, "seen": s.seen},
            lambda s, b: {
                "params": swap(State(s["params"], s["seen"]), b).weights,
                "seen": b,
            },
        ),
    ],
    ids=["named tuple", "auxiliary output", "tuple", "list", "dict"],
)
def test_every_kind_of_state_is_taken(make, step):
    state = make(State(jnp.zeros(()), jnp.zeros((2, 2))))
    local = local_of(step, state)
    assert jax.tree.structure(local) == jax.tree.structure(state)
    assert jax.tree.leaves(local) == [False, True]
    # Abstract arrays do as well.
    abstract = jax.eval_shape(lambda: state)
    assert jax.tree.leaves(local_of(step, abstract)) == [False, True]


def test_the_parameters_may_be_pointed_out():
    def step(state, batch):
        return {"net": state["net"], "last": batch}

    state = {"net": jnp.zeros(1), "last": jnp.zeros((2, 2))}
    with pytest.raises(ValueError, match="cannot tell which.*Pass `params="):
        local_of(step, state)
    local = local_of(step, state, params=lambda s: s["net"])
    assert local == {"net": False, "last": True}
    with pytest.raises(ValueError, match="parameters would differ.*leaf `last`"):
        local_of(step, state, params=lambda s: {"last": s["last"]})


def test_a_step_that_changes_the_structure_of_its_state_is_refused():
    with pytest.raises(ValueError, match="a step that returns the new state.*returned"):
        local_of(
            lambda s, b: {"params": s["params"], "new": b}, {"params": jnp.ones(1)}
        )


@pytest.mark.parametrize("num_workers", [0, -1, "4", 2.0, None])
def test_a_number_of_workers_that_is_none_is_refused(num_workers):
    for call in (
        lambda: js.local_leaves(
            swap, (), batch(), axis_name=AXIS, num_workers=num_workers
        ),
        lambda: js.stack_workers((), num_workers),
    ):
        with pytest.raises(ValueError, match=r"num_workers=\.\.\.\)` must be a whole"):
            call()


def test_split_and_merge_are_inverse_also_with_none_among_the_leaves():
    state = {"a": (jnp.ones(2), None), "b": [jnp.zeros(1), {"c": jnp.ones(3)}]}
    local = {"a": (True, None), "b": [False, {"c": True}]}
    shared, own = js.split(state, local)
    assert [x.shape for x in jax.tree.leaves(shared)] == [(1,)]
    assert [x.shape for x in jax.tree.leaves(own)] == [(2,), (3,)]
    back = js.merge(shared, own)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_stack_workers_repeats_every_leaf_keys_too():
    key = jax.random.key(3)
    stacked = js.stack_workers({"x": jnp.arange(3.0), "key": key, "none": None}, 4)
    np.testing.assert_array_equal(stacked["x"], np.tile(np.arange(3.0), (4, 1)))
    assert stacked["key"].shape == (4,) and stacked["key"].dtype == key.dtype
    assert (stacked["key"] == key).all()


def test_axes_are_as_coarse_as_can_be():
    own, shared = js.WorkerLocal(jnp.zeros(2)), jnp.zeros(2)
    assert js.state_axes({"a": shared, "b": (shared, None, ())}) is None
    assert js.state_axes({"a": own, "b": (own,)}) == 0
    assert js.state_axes((shared, {"a": own}, [shared])) == (None, 0, None)
    assert js.state_axes({"a": own, "b": {"c": shared, "d": own}}) == {
        "a": 0,
        "b": {"c": None, "d": 0},
    }
    assert js.state_axes(shared) is None


@pytest.mark.parametrize("mapper", ["vmap", "pmap"])
def test_axes_of_a_state_fit_the_mappers(mapper):
    tx = optax.chain(compressor(), optax.adam(0.1))
    state = tx.init(params())
    axes = js.state_axes(state)
    hash(axes)  # pmap over several processes wants it

    def step(state, batch):
        return tx.update(gradient(params(), batch), state, params())

    mapped = {"vmap": jax.vmap, "pmap": jax.pmap}[mapper](
        step, in_axes=(axes, 0), out_axes=(None, axes), axis_name=AXIS
    )
    local, _ = stacked(state, WORKERS)
    batches = jnp.arange(WORKERS * 4.0).reshape(WORKERS, 2, 2)
    updates, after = jax.jit(mapped)(local, batches)
    shapes = functools.partial(jax.tree.map, jnp.shape)
    assert shapes(after) == shapes(local) and shapes(updates) == shapes(params())
    assert int(after[1][0].count) == 1


def test_leaves_that_differ_along_one_of_two_axes():
    """What devices of one place share is no more than a part of the parameters."""
    axes, x = ("hosts", "devices"), jnp.zeros(2)

    def step(state, batch):
        params, of_host, of_place, own = state
        of_host = of_host + jax.lax.pmean(batch, "devices")
        of_place = of_place + jax.lax.pmean(batch, "hosts")
        params += jax.lax.pmean(of_host, "hosts") + jax.lax.pmean(of_place, "devices")
        return params, of_host, of_place, own + batch

    find = functools.partial(js.local_leaves, axis_name=axes, num_workers=(2, 3))
    assert find(step, (x, x, x, x), x) == (False, True, True, True)

    def wrong(state, batch):  # each leaf is averaged over the axis it does not vary on
        params, of_host, of_place, own = step(state, batch)
        return params + jax.lax.pmean(of_place, "hosts"), of_host, of_place, own

    with pytest.raises(ValueError, match="parameters would differ between workers"):
        find(wrong, (x, x, x, x), x)


def test_marks_inside_tell():
    state = js.WorkerLocal({"count": 0, "own": js.WorkerLocal(1)}, reshard="inner")
    found = js.local_leaves(
        lambda s, batch: s,
        (jnp.zeros(2), state),
        jnp.zeros(2),
        axis_name=AXIS,
        num_workers=2,
    )
    assert jax.tree.leaves(found) == [False, False, True]
    assert js.state_axes(state) == 0


def test_axes_and_their_sizes():
    x = jnp.zeros(2)
    find = functools.partial(js.local_leaves, lambda s, batch: s, x, x)
    with pytest.raises(ValueError, match="the size of each of the axes"):
        find(axis_name=("hosts", "devices"), num_workers=4)
    with pytest.raises(ValueError, match=r"local_leaves\(num_workers=...\).*got 0"):
        find(axis_name=("hosts", "devices"), num_workers=(2, 0))


def test_one_copy_of_what_all_workers_have():
    state = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(3), "n": 4}
    state["nan"] = jnp.array([jnp.nan, 1.0])
    found = js.unreplicate(js.stack_workers(state, 4))
    assert jax.random.key_data(found["key"]).tolist() == [0, 3]
    for name in ("w", "n", "nan"):
        np.testing.assert_array_equal(found[name], state[name])


@pytest.mark.report("prime-diloco#13")
def test_one_copy_of_what_differs_is_refused_and_the_way_out_named():
    residual = js.WorkerLocal(jnp.zeros((4, 3)))
    for state, words in (
        ({"w": jnp.ones((4, 2)), "residual": residual}, "`residual` is each worker's"),
        ({"stats": jnp.arange(4.0)}, "`stats` differs between the workers"),
        ({"count": jnp.zeros(())}, "`count` has no worker axis"),
    ):
        with pytest.raises(ValueError, match=words):
            js.unreplicate(state)
    with pytest.raises(ValueError, match=r"js\.split\(state, local\).*js\.reshard"):
        js.unreplicate(residual)
    # As the message says: the local part taken out, the rest is one copy.
    state = {"w": jnp.ones((4, 2)), "residual": residual}
    shared, own = js.split(state, {"w": False, "residual": js.WorkerLocal(True)})
    assert js.unreplicate(shared)["w"].shape == (2,)
    assert own["residual"].value.shape == (4, 3)
