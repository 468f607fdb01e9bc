"""Averaging inside hosts, then between them: two named axes, or one axis by groups."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import SHAPES, dyadic, message, size
from jax.sharding import AxisType, PartitionSpec

import jaxsparse as js

HOSTS, DEVICES, STEPS = 2, 4, 3
N = size(SHAPES.values())
ROWS = math.ceil(N / DEVICES)  # of a device's part
AXES = ("hosts", "devices")


def sparse(exchange, density=0.1, hosts=HOSTS, **options):
    """Of the slow axis: a reducer."""
    return lambda axis: js.sparse(
        js.top_k(density), exchange(), axis_name=axis, num_workers=hosts, **options
    )


def dense(axis):
    return js.dense(axis_name=axis)


def by_names(reducer, devices=DEVICES):
    """Two named axes."""
    inner = js.error_feedback(reducer("hosts"))
    return js.hierarchical(inner, axis_name="devices", num_workers=devices)


def by_groups(reducer):
    """One axis of all workers."""
    inside, between = js.axis_groups(
        "workers", num_workers=HOSTS * DEVICES, group_size=DEVICES
    )
    return js.hierarchical(js.error_feedback(reducer(between)), axis_name=inside)


def gradients(seed, hosts=HOSTS, devices=DEVICES, shapes=SHAPES):
    """Of all workers, [hosts, devices, ...]."""
    return jax.tree.map(
        lambda x: x.reshape(hosts, devices, *x.shape[1:]),
        dyadic(seed, shapes, hosts * devices),
    )


def several(seeds):
    """Gradients of some steps, [hosts, devices, steps, ...]."""
    return jax.tree.map(lambda *x: jnp.stack(x, 2), *map(gradients, seeds))


def zeros():
    return jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda s: isinstance(s, tuple))


def on_hosts(f, in_axes=0, out_axes=None):
    """vmap in vmap; out axes None prove that all workers agree."""
    f = jax.vmap(f, in_axes, out_axes, axis_name="devices")
    return jax.jit(jax.vmap(f, in_axes, out_axes, axis_name="hosts"))


def flat(tree, lead):
    """All entries of a tree whose leaves have some leading axes in common."""
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], -1)


def steps_of(tx):
    """Runs some steps: the means, and the state after them."""

    def run(grads):
        def body(state, g):
            mean, state = tx.update(g, state)
            return state, mean

        state, means = jax.lax.scan(body, tx.init(zeros()), grads)
        return means, state

    return run


SIZES = [(1, 1), (1, 3), (3, 1), (2, 4), (4, 2), (3, 3)]


@pytest.mark.parametrize("hosts, devices", SIZES)
@pytest.mark.parametrize("exchange", [js.all_gather, js.server, js.shared_support])
def test_all_sent_is_the_mean_over_all_workers(exchange, hosts, devices):
    shapes = {"scalar": (), "empty": (0, 3), "prime": (13,), "matrix": (3, 7)}
    x = {**gradients(1, hosts, devices, shapes), "none": None}
    tx = by_names(sparse(exchange, 1.0, hosts, codec=js.codec.float32()), devices)
    mean = on_hosts(lambda g: tx.update(g, tx.init(g))[0])(x)
    assert jax.tree.structure(mean) == jax.tree.structure(x)
    exact = 3 not in (hosts, devices)  # sums of dyadic numbers, halved
    for name in shapes:
        wanted = np.asarray(x[name], np.float64).mean((0, 1))
        tolerance = 0 if exact else 1e-6
        np.testing.assert_allclose(mean[name], wanted, rtol=tolerance, atol=tolerance)


def test_each_part_is_sparse_between_hosts():
    """Top-k with error feedback, of each part apart, over the means of the hosts."""
    x = several(range(STEPS))
    tx = by_names(sparse(js.all_gather, codec=js.codec.float32()))
    run = steps_of(tx)
    means, residual = on_hosts(
        lambda g: (run(g)[0], run(g)[1].inner.value.residual.value), out_axes=(None, 0)
    )(x)
    whole = np.pad(flat(x, 3).mean(1), ((0, 0), (0, 0), (0, -N % DEVICES)))
    parts = whole.reshape(HOSTS, STEPS, DEVICES, ROWS)
    k = math.ceil(0.1 * ROWS)
    found = np.pad(flat(means, 1), ((0, 0), (0, -N % DEVICES)))
    for d, part in enumerate(np.split(found, DEVICES, axis=1)):
        wanted, left = simulation.error_feedback(parts[:, :, d].swapaxes(0, 1), k)
        np.testing.assert_allclose(part, wanted, atol=1e-6)
        np.testing.assert_allclose(residual[:, d], left, atol=1e-6)


@pytest.mark.parametrize("exchange", [js.all_gather, js.shared_support])
def test_delivered_plus_held_is_what_was_given(exchange):
    x = several(range(8))
    run = steps_of(by_names(sparse(exchange)))
    means, state = on_hosts(run, out_axes=(None, 0))(x)
    held = np.asarray(state.inner.value.residual.value, np.float64)
    delivered = flat(means, 1).sum(0) + held.mean(0).reshape(-1)[:N]
    np.testing.assert_allclose(delivered, flat(x, 3).mean((0, 1)).sum(0), atol=1e-4)
    assert np.abs(held).max() > 1  # something was held


def learning(tx, twin):
    """Steps of SGD, with the state in two: the same for all, and each worker's own."""
    chain, twin = (optax.chain(t, optax.sgd(0.5, momentum=0.5)) for t in (tx, twin))

    def step(tx):
        def run(state, grads):
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return run

    state = (zeros(), chain.init(zeros()))
    # JAX has no groups under vmap: the twin with names tells which leaves differ.
    local = js.local_leaves(
        step(twin), state, zeros(), axis_name=AXES, num_workers=(HOSTS, DEVICES)
    )
    shared, own = js.split(state, local)

    def run(shared, own, grads):
        def body(carry, g):
            return js.split(step(chain)(js.merge(*carry), g), local), None

        return jax.lax.scan(body, (shared, own), grads)[0]

    return run, shared, js.stack_workers(own, HOSTS * DEVICES)


