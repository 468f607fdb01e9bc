"""Costs, against arithmetic by hand, searches over all unions, and real programs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse import cost
from jaxsparse.exchange import ownership
from jaxsparse.exchange.server import capacities, down_capacity

AXIS = "workers"
FLOAT32 = js.codec.float32()
CODED = functools.partial(cost.coded_bytes, codec=FLOAT32)

# Sizes


def test_sizes_by_hand():
    # 4 of 1000: 1000 / 4 = 250, so 7 low bits each: 28 bits, one word; 4 + 1000 >> 7 =
    # 11 bits of bitmap, one word; 4 values of 16 bits, two words.
    assert cost.coded_bytes(4, 1000) == 4 * (1 + 1 + 2)
    assert cost.coded_bytes(3.2, 999.5) == 4 * (1 + 1 + 2)
    assert cost.coded_bytes(4, 1000, header=3, agreed=True) == 4 * (3 + 2)
    assert cost.coded_bytes(4, 1000, FLOAT32) == 4 * (1 + 1 + 4)
    # 1000 * 999 * 998 * 997 / 24 ways
    ways = 1000 * 999 * 998 * 997 / 24
    assert cost.ideal_bytes(4, 1000) == pytest.approx(math.log2(ways) / 8 + 8)
    assert cost.int32_bytes(4, 1000) == 4 * (4 + 2)
    assert cost.bitmap_bytes(4, 1000) == 125 + 8
    assert cost.dense_bytes(4, 1000) == 2000
    # 9 signs of 1 bit, or 9 bytes with two scales
    assert cost.int32_bytes(9, 99, js.codec.sign_mean()) == 36 + 9 / 8 + 4
    assert cost.int32_bytes(9, 99, js.codec.int8(block=8)) == 36 + 9 + 8
    assert cost.entries(4, 1000) == 4


@pytest.mark.parametrize("size", [cost.coded_bytes, cost.ideal_bytes, cost.int32_bytes])
def test_nothing_and_everything(size):
    assert size(0, 0) == 0
    assert size(1000, 1000) >= cost.dense_bytes(1000, 1000)


@pytest.mark.parametrize("alpha, bits", [(1e-2, 8.08), (1e-3, 11.41), (1e-4, 14.73)])
def test_ideal_indices_take_the_entropy(alpha, bits):
    """The column "entropy" of a table in the literature: bits per index."""
    n = 20_000_000
    got = cost.ideal_bytes(alpha * n, n, FLOAT32) * 8 / (alpha * n) - 32
    assert got == pytest.approx(bits, abs=0.006)


def test_the_library_codes_within_some_per_cent_of_the_ideal():
    n = 1_000_000
    for density, above in ((1e-4, 1.05), (1e-3, 1.06), (1e-2, 1.07), (1e-1, 1.12)):
        m = density * n
        values = 2 * m
        indices = cost.coded_bytes(m, n) - values
        ideal = cost.ideal_bytes(m, n) - values
        assert ideal < indices < above * ideal


def test_the_smallest_size_by_density():
    n = 10_000
    assert cost.smallest_bytes(10, n) == cost.ideal_bytes(10, n)
    assert cost.smallest_bytes(n, n) == cost.dense_bytes(n, n)
    # At half the entries set, a bit each is all but the entropy: n - log2(n)/2 bits.
    almost = cost.bitmap_bytes(n / 2, n) - cost.smallest_bytes(n / 2, n)
    assert 0 < 8 * almost < 10


# Models


def test_models_by_hand():
    N, k, u, n = 4, 6, 14, 100
    model = cost.decentralised(N, k, n, cost.entries)
    assert (model.up, model.down, model.link, model.total) == (6, 18, 18, 4 * 18)
    model = cost.central(N, k, u, n, cost.entries)
    assert (model.up, model.down, model.link, model.total) == (6, 14, 20, 4 * 20)
    assert model.server_link == 4 * 6 + 4 * 14
    model = cost.sharded(N, k, u, n, cost.entries)
    # up: 3/4 of 6 on the way up, a quarter of 14 on the way down; down: 3/4 of 20
    assert (model.up, model.down) == (4.5 + 3.5, 4.5 + 10.5)
    assert (model.link, model.total, model.server_link) == (15, 60, 0)
    model = cost.dense(N, n)
    assert (model.up, model.down, model.link) == (400, 400, 600)


@pytest.mark.parametrize(
    "N, overlap_to_cost",
    [
        (16, {15.9: 1.13, 9.9: 0.73, 5.2: 0.41, 3.1: 0.27}),
        (4, {4.0: 1.67, 3.4: 1.46, 2.5: 1.18, 1.9: 0.95}),
    ],
)
def test_central_against_decentralised(N, overlap_to_cost):
    """Toy unions and their cost, computed elsewhere: u/k is rounded there."""
    k, n = 1000, 1_000_000
    for ratio, want in overlap_to_cost.items():
        central = cost.central(N, k, ratio * k, n, cost.entries)
        other = cost.decentralised(N, k, n, cost.entries)
        assert central.total / other.total == pytest.approx(want, abs=0.02)


def test_one_worker_moves_nothing():
    for model in (
        cost.decentralised(1, 5, 10),
        cost.sharded(1, 5, 5, 10),
        cost.dense(1, 10),
        cost.all_gather(1, 5, 10),
        cost.server(1, 5, 5, 10),
    ):
        assert model.link == model.total == 0


# Equal costs


@pytest.mark.parametrize("N", [2, 3, 4, 8, 16])
def test_equal_unions_by_search(N):
    k, n = 6, 1000
    other = cost.decentralised(N, k, n, cost.entries).total
    least, most = cost.union_bounds(N, k, n)
    unions = range(least, most + 1)
    central = [
        u for u in unions if cost.central(N, k, u, n, cost.entries).total < other
    ]
    shards = [u for u in unions if cost.sharded(N, k, u, n, cost.entries).total < other]
    assert central == list(range(k, int(cost.equal_union(N, k, "central"))))
    assert shards == list(range(k, int(cost.equal_union(N, k))))
    assert cost.equal_union(N, k, "receive") == most


def receives(sets):
    """Entries that come down to all workers, but for what one alone has chosen."""
    union = set().union(*sets)
    own = [s - set().union(*sets[:i], *sets[i + 1 :]) for i, s in enumerate(sets)]
    return sum(len(union) - len(mine) for mine in own)


@pytest.mark.parametrize("N", [2, 3, 8])
def test_third_reading_on_real_sets(N):
    """What a worker receives: equal without overlap, less with any, from N = 3 on."""
    rng = np.random.default_rng(N)
    k = 10
    gathered = N * (N - 1) * k
    for n in (N * k, 12, 40, 200):
        if n == N * k:
            sets = [set(part) for part in rng.permutation(n).reshape(N, k).tolist()]
        else:
            sets = [set(rng.choice(n, k, replace=False).tolist()) for _ in range(N)]
        u = len(set().union(*sets))
        if u == cost.equal_union(N, k, "receive") or N == 2:
            assert receives(sets) == gathered
        else:
            assert receives(sets) < gathered


def exhaustive(server, other, N, k, n, measure):
    least, most = cost.union_bounds(N, k, n)
    without = measure(other(N, k, n))
    wins = [u for u in range(least, most + 1) if measure(server(N, k, u, n)) < without]
    assert wins == list(range(least, least + len(wins)))  # from the least on
    return wins[-1] if wins else 0


def payload(step):
    return step.up + step.down


def by_a_slow_network(step):
    return cost.seconds(step, bits_per_second=1e6, latency_seconds=1e-4)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("measure", [payload, by_a_slow_network])
@pytest.mark.parametrize("k, n", [(40, 4000), (40, 300), (1, 50)])
def test_where_the_server_wins_by_search(N, measure, k, n):
    find = functools.partial(cost.server_wins_up_to, N, k, n, cost=measure)
    want = exhaustive(cost.server, cost.all_gather, N, k, n, measure)
    assert find() == want
    central = functools.partial(cost.central, size=cost.int32_bytes)
    gathered = functools.partial(cost.decentralised, size=cost.int32_bytes)
    want = exhaustive(central, gathered, N, k, n, measure)
    assert find(server=central, other=gathered) == want


def test_where_the_server_wins_in_entries_is_the_formula():
    sharded = functools.partial(cost.sharded, size=cost.entries)
    gathered = functools.partial(cost.decentralised, size=cost.entries)
    for N in (3, 4, 8):
        found = cost.server_wins_up_to(N, 50, 9999, server=sharded, other=gathered)
        assert found == cost.equal_union(N, 50) - 1


def test_latency_moves_the_point_towards_all_gather():
    """The server has three collectives, all_gather one."""

    def found(latency):
        return cost.server_wins_up_to(
            8,
            1000,
            100_000,
            cost=lambda step: cost.seconds(
                step, bits_per_second=1e9, latency_seconds=latency
            ),
        )

    points = [found(latency) for latency in (0, 1e-5, 3e-5, 1e-3)]
    assert points == sorted(points, reverse=True) and points[0] > points[2]
    assert points[-1] == 0


# Time and unions


def test_seconds_by_hand():
    rates = {"bits_per_second": 100, "server_bits_per_second": 400}
    central = cost.central(8, 25, 50, 1000, cost.entries)
    # The server's link decides: 8 * 25 and 8 * 50 bytes at 50 bytes a second.
    time = functools.partial(cost.seconds, central, **rates)
    assert time() == 4 + 8
    assert time(latency_seconds=0.5, compute_seconds=3, select_seconds=1) == 4 + 8 + 5
    # A faster server: the workers' links decide, 25 + 50 bytes at 12.5 a second.
    assert cost.seconds(central, bits_per_second=100, server_bits_per_second=1e6) == 6
    gathered = cost.decentralised(8, 25, 1000, cost.entries)
    assert cost.seconds(gathered, **rates) == 7 * 25 * 8 / 100


def test_expected_union_by_drawing():
    rng = np.random.default_rng(0)
    for N, k, n in ((4, 30, 100), (8, 5, 1000)):
        draws = [
            len(np.unique([rng.choice(n, k, replace=False) for _ in range(N)]))
            for _ in range(200)
        ]
        error = np.std(draws) / math.sqrt(len(draws))
        assert abs(np.mean(draws) - cost.expected_union(N, k, n)) < 4 * error
    assert cost.expected_union(3, 10, 10) == 10
    assert cost.expected_union(1, 3, 10) == pytest.approx(3)
    assert cost.expected_union(3, 0, 10) == 0
    assert cost.expected_union(3, 0, 0) == 0
    # Many entries, of which few are chosen: nothing is lost to rounding.
    assert cost.expected_union(8, 1, 1e15) == pytest.approx(8, rel=1e-12)


@pytest.mark.parametrize("N", [2, 3, 8, 16])
def test_expected_busiest_owner_by_drawing(N):
    n = 10_000
    rng = np.random.default_rng(N)
    owner = np.asarray(ownership.owner(jnp.arange(n), N))
    for union in (200, 2000):
        most = [
            np.bincount(owner[rng.choice(n, union, replace=False)]).max()
            for _ in range(100)
        ]
        error = 0.3 * math.sqrt(union / N) + 1
        assert abs(np.mean(most) - cost.expected_busiest(N, union, n)) < error
    assert cost.expected_busiest(N, 0, n) == 0
    assert cost.expected_busiest(N, n, n) == n / N


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: cost.decentralised(0, 1, 10), r"decentralised\(num_workers=...\)"),
        (lambda: cost.decentralised(2, 11, 10), r"decentralised\(k=...\).*\[0, n = 10"),
        (lambda: cost.central(2, 3, 7, 10), r"central\(union=...\).*= 6\], got 7"),
        (lambda: cost.sharded(4, 3, 11, 10), r"sharded\(union=...\).*= 10\], got 11"),
        (lambda: cost.server(2, 3, -1, 10), r"server\(union=...\)"),
        (lambda: cost.equal_union(2, 3, "both"), r"equal_union\(reading=...\).*'both'"),
        (
            lambda: cost.seconds(cost.dense(2, 9), bits_per_second=0),
            r"seconds\(bits_per_second=...\)",
        ),
    ],
)
def test_arguments_out_of_range(call, match):
    with pytest.raises(ValueError, match=match):
        call()


# Real programs

DENSITY = 0.02
SIZES = [1, 97, 3000]


def k_of(n):
    return math.ceil(round(DENSITY * n, 9))


def traced(exchange, N, n, codec=None, selection=None):
    """The traffic of a real step."""
    selection = js.top_k(DENSITY) if selection is None else selection
    reducer = js.sparse(selection, exchange, axis_name=AXIS, num_workers=N, codec=codec)
    x = jnp.zeros(n)
    step = lambda x: reducer.reduce(x, reducer.init(x))  # noqa: E731
    return js.traffic(jax.make_jaxpr(step, axis_env=[(AXIS, N)])(x))


def agrees(step, program, **branches):
    """Both counts of a program's bytes, against the model's."""
    N = step.num_workers
    assert (step.up, step.down) == js.payload_bytes(program, N, **branches)
    assert step.link == js.link_bytes(program, N, **branches)


@pytest.mark.parametrize("N", [1, 2, 3, 8])
@pytest.mark.parametrize("n", SIZES)
def test_bytes_of_programs_without_a_server(N, n):
    k = k_of(n)
    agrees(cost.all_gather(N, k, n), traced(js.all_gather(), N, n))
    program = traced(js.all_gather(), N, n, js.codec.int8(block=4))
    agrees(cost.all_gather(N, k, n, codec=js.codec.int8(block=4)), program)
    program = traced(js.all_gather(), N, n, selection=js.random_k(DENSITY))
    agrees(cost.all_gather(N, k, n, agreed=True), program)
    agrees(cost.shared_support(N, k, n), traced(js.shared_support(), N, n))
    program = traced(js.shared_support(), N, n, selection=js.random_k(DENSITY))
    agrees(cost.shared_support(N, k, n, agreed=True), program)
    dense = js.dense(axis_name=AXIS)
    program = jax.make_jaxpr(lambda x: dense.reduce(x, ()), axis_env=[(AXIS, N)])
    agrees(cost.dense(N, n), js.traffic(program(jnp.zeros(n))))
    # The model is the program but for its header, a word.
    model = cost.decentralised(N, k, n, CODED)
    program = traced(js.all_gather(), N, n, FLOAT32)
    assert js.link_bytes(program, N) - model.link == 4 * (N - 1)


@pytest.mark.parametrize("N", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", SIZES)
def test_bytes_of_a_server_without_a_ladder(N, n):
    for given in ({}, {"limit": 1.5, "slack": 3.0, "downlink": FLOAT32}):
        program = traced(js.server(ladder=False, **given), N, n)
        k = k_of(n)
        for union in (k, min(N * k, n)):
            agrees(cost.server(N, k, union, n, ladder=False, **given), program)


@pytest.mark.parametrize("N, n", [(2, 97), (3, 3000), (8, 3000)])
def test_bytes_of_every_rung(N, n):
    """The branch that the ladder takes for a union costs what the model says."""
    k = k_of(n)
    program = traced(js.server(), N, n)
    most = down_capacity(k, n, N, 1.0, None)
    rungs = capacities(math.ceil(k / N), most)
    branches = [f"ladder[{i}]" for i in range(len(rungs))]
    assert set(program) == {"", *(branches if len(rungs) > 1 else [])}
    counted = [
        (
            *js.payload_bytes(program, N, ladder=rung),
            js.link_bytes(program, N, ladder=rung),
        )
        for rung in range(len(rungs))
    ]
    for union in range(k, min(N * k, n, N * most) + 1):
        busiest = math.ceil(union / N)
        step = cost.server(N, k, union, n, busiest=busiest)
        rung = next(i for i, capacity in enumerate(rungs) if capacity >= busiest)
        assert (step.up, step.down, step.link) == counted[rung]


@pytest.fixture(scope="module")
def compiled_server():
    """A real step: 40 of 1000 entries, no overflow, at most 80 come down."""
    reducer = js.sparse(
        js.top_k(0.04),
        js.server(limit=2.0, slack=9.0),
        axis_name=AXIS,
        num_workers=4,
    )

    def step(x):
        _, _, state = reducer.reduce(x, reducer.init(x))
        return state.metrics.aggregated, state.metrics.rung

    return jax.pmap(step, AXIS).lower(jnp.zeros((4, 1000))).compile()


@pytest.mark.parametrize("own", [0, 10, 20, 40])
def test_the_rung_that_a_step_takes(compiled_server, own):
    """Of each worker's 40 entries some are its own: measured union, measured rung."""
    N, n, k = 4, 1000, 40
    rng = np.random.default_rng(own)
    entries = rng.permutation(n)
    x = np.zeros((N, n), np.float32)
    for worker, row in enumerate(x):
        row[entries[own:40]] = rng.uniform(1, 2, k - own)
        row[entries[40 + own * worker :][:own]] = rng.uniform(1, 2, own)
    chosen = np.flatnonzero(np.any(x != 0, axis=0))
    union, rung = (int(out[0]) for out in compiled_server(x))
    assert union == len(chosen) == k - own + N * own
    owners = np.asarray(ownership.owner(jnp.asarray(chosen), N))
    busiest = int(np.bincount(owners, minlength=N).max())
    model = cost.server(N, k, union, n, busiest=busiest, limit=2.0, slack=9.0)
    agrees(model, js.traffic(compiled_server), ladder=rung)


@pytest.mark.parametrize("N", [2, 4, 8])
def test_the_model_of_shards_within_the_padding_of_the_program(N):
    """Up: places beyond k / N, and headers. Down: at most a rung too many."""
    k, n = 4000, 400_000
    for union in (k, 2 * k, (N + 1) * k // 2):
        program = cost.server(N, k, union, n, busiest=math.ceil(union / N))
        model = cost.sharded(N, k, union, n)
        up, down = program.transfers[0].link, program.transfers[-1].link
        places = (k / N + math.sqrt(k / N) + 1) / (k / N)
        assert 1 <= up / model.transfers[0].link < places * 1.01
        assert 1 <= down / model.transfers[-1].link < 1.25 * 1.01
        ideal = cost.sharded(N, k, union, n, cost.ideal_bytes)
        assert ideal.link < model.link < 1.05 * ideal.link
