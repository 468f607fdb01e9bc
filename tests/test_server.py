import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import (
    AXIS,
    SHAPES,
    dyadic,
    held_by_servers,
    index_words,
    on_workers,
    sparse,
    stacked,
)

import jaxsparse as js
from jaxsparse.exchange.server import capacities, down_capacity, part_capacity

N, K, STEPS = 90, 12, 5
BFLOAT16 = js.codec.bfloat16()


def gradients(workers, seed=0, steps=STEPS, alike=0.5):
    """Multiples of 1/64; ``alike`` is the share of a vector common to all workers."""
    rng = np.random.default_rng(seed)
    common, own = (
        rng.standard_normal((steps, 1, N)),
        rng.standard_normal((steps, workers, N)),
    )
    return np.float32(np.round(64 * (alike * common + (1 - alike) * own)) / 64)


@functools.cache
def compiled(workers, codec=None, selection=None, scope="global", **arguments):
    """Means, rests, shards and metrics of steps that start from given gradients."""
    selection = js.top_k(K / N) if selection is None else selection
    if arguments.pop("gathered", False):
        exchange = js.all_gather()
    else:
        exchange = js.server(**arguments)
    reducer = sparse(selection, codec, scope, exchange, workers)

    def run(grads):
        def step(state, g):
            mean, left, state = reducer.reduce(g, state)
            shared = state.metrics._replace(sent_norm=None)
            held = jax.tree.leaves(state.exchange)
            return state, (mean, left, held, shared)

        return jax.lax.scan(step, reducer.init(worker_zero(grads)), grads)[1]

    def worker_zero(grads):
        return jax.tree.map(lambda g: g[0] * 0, grads)

    return on_workers(run, (None, 0, 0, None), in_axes=1)


def over(grads, codec=None, **arguments):
    """Mean [steps, n], left [steps, workers, n], held [steps, n], metrics [steps]."""
    workers = jax.tree.leaves(grads)[0].shape[1]
    out = compiled(workers, codec, **arguments)(grads)
    mean, left, held, metrics = jax.tree.map(np.asarray, out)
    left = jax.tree.map(lambda v: v.swapaxes(0, 1), left)
    if held:  # [workers, steps, rows], and where each entry is
        owner, row = owners(workers), np.arange(N) // workers
        held = held[0][owner, :, row].T if held[0].shape[2] == rows(workers) else held
    return mean, left, held, metrics