def apart(x):
    """[hosts * devices, ...] -> [hosts, devices, ...]."""
    return jax.tree.map(lambda v: v.reshape(HOSTS, DEVICES, *v.shape[1:]), x)


def by_vmap(run):
    mapped = on_hosts(run, (None, 0, 0), (None, 0))

    def call(shared, own, grads):
        shared, own = mapped(shared, apart(own), apart(grads))
        return shared, jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), own)

    return call


def by_pmap(run):
    def call(shared, own, grads):
        mapped = jax.pmap(run, "workers", in_axes=(None, 0, 0), donate_argnums=1)
        shared, own = mapped(shared, own, grads)
        for leaf in map(np.asarray, jax.tree.leaves(shared)):  # agree bit for bit
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
        return jax.tree.map(lambda v: v[0], shared), own

    return call


def by_shard_map(run, sizes, names, check_vma):
    mesh = jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names))
    everyone, mine = PartitionSpec(), PartitionSpec(names)

    def body(shared, own, grads):
        own, grads = jax.tree.map(lambda v: v[0], (own, grads))
        shared, own = run(shared, own, grads)
        return shared, jax.tree.map(lambda v: v[None], own)

    specs = {"in_specs": (everyone, mine, mine), "out_specs": (everyone, mine)}
    mapped = jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)
    return jax.jit(mapped, donate_argnums=1)


