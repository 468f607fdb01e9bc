import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import (
    AXIS,
    SHAPES,
    TRANSFORMATIONS,
    dyadic,
    held_by_servers,
    is_local,
    on_workers,
    size,
    sparse,
    stacked,
)

import jaxsparse as js
from jaxsparse.exchange import ownership

COUNTS = (1, 3, 4, 8)
CHANGES = [(a, b) for a in COUNTS for b in COUNTS] + [(5, 7), (6, 4), (16, 3)]
change = pytest.mark.parametrize(("workers", "n"), CHANGES)


def drawn(workers, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((workers, *shape)).astype(np.float32)


def moved(x, n, **kwargs):
    return js.reshard(js.WorkerLocal(x), n, **kwargs).value


# --- What is averaged ---------------------------------------------------------------


@change
@pytest.mark.parametrize("library", [np, jnp])
def test_a_new_worker_gets_the_mean_over_its_interval(workers, n, library):
    """Cut every old worker into n pieces: the new ones get N pieces each."""
    x = drawn(workers, 5, 3)
    pieces = np.repeat(x.astype(np.float64), n, axis=0).reshape(n, workers, 5, 3)
    found = moved(library.asarray(x), n)
    assert isinstance(found, type(library.asarray(x)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pieces.mean(1), rtol=1e-5, atol=1e-6)
    conserved = x.astype(np.float64).mean(0)
    np.testing.assert_allclose(np.asarray(found).mean(0), conserved, atol=2e-7 * 8)


@pytest.mark.parametrize("workers", COUNTS)
def test_as_many_workers_and_copies_have_the_same_bits(workers):
    x = drawn(workers, 40)
    x[0, :4] = [np.inf, np.nan, -0.0, 1e-42]
    np.testing.assert_array_equal(moved(x, workers).view("i4"), x.view("i4"))
    copies = moved(x, 3 * workers)
    np.testing.assert_array_equal(copies.view("i4"), np.repeat(x, 3, 0).view("i4"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_values_at_the_edge_of_the_range_stay_finite_in_their_dtype(dtype):
    largest = np.array(jnp.finfo(dtype).max, np.float64)
    x = jnp.full((7, 2), largest, dtype)
    for n in (1, 3, 5, 8):
        found = moved(x, n)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), largest, rtol=1e-2)


def test_integers_are_copied_and_keys_are_told_apart():
    words = np.arange(4, dtype=np.uint32) + 10
    np.testing.assert_array_equal(moved(words, 2), [10, 12])
    np.testing.assert_array_equal(moved(words, 8), np.repeat(words, 2))
    np.testing.assert_array_equal(moved(np.array([True, False]), 4), [1, 1, 0, 0])
    keys = jax.random.split(jax.random.key(0), 2)
    found = moved(keys, 5)
    bits = jax.random.key_data(found).tolist()
    assert len({*map(tuple, bits)}) == 5
    old = jax.random.key_data(keys).tolist()
    assert [bits[0], bits[3]] == old  # the first of each keeps its own
    nested = jax.random.split(jax.random.key(1), (2, 3))
    assert moved(nested, 3).shape == (3, 3)


def test_shared_state_passes_through_and_inferred_local_state_is_averaged():
    class Norm:
        """A running mean, as BatchNorm's: local, and marked by nobody."""

        def __call__(self, state, x):
            params, running, opt_state = state
            grads = params - x.mean(0)
            updates, opt_state = tx.update(grads, opt_state, params)
            running = 0.9 * running + 0.1 * x.mean(0)
            return optax.apply_updates(params, updates), running, opt_state

    memory = js.error_feedback(sparse(js.top_k(0.5)))
    tx = optax.chain(optax.MultiSteps(memory, 3), optax.sgd(0.1))
    step, params, batch = Norm(), jnp.zeros(6), jnp.zeros((2, 6))
    state = params, jnp.zeros(6), tx.init(params)
    local = js.local_leaves(step, state, batch, axis_name=AXIS, num_workers=4)
    assert local[1] and local[2][0].acc_grads and not local[2][0].mini_step

    def run(state, count, steps):
        def one(shared, own, batch):
            return js.split(step(js.merge(shared, own), batch), local)

        shared, own = js.split(state, local)
        mapped = on_workers(one, (None, 0), (None, 0, 0))
        for i in range(steps):
            shared, own = mapped(shared, own, drawn(count, 2, 6, seed=i))
        return js.merge(shared, own)

    shared, own = js.split(state, local)
    before = run(js.merge(shared, js.stack_workers(own, 4)), 4, steps=2)
    after = js.reshard(before, 3, local)
    for old, new, own in zip(
        *map(jax.tree.leaves, (before, after, local)), strict=True
    ):
        if own and jnp.issubdtype(old.dtype, jnp.floating):
            np.testing.assert_allclose(new.mean(0), old.mean(0), atol=1e-6)
            assert new.shape == (3, *old.shape[1:])
        elif not own:
            assert new is old
    assert np.ptp(before[1], 0).max() > 0  # there was something to average
    run(after, 3, steps=2)  # and over the end of the accumulation
    # The local part alone, as a checkpoint has it.
    part = js.reshard(js.split(before, local)[1], 3, local=True)
    wanted = js.split(after, local)[1]
    assert jax.tree.structure(part) == jax.tree.structure(wanted)
    for a, b in zip(*map(jax.tree.leaves, (part, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_without_local_parts_is_the_same():
    state = optax.adam(0.1).init(jnp.zeros(3))
    assert js.reshard(state, 5) is state


# --- Shards -------------------------------------------------------------------------


def shards_of(vector, workers):
    """By the formula: row j // N of worker (j + h(row)) mod N, h Knuth's hash."""
    n = len(vector)
    shards = np.zeros((workers, -(-n // workers)), np.float32)
    for j, value in enumerate(vector):
        row = j // workers
        turn = (row * 2654435761 % 2**32 >> 16) % workers
        shards[(j + turn) % workers, row] = value
    return js.WorkerLocal(shards, "shard", np.full(workers, n, np.int32))


@pytest.mark.parametrize("entries", [0, 1, 5, 73, 101])
@change
def test_a_servers_vector_is_the_same_before_and_after(workers, n, entries):
    vector = np.arange(1, entries + 1, dtype=np.float32) / 7
    before = shards_of(vector, workers)
    after = js.reshard({"held": before, "q": 1}, n)["held"]
    wanted = shards_of(vector, n)
    np.testing.assert_array_equal(after.value, wanted.value)
    np.testing.assert_array_equal(after.size, wanted.size)
    back = js.reshard(after, workers)
    np.testing.assert_array_equal(back.value, before.value)
    dense = ownership.from_shards(jnp.asarray(after.value), entries)
    np.testing.assert_array_equal(dense, vector)


# --- Methods ------------------------------------------------------------------------

METHODS = {
    **{
        name: TRANSFORMATIONS[name]
        for name in (
            "error_feedback",
            "dgc",
            "power_sgd",
            "ef_sign_sgd",
            "random_k",
            "server_limit",
            "server_momentum",
            "shared_support",
            "lgc_server",
            "lgc_ring",
        )
    },
    "g_top_k": lambda N: js.error_feedback(
        sparse(js.top_k(0.1), exchange=js.g_top_k())
    ),
    "frequency": lambda N: js.error_feedback(
        sparse(js.top_k(0.1, js.frequency(local=True)))
    ),
    "reg_top_k": lambda N: js.error_feedback(
        sparse(js.top_k(0.1, js.reg_top_k(num_workers=N)))
    ),
    "skip_nonfinite": lambda N: js.skip_nonfinite(
        optax.chain(TRANSFORMATIONS["server"](N), optax.adam(0.1)), axis_name=AXIS
    ),
}


@functools.cache
def method(make, workers):
    """Its transformation, its state before the first step, and its step."""
    tx = make(workers)
    state, axes = stacked(tx.init(dyadic(0)), workers)
    return tx, state, on_workers(tx.update, (None, axes), (0, axes))


def stepped(make, state, workers, seed):
    """One step on all workers, given gradients of their own."""
    return method(make, workers)[2](dyadic(seed, workers=workers), state)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_with_other_workers(name):
    make = METHODS[name]
    _, state, _ = method(make, 4)
    for seed in (1, 2):
        _, state = stepped(make, state, 4, seed)
    found = js.reshard(state, 2)
    _, wanted, _ = method(make, 2)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert js.state_axes(found) == js.state_axes(wanted)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for old, new in marked(state, found):
        if old.reshard == "mean":
            for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True):
                if jnp.issubdtype(a.dtype, jnp.floating):
                    np.testing.assert_allclose(b.mean(0), a.mean(0), atol=1e-5)
    n = size(SHAPES.values())
    np.testing.assert_array_equal(held_by_servers(found, n), held_by_servers(state, n))
    updates, _ = stepped(make, found, 2, seed=3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


def marked(*states):
    """The marked parts of states of one structure, side by side."""
    each = [
        [x for x in jax.tree.leaves(state, is_leaf=is_local) if is_local(x)]
        for state in states
    ]
    return zip(*each, strict=True)


@pytest.mark.parametrize(("workers", "n"), [(4, 2), (2, 4), (8, 1), (1, 8)])
@pytest.mark.parametrize("name", ["error_feedback", "server_limit"])
def test_what_was_given_is_delivered_or_owed_across_a_change(workers, n, name):
    """Law 2 of the design with a change between: sums of dyadic numbers are exact."""
    given, delivered, make = 0.0, 0.0, TRANSFORMATIONS[name]
    _, state, _ = method(make, workers)
    for count, seeds in ((workers, (1, 2, 3)), (n, (4, 5))):
        state = js.reshard(state, count)
        for seed in seeds:
            grads = dyadic(seed, workers=count)
            mean, state = stepped(make, state, count, seed)
            given = given + flat(jax.tree.map(lambda g: g.mean(0), grads))
            delivered = delivered + flat(mean)
    owed = flat(jax.tree.map(lambda r: r.mean(0), state.residual.value))
    held = held_by_servers(state, size(SHAPES.values()))
    np.testing.assert_array_equal(delivered + owed + held, given)
    assert np.abs(owed + held).max() > 0


def test_a_lossless_step_after_the_change_delivers_all_that_was_owed():
    """Density 1, no limit, float32: the mean is that of gradients and residuals."""

    def make(density):
        way = js.server(ladder=False)
        return lambda N: js.error_feedback(
            sparse(js.top_k(density), exchange=way, workers=N)
        )

    some, everything = make(0.1), make(1.0)
    _, state, _ = method(some, 8)
    for seed in (1, 2):
        _, state = stepped(some, state, 8, seed)
    owed = flat(jax.tree.map(lambda r: r.mean(0), state.residual.value))
    mean, found = stepped(everything, js.reshard(state, 4), 4, seed=3)
    grads = jax.tree.map(lambda g: g.mean(0), dyadic(3, workers=4))
    np.testing.assert_array_equal(flat(mean), owed + flat(grads))
    assert not flat(found.residual.value).any()


def flat(tree):
    return np.concatenate(
        [np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    )


# --- Errors -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, 2.5, True, None])
def test_a_number_of_workers_that_is_none_is_refused(n):
    with pytest.raises(ValueError, match=r"`reshard\(n=...\)` must be a whole number"):
        js.reshard(js.WorkerLocal(jnp.zeros((2, 3))), n)


@pytest.mark.parametrize(
    ("state", "local", "message"),
    [
        (
            {"a": js.WorkerLocal(jnp.zeros((4, 2))), "b": js.WorkerLocal(jnp.ones(3))},
            None,
            r"leaf `b/value` has shape \(3,\), leaf `a/value` \(4, 2\)",
        ),
        ({"count": jnp.zeros(())}, True, r"leaf `count` has shape \(\)"),
        ({"a": jnp.zeros(2)}, {"b": True}, r"`reshard\(local=...\)` must be a tree of"),
        (js.WorkerLocal(jnp.zeros((2, 3)), "shard"), None, "size of the global vector"),
        (
            js.WorkerLocal(jnp.zeros((2, 3)), "shard", jnp.array([9, 9])),
            None,
            r"2 workers' shards of 9 entries are \[2, 5\]",
        ),
        (js.WorkerLocal(jnp.zeros((2, 3)), "sum"), None, "known are 'mean' and"),
    ],
)
def test_state_that_cannot_be_taken_is_refused_by_name(state, local, message):
    with pytest.raises(ValueError, match=message):
        js.reshard(state, 3, local)


def test_parts_of_the_parameters_are_not_mixed():
    inside, between = js.axis_groups("w", num_workers=4, group_size=2)
    reducer = js.sparse(js.top_k(0.5), js.all_gather(), axis_name=between)
    tx = js.hierarchical(js.error_feedback(reducer), axis_name=inside)
    state = js.stack_workers(tx.init(jnp.zeros(6)), 4)
    with pytest.raises(ValueError, match="`inner` is the state of `hierarchical`"):
        js.reshard(state, 8)
    # What the message says: from two hosts to three, one device's place each.
    by_host = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), state.inner.value)
    for d in range(2):
        mine = jax.tree.map(lambda x, d=d: x[:, d], by_host)
        assert js.reshard(mine, 3).residual.value.shape == (3, 3)