def rows(workers):
    return -(-N // workers)


def owners(workers, n=N):
    """The worker that owns each entry, by the formula in NumPy."""
    j = np.arange(n, dtype=np.uint64)
    turn = ((j // workers * 2654435761 % 2**32) >> 16) % workers
    return ((j + turn) % workers).astype(int)


def by_importance(x):
    return np.argsort(-np.abs(x), kind="stable")


def simulated(grads, k=K, places=N, most=N, residual=True, down=lambda v: v):
    """The whole server in NumPy: means, rests, what is held, entries without place."""
    steps, workers, n = grads.shape
    owner, held = owners(workers, n), np.zeros(n)
    means, rests, helds, missed = [], [], [], []
    for x in grads.astype(np.float64):
        sent, hit = np.zeros_like(x), np.zeros(x.shape, bool)
        for i, worker in enumerate(x):
            chosen = by_importance(worker)[:k]
            for w in range(workers):
                hit[i, chosen[owner[chosen] == w][:places]] = True
            sent[i, hit[i]] = worker[hit[i]]
        total, touched = held + sent.mean(0), hit.any(0)
        comes = np.zeros(n, bool)
        for w in range(workers):
            candidates = np.flatnonzero(touched & (owner == w))
            if most < n:  # under a limit, what is held competes too
                own = np.abs(np.where(owner == w, total, 0))
                wait = touched | (own > own.max() * 2.0**-7)
                candidates = np.flatnonzero(wait & (owner == w))
            comes[candidates[by_importance(total[candidates])][:most]] = True
        mean = np.where(comes, down(total), 0)
        held = (total - mean) * residual
        for values, out in zip(
            (mean, x - sent, held, workers * k - hit.sum()),
            (means, rests, helds, missed),
            strict=True,
        ):
            out.append(values)
    return map(np.stack, (means, rests, helds, missed))


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("workers", [1, 8])
def test_without_overflow_it_is_the_mean_of_all_gather(workers):
    g = gradients(workers)
    mean, left, held, metrics = over(g, slack=99.0, ladder=False)
    wanted, rest, _, others = over(g, gathered=True)
    np.testing.assert_array_equal(mean, wanted)
    np.testing.assert_array_equal(left, rest)
    assert not held.any()
    for name in ("selected", "aggregated", "overlap", "common", "overflow"):
        np.testing.assert_array_equal(getattr(metrics, name), getattr(others, name))


@pytest.mark.parametrize(
    ("alike", "downlink"),
    [(0.0, None), (0.6, None), (0.95, None), (0.6, js.codec.sign_mean())],
)
def test_the_ladder_changes_no_bit(alike, downlink):
    g = np.float32(gradients(4, 1, alike=alike) * np.pi)
    found = over(g, downlink=downlink)
    wanted = over(g, ladder=False, downlink=downlink)
    for a, b in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert (wanted[3].rung == 0).all()


SETTINGS = {
    "plain": {},
    "tight": {"slack": 0.0},
    "limit": {"limit": 1.25},
    "limit of a fraction": {"limit": 0.5, "slack": 0.5},
    "no residual": {"limit": 1.0, "residual": False},
    "downlink": {"downlink": BFLOAT16},
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [("plain", 2), ("limit", 3), ("downlink", 2), *((name, 8) for name in SETTINGS)],
)
def test_the_whole_server_is_numpys(name, workers):
    arguments = SETTINGS[name]
    share = K / workers
    places = share + arguments.get("slack", 1.0) * math.sqrt(share * (1 - 1 / workers))
    most = N
    if "limit" in arguments:
        most = math.ceil(arguments["limit"] * K / workers)
    g = gradients(workers, 2) * np.float32(1 + 2**-8)  # too many bits for bfloat16
    mean, left, held, metrics = over(g, ladder=False, **arguments)
    wanted, rest, kept, missed = simulated(
        g,
        places=math.ceil(places),
        most=most,
        residual=arguments.get("residual", True),
        down=bfloat16 if "downlink" in arguments else lambda v: v,
    )
    tolerance = 1e-6 if workers == 3 else 0
    np.testing.assert_allclose(mean, wanted, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(left, rest)
    np.testing.assert_allclose(held, kept, rtol=0, atol=tolerance)
    np.testing.assert_allclose(metrics.overflow, missed / workers, rtol=1e-6)
    if name in ("tight", "limit of a fraction"):
        assert missed.any()
    assert held.any() == (name not in ("plain", "tight", "no residual"))


def test_the_least_important_of_an_overflow_stay_left_and_are_counted():
    workers, owned = 4, np.flatnonzero(owners(4) == 2)
    x = np.zeros((STEPS, workers, N), np.float32)
    x[:, 0, owned[:K]] = np.arange(1, K + 1)  # all for one owner, who has few places
    x[:, 1:, :K] = 1
    places = part_capacity(K, N, workers, 1.0)
    assert places == 5
    mean, left, _, metrics = over(x)
    np.testing.assert_array_equal(left[0, 0, owned[:K]][: K - places], range(1, 8))
    assert np.count_nonzero(left[0, 0]) == K - places
    missed = [K - places, *[max(np.bincount(owners(4)[:K]).max() - 5, 0)] * 3]
    assert (metrics.overflow == sum(missed) / workers).all()
    assert (metrics.selected == K - sum(missed) / workers).all()
    np.testing.assert_array_equal((x - left)[0].sum(0), workers * mean[0])


def test_what_the_limit_holds_back_comes_down_when_it_is_among_the_largest():
    workers = 2
    mine = np.flatnonzero(owners(workers) == 1)[:5]
    g = np.zeros((2, workers, N), np.float32)
    g[0][:, mine[:4]] = [8, 6, 5, 2]
    g[1][:, mine[[0, 1, 4]]] = [1, 1.5, 3]
    mean, _, held, _ = over(
        g,
        limit=1.0,
        selection=js.threshold(0.5, max_density=0.04),
        slack=9.0,
        ladder=False,
    )
    assert mean[:, mine].tolist() == [[8, 6, 0, 0, 0], [0, 0, 5, 0, 3]]
    assert held[:, mine].tolist() == [[0, 0, 5, 2, 0], [1, 1.5, 0, 2, 0]]


def test_what_the_limit_holds_back_comes_down_as_soon_as_there_is_room():
    workers = 2
    mine = np.flatnonzero(owners(workers) == 1)[:4]
    g = np.zeros((3, workers, N), np.float32)
    g[0][:, mine] = [8, 6, 4, 2]
    g[1][:, mine[:1]] = 1
    g[2][:, mine[2:3]] = 1
    arguments = {"selection": js.threshold(0.5, max_density=0.04)}
    arguments |= {"slack": 9.0, "ladder": False}
    mean, left, held, _ = over(g, limit=1.0, **arguments)  # 2 of 4 for each owner
    assert not left.any()
    assert mean[:, mine].tolist() == [[8, 6, 0, 0], [0, 0, 4, 2], [1, 0, 1, 0]]
    assert held[:, mine].tolist() == [[0, 0, 4, 2], [1, 0, 0, 0], [0, 0, 0, 0]]
    lost, _, held, _ = over(g, limit=1.0, residual=False, **arguments)
    assert lost[:, mine].tolist() == [[8, 6, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]
    assert not held.any()


def test_what_rounding_leaves_takes_no_place_under_a_limit():
    workers = 4
    g = np.float32(gradients(workers, 8) * np.pi)
    mean, _, held, metrics = over(g, limit=float(workers), downlink=BFLOAT16)
    assert held.any()
    for t in range(STEPS):
        assert np.count_nonzero(mean[t]) <= metrics.aggregated[t]


def test_exactly_the_limit_comes_down_and_it_is_the_largest():
    workers = 8
    g = gradients(workers, 3, alike=0.2)
    most = math.ceil(1.25 * K / workers)
    mean, _, held, metrics = over(g, limit=1.25, ladder=False)
    for w in range(workers):
        own = owners(workers) == w
        sent, kept = mean[0, own], held[0, own]
        if np.count_nonzero(sent + kept) >= most:
            assert np.count_nonzero(sent) == most
        assert np.abs(sent[sent != 0]).min() >= np.abs(kept).max()
    assert np.count_nonzero(mean[0]) < metrics.aggregated[0]


@pytest.mark.parametrize("residual", [True, False])
def test_over_twenty_steps_only_a_server_without_residual_loses(residual):
    workers = 4
    tx = js.error_feedback(
        sparse(
            js.top_k(K / N),
            exchange=js.server(limit=1.25, residual=residual),
            workers=workers,
        )
    )
    g = gradients(workers, 4, steps=20)
    lost = g.sum((0, 1)) - owed_and_delivered(tx, g)
    if residual:
        np.testing.assert_allclose(lost, 0, atol=1e-4)
    else:
        assert np.abs(lost).max() > 1
        # It is what the limit cut, step by step.
        np.testing.assert_allclose(lost, workers * cut_by_limit(g, 1.25), atol=1e-4)


def owed_and_delivered(tx, g):
    """N times what was delivered and what the servers hold, and all residuals."""
    workers = g.shape[1]
    zero = jnp.zeros(N)
    state, axes = stacked(tx.init(zero), workers)

    def run(state, g):
        def step(state, x):
            mean, state = tx.update(x, state)
            return state, mean

        state, means = jax.lax.scan(step, state, g)
        return means, state

    means, state = on_workers(run, (None, axes), (axes, 1))(state, g)
    held = held_by_servers(state, N)
    residual = np.asarray(state.residual.value).sum(0)
    return workers * (np.asarray(means, np.float64).sum(0) + held) + residual


def cut_by_limit(g, limit):
    """What error feedback's steps lose to the limit, in units of the mean."""
    workers = g.shape[1]
    places = part_capacity(K, N, workers, 1.0)
    most = math.ceil(limit * K / workers)
    left, lost = np.zeros(g.shape[1:]), 0
    for x in g.astype(np.float64):
        step = (x + left)[None]
        _, (left,), (cut,), _ = simulated(step, places=places, most=most)
        lost = lost + cut
    return lost


def test_a_downlink_of_fewer_bits_loses_nothing():
    g = np.float32(gradients(8, 5) * np.pi)
    mean, left, held, _ = over(g, downlink=BFLOAT16, ladder=False)
    sent = (np.float64(g) - left).mean(1).cumsum(0)
    np.testing.assert_array_equal(mean, bfloat16(mean))
    np.testing.assert_allclose(mean.cumsum(0) + held, sent, atol=1e-5)
    assert held.any() and np.abs(held).max() < 2**-7 * np.abs(sent).max()


def ladder(workers, n=N, k=K, slack=1.0):
    return capacities(math.ceil(k / workers), down_capacity(k, n, workers, slack, None))


def test_rungs_rise_by_a_tenth_up_to_the_largest_union():
    rungs = capacities(100, 800)
    assert rungs[-1] == 800 and rungs[0] <= 110
    assert all(a < b <= math.ceil(1.1 * a) for a, b in zip(rungs, rungs[1:]))  # noqa: B905
    assert capacities(1, 1) == [1]


def test_the_rung_is_the_smallest_that_holds_the_union():
    workers = 4
    rungs = ladder(workers)
    found = []
    for alike in (0.0, 0.5, 0.7, 0.85, 0.95, 1.0):
        g = gradients(workers, 6, alike=alike)
        mean, _, _, metrics = over(g)
        for t in range(STEPS):
            touched = np.bincount(owners(workers)[mean[t] != 0], minlength=workers)
            if np.count_nonzero(mean[t]) < metrics.aggregated[t]:
                continue  # some cancel out: the union cannot be seen from here
            rung = metrics.rung[t]
            assert touched.max() <= rungs[rung]
            assert rung == 0 or touched.max() > rungs[rung - 1]
        found.append(metrics.rung.mean())
    assert found == sorted(found, reverse=True) and found[0] > found[-1] + 2


def test_a_smaller_union_is_fewer_bytes():
    """Each branch sends its rung's message, in the jaxpr and in the program."""
    workers, n, k = 2, 64, 8
    reducer = sparse(js.top_k(k / n), exchange=js.server(), workers=workers)
    x = jnp.zeros(n)
    state = reducer.init(x)
    jaxpr = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])(x, state)
    parts, axes = stacked(state, workers)
    by_pmap = jax.pmap(
        reducer.reduce, AXIS, in_axes=(0, axes), out_axes=(None, 0, axes)
    )
    compiled = by_pmap.lower(js.stack_workers(x, workers), parts).compile()
    places, size = part_capacity(k, n, workers, 1.0), n // workers
    part = 1 + index_words(places, size) + places
    wanted = {"": [("all-reduce", 4), ("all-to-all", 4 * workers * part)]}
    for r, rung in enumerate(ladder(workers, n, k)):
        message = 4 + index_words(rung, size) + rung
        wanted[f"ladder[{r}]"] = [("all-gather", 4 * message)]
    for found in (js.traffic(jaxpr), js.traffic(compiled)):
        listed = {p: sorted((c.op, c.bytes) for c in cs) for p, cs in found.items()}
        assert listed == wanted
        down = [
            js.payload_bytes(found, workers, ladder=r)[1]
            for r in range(len(wanted) - 1)
        ]
        assert (np.diff(down) > 0).all()


def test_a_union_above_the_limit_puts_the_ladder_to_rest():
    rungs = capacities(math.ceil(K / 4), down_capacity(K, N, 4, 1.0, 1.5))
    assert len(rungs) > 1
    rung = over(gradients(4, 7, alike=0.0), limit=1.5)[3].rung
    assert (rung == len(rungs) - 1).all()


def test_empty_places_stay_empty():
    workers, selection = 4, js.threshold(1.5, max_density=K / N)
    g = gradients(workers, 8, alike=0.3)
    g[1] = 0
    g[2, 1:] = 0
    chosen = np.abs(g) > 1.5
    assert chosen.sum(-1).max() <= K and chosen[2].any()
    mean, left, held, metrics = over(g, selection=selection, slack=9.0, ladder=False)
    np.testing.assert_array_equal(mean, np.where(chosen, g, 0).mean(1))
    np.testing.assert_array_equal(left, np.where(chosen, 0, g))
    np.testing.assert_array_equal(metrics.aggregated, chosen.any(1).sum(-1))
    np.testing.assert_array_equal(metrics.selected, chosen.sum((1, 2)) / workers)
    assert not held.any()


@pytest.mark.parametrize("workers", [3, 8])
def test_one_entry_of_few(workers):
    """With k = 1, and fewer entries than workers."""
    reducer = sparse(js.top_k(0.1), exchange=js.server(), workers=workers)
    x = np.zeros((workers, 5), np.float32)
    x[:, 3], x[0, 1] = 1, 24
    state, axes = stacked(reducer.init(jnp.zeros(5)), workers)
    mean, left, _ = on_workers(reducer.reduce, (None, 0, axes), (0, axes))(x, state)
    wanted = np.array([0, 24, 0, workers - 1, 0]) / workers
    np.testing.assert_allclose(mean, wanted, rtol=1e-6)
    np.testing.assert_array_equal(left[0], [0, 0, 0, 1, 0])
    assert not left[1:].any()


def test_a_budget_per_leaf():
    shapes = {"a": (30,), "b": (4, 10), "c": (20,)}
    x = dyadic(9, shapes, 4)
    g = jax.tree.map(lambda v: v[None], x)
    mean, left, _, _ = over(g, scope="leaf", slack=99.0, ladder=False)
    wanted, rest, _, _ = over(g, scope="leaf", gathered=True)
    for a, b in zip(jax.tree.leaves((mean, left)), jax.tree.leaves((wanted, rest))):  # noqa: B905
        np.testing.assert_array_equal(a, b)


def test_the_order_in_a_selection_decides_what_overflows():
    """A priority puts the smallest first, and so the largest stay."""
    upside_down = js.Priority(
        init=lambda n: (),
        score=lambda state, x: 1 / (1 + jnp.abs(x)),
        observe=lambda state, mean, sent: state,
    )
    g = gradients(4, 10, steps=1)
    _, left, _, metrics = over(
        g, selection=js.top_k(K / N, upside_down), slack=0.0, ladder=False
    )
    assert metrics.overflow[0] > 0
    chosen = np.argsort(np.abs(g[0]), axis=1, kind="stable")[:, :K]
    for i, order in enumerate(chosen):
        sent = set(np.flatnonzero(left[0, i] != g[0, i]))
        for w in range(4):
            mine = [j for j in order if owners(4)[j] == w and g[0, i, j] != 0]
            assert len(sent & set(mine)) >= min(len(mine), K // 4 - 1)
            flags = [j in sent for j in mine]
            assert flags == sorted(flags, reverse=True)


def test_the_state_is_a_shard_of_the_vector_in_units_of_the_mean():
    reducer = sparse(js.top_k(0.1), exchange=js.server(), workers=8)
    (residual,) = [
        node
        for node in jax.tree.leaves(
            reducer.init(dyadic(0)).exchange,
            is_leaf=lambda v: isinstance(v, js.WorkerLocal),
        )
        if isinstance(node, js.WorkerLocal)
    ]
    n = sum(math.prod(shape) for shape in SHAPES.values())
    assert residual.reshard == "shard" and residual.value.shape == (-(-n // 8),)


def test_it_works_in_a_chain_around_and_after():
    tx = optax.chain(
        js.error_feedback(
            sparse(js.top_k(0.2), exchange=js.server(limit=2.0), workers=2)
        ),
        optax.adam(0.1),
    )
    found = optax.tree.map_params(tx, lambda v: v, tx.init(dyadic(0)))
    assert jax.tree.structure(found) == jax.tree.structure(tx.init(dyadic(0)))


def test_the_number_of_workers_is_needed_and_checked():
    unknown = sparse(js.top_k(0.1), exchange=js.server())
    with pytest.raises(ValueError, match=r"`sparse\(num_workers=...\)` is needed"):
        unknown.init(jnp.zeros(N))
    reducer = sparse(js.top_k(0.1), exchange=js.server(), workers=4)
    with pytest.raises(ValueError, match=r"num_workers=...\)` is 4, but axis .* has 2"):
        on_workers(lambda x: reducer.reduce(x, reducer.init(x))[0])(jnp.zeros((2, N)))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"limit": 0}, ValueError, r"`server\(limit=...\)`.*positive.*got 0"),
        ({"limit": -1.0}, ValueError, r"`server\(limit=...\)`.*got -1.0"),
        ({"limit": math.inf}, ValueError, r"`server\(limit=...\)`.*finite.*got inf"),
        ({"limit": jnp.array(2.0)}, TypeError, r"`server\(limit=...\)`.*Python number"),
        ({"limit": "2"}, TypeError, r"`server\(limit=...\)` must be a number"),
        ({"slack": -0.1}, ValueError, r"`server\(slack=...\)`.*got -0.1"),
        ({"slack": math.inf}, ValueError, r"`server\(slack=...\)`.*finite.*got inf"),
        ({"slack": math.nan}, ValueError, r"`server\(slack=...\)`.*got nan"),
        (
            {"downlink": "bfloat16"},
            TypeError,
            r"`server\(downlink=...\)`.*bfloat16\(\)",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        js.server(**arguments)


def test_capacities_are_exact_in_decimals():
    assert 1.1 * 100 > 110  # in floating point
    assert down_capacity(100, 10**4, 2, 9.0, 1.1) == 55