MAPPERS = {
    "shard_map": lambda run: by_shard_map(run, (HOSTS, DEVICES), AXES, False),
    "shard_map_checked": lambda run: by_shard_map(run, (HOSTS, DEVICES), AXES, True),
    "pmap_groups": by_pmap,
}
REDUCERS = {
    "dense": dense,
    "all_gather": lambda axis: js.sparse(
        js.top_k(0.1, priority=js.ema()), js.all_gather(), axis_name=axis
    ),
    "server": sparse(functools.partial(js.server, ladder=False), 0.3),
    "shared_support": sparse(js.shared_support),
    "g_top_k": sparse(js.g_top_k),
    "phases": lambda axis: js.phases(
        [
            (1, js.dense(axis_name=axis)),
            (None, js.sparse(js.random_k(0.1), js.all_gather(), axis_name=axis)),
        ]
    ),
    "sign_mean": lambda axis: js.sign_mean(axis_name=axis),
}


def agree(name, mappers):
    named, grouped = by_names(REDUCERS[name]), by_groups(REDUCERS[name])
    grads = jax.tree.map(
        lambda v: v.reshape(-1, *v.shape[2:]), several(range(10, 10 + STEPS))
    )
    run, shared, own = learning(named, named)
    wanted = by_vmap(run)(shared, own, grads)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(wanted[0][0]))
    for mapper, build in mappers.items():
        tx = grouped if "groups" in mapper else named
        run, shared, own = learning(tx, named)
        found = build(run)(shared, own, grads)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=mapper)


@pytest.mark.parametrize("name", REDUCERS)
def test_mappers_agree(name):
    """Also donated, in a scan; with names and by groups."""
    agree(name, MAPPERS)


def test_groups_under_shard_map():
    def build(run):
        return by_shard_map(run, (HOSTS * DEVICES,), ("workers",), check_vma=False)

    agree("dense", {"shard_map_groups": build})


def test_parts_may_take_different_rungs_of_the_ladder():
    """Devices of one place agree on a rung, those of one host need not."""
    rows, k = 40, 10
    x = np.zeros((HOSTS, DEVICES * rows), np.float32)
    for d in range(DEVICES):  # the fewer entries in common, the larger d
        for h in range(HOSTS):
            x[h, d * rows + h * 3 * d + np.arange(k)] = 1 + np.arange(k)
    x = jnp.asarray(np.repeat(x, DEVICES, 0))
    tx = by_groups(sparse(js.server, k / rows, codec=js.codec.float32()))

    def step(g):
        mean, state = tx.update(g, tx.init(g))
        return mean, js.metrics(state)

    mean, measured = jax.pmap(step, "workers")(x)
    np.testing.assert_array_equal(mean, np.broadcast_to(np.mean(x, 0), mean.shape))
    union = [np.count_nonzero(part) for part in np.split(np.sum(x, 0), DEVICES)]
    assert measured.aggregated.tolist() == union * HOSTS
    rungs = measured.rung.reshape(HOSTS, DEVICES)
    np.testing.assert_array_equal(rungs[0], rungs[1])
    assert rungs[0, 0] < rungs[0, -1]


def test_dtypes_and_extremes_stay():
    x = {"half": jnp.bfloat16(3.3e38), "single": jnp.float32(3.4e38)}
    x = {**x, "small": jnp.full(5, 6e4, jnp.float16)}
    stacked = js.stack_workers(js.stack_workers(x, DEVICES), HOSTS)
    tx = by_names(dense)
    mean = on_hosts(lambda g: tx.update(g, tx.init(g))[0])(stacked)
    for name, leaf in x.items():
        assert mean[name].dtype == leaf.dtype
        np.testing.assert_array_equal(mean[name], leaf)


def test_optimizer_inside_is_sharded_and_gets_its_part_of_the_parameters():
    """AdamW inside, on parts, does what it does behind: it knows no other entries."""
    x, params = several(range(STEPS)), dyadic(20)
    average, adam = js.stateless(js.dense(axis_name="hosts")), optax.adamw(0.1)
    inside = js.hierarchical(
        optax.chain(average, adam), axis_name="devices", num_workers=DEVICES
    )
    everywhere = js.stateless(js.dense(axis_name=AXES))

    def run(tx):
        def body(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return lambda g: jax.lax.scan(body, (params, tx.init(params)), g)[0][0]

    found = on_hosts(run(inside), out_axes=0)(x)
    wanted = on_hosts(run(optax.chain(everywhere, adam)), out_axes=0)(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    moments = optax.tree.get(inside.init(params), "mu")
    assert moments.shape == (ROWS,)


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, factor):
        return factor * updates, state

    scaled = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    tx = js.hierarchical(
        optax.chain(js.stateless(js.dense(axis_name="hosts")), scaled),
        axis_name="devices",
        num_workers=DEVICES,
    )
    x = gradients(3)
    run = on_hosts(lambda g: tx.update(g, tx.init(g), factor=2.0)[0])
    np.testing.assert_array_equal(flat(run(x), 0), 2 * flat(x, 2).mean((0, 1)))


def test_bad_step_is_skipped_by_all_workers():
    tx = js.skip_nonfinite(by_names(sparse(js.server)), axis_name=AXES)
    x = gradients(4)
    bad = {**x, "bias": x["bias"].at[1, 2, 3].set(jnp.nan)}
    run = on_hosts(lambda g: (tx.init(g), *tx.update(g, tx.init(g))), out_axes=0)
    before, mean, state = run(bad)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(mean))
    jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    assert np.all(state.skipped == 1)


@pytest.mark.parametrize("name", ["names", "groups"])
def test_bytes_of_the_hosts_link(name):
    """Between hosts a device says one message of its part; of a flat axis, of all."""
    hosts, devices, n = 4, 4, 64000
    params = jax.ShapeDtypeStruct((n,), jnp.float32)
    reducer = sparse(js.all_gather, 0.01, hosts)
    if name == "names":
        axes, slow, fast = [("hosts", hosts), ("devices", devices)], "hosts", "devices"
    else:
        axes = [("workers", hosts * devices)]
        fast, slow = js.axis_groups("workers", num_workers=16, group_size=devices)
    tx = js.hierarchical(
        js.error_feedback(reducer(slow)), axis_name=fast, num_workers=devices
    )
    step = lambda g: tx.update(g, tx.init(g))[0]  # noqa: E731
    jaxpr = jax.make_jaxpr(step, axis_env=axes)(params)

    part = message([(n // 4,)], 0.01, 16)
    between = js.traffic(jaxpr, axis_name=slow)
    assert between == {"": [("all-gather", "uint32", part, 1)]}
    assert js.traffic(jaxpr, axis_name=fast) == {
        "": [("all-gather", "float32", n, 1)]
        + [("reduce-scatter", "float32", 4 * n, 1)]
    }
    assert js.traffic(jaxpr, axis_name="elsewhere") == {"": []}

    # All devices of a host share its link. On a flat axis the host hears every worker
    # of the others' in full, and a ring has one worker say what it hears.
    link = devices * js.link_bytes(between, hosts)
    reducer = js.sparse(js.top_k(0.01), js.all_gather(), axis_name="w")
    step = lambda g: reducer.reduce(g, reducer.init(g))[0]  # noqa: E731
    ring = js.traffic(jax.make_jaxpr(step, axis_env=[("w", 16)])(params))
    heard = (hosts * devices - devices) * message([(n,)], 0.01, 16)
    assert link == devices * (hosts - 1) * part
    assert heard == pytest.approx(devices * link, rel=0.02)  # but for headers
    assert js.link_bytes(ring, 16) >= heard


def test_traffic_over_an_axis_counts_what_goes_over_others_as_well():
    inside, between = js.axis_groups("w", num_workers=8, group_size=4)
    group_sum = {"axis_name": "w", "axis_index_groups": between.members}

    def step(x):
        whole = jax.lax.psum(x, "w")
        one = jax.lax.psum(x[:2], **group_sum)
        swap = jax.lax.ppermute(x[:1], "w", [(i, i ^ 4) for i in range(8)])
        return whole, one, swap

    jaxpr = jax.make_jaxpr(step, axis_env=[("w", 8)])(jnp.ones(4))
    whole, one = ("all-reduce", "float32", 16, 1), ("all-reduce", "float32", 8, 1)
    swap = ("collective-permute", "float32", 4, 1)
    assert js.traffic(jaxpr, axis_name=between)[""] == sorted([whole, one, swap])
    assert js.traffic(jaxpr, axis_name=inside)[""] == [whole]
    assert js.traffic(jaxpr, axis_name="w") == js.traffic(jaxpr)
    with pytest.raises(ValueError, match="no names of axes"):
        js.traffic(jax.jit(jnp.sin).lower(1.0).compile(), axis_name="w")


def test_groups_where_jax_has_none():
    tx = by_groups(sparse(js.all_gather))
    x = dyadic(5, workers=HOSTS * DEVICES)
    step = lambda g: tx.update(g, tx.init(g))[0]  # noqa: E731
    mesh = jax.make_mesh((8,), ("workers",), (AxisType.Auto,))
    specs = {"in_specs": PartitionSpec("workers"), "out_specs": PartitionSpec()}
    checked = lambda g: step(jax.tree.map(lambda v: v[0], g))  # noqa: E731
    for mapped in (
        jax.vmap(step, axis_name="workers"),
        jax.shard_map(checked, mesh=mesh, **specs),
    ):
        with pytest.raises(NotImplementedError, match="use two named axes"):
            jax.eval_shape(mapped, x)
    with pytest.raises(TypeError, match=r"local_leaves\(axis_name=.*names only"):
        inside = js.axis_groups("workers", num_workers=8, group_size=4)[0]
        js.local_leaves(step, x, x, axis_name=inside, num_workers=8)


def test_bad_arguments():
    inner = js.error_feedback(dense("hosts"))
    with pytest.raises(TypeError, match=r"hierarchical\(axis_name=...\).*got 3"):
        js.hierarchical(inner, axis_name=3)
    with pytest.raises(ValueError, match=r"hierarchical\(num_workers=...\).*got 0"):
        js.hierarchical(inner, axis_name="devices", num_workers=0)
    with pytest.raises(TypeError, match="takes a transformation.*got Reducer"):
        js.hierarchical(dense("hosts"), axis_name="devices")
    with pytest.raises(ValueError, match="num_workers=...\\)` is needed"):
        js.hierarchical(inner, axis_name="devices").init(zeros())
    with pytest.raises(ValueError, match="multiple of group_size=3, got 8"):
        js.axis_groups("workers", num_workers=8, group_size=3)
    with pytest.raises(ValueError, match=r"axis_groups\(group_size=...\).*got 0"):
        js.axis_groups("workers", num_workers=8, group_size=0)
    with pytest.raises(TypeError, match="must be a name"):
        js.axis_groups(("a", "b"), num_workers=8, group_size=2)


def test_bad_calls():
    tx, x = by_names(dense), gradients(6)
    on_other = on_hosts(lambda g: tx.update(g, tx.init(zeros()))[0])
    with pytest.raises(ValueError, match="is 4, but axis 'devices' has 3 workers"):
        on_other(gradients(6, 2, 3))
    with pytest.raises(ValueError, match="state of `hierarchical`"):
        on_other({"bias": x["bias"]})
    with pytest.raises(ValueError, match="`params` of `hierarchical` do not match"):
        on_hosts(lambda g: tx.update(g, tx.init(g), g["bias"])[0])(x)
    with pytest.raises(NameError, match="'devices' is not bound"):
        tx.update(zeros(), tx.init(zeros()))
    wrong = by_groups(dense)
    with pytest.raises(ValueError, match="is 8, but axis 'workers' has 4 workers"):
        jax.pmap(
            lambda g: wrong.update(g, wrong.init(g))[0],
            "workers",
            devices=jax.devices()[:4],
        )(dyadic(7, workers=4))


def test_the_buffers_of_the_state_are_distinct():
    state = by_names(sparse(js.server)).init(zeros())
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_all_of_the_state_is_on_the_axis_of_the_workers():
    chain = optax.chain(by_names(sparse(js.server)), optax.sgd(0.1, momentum=0.9))
    axes = js.state_axes(chain.init(zeros()))
    assert axes == (0, None)
