"""What users reported of bytes, memory and slow programs: docs/reports.md."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from contract_table import AXIS, index_words, sparse
from test_reports_numbers import METHODS

import jaxsparse as js
from jaxsparse.jaxpr import _subjaxprs

report = pytest.mark.report
N = 4096
NO_LADDER = js.server(ladder=False)  # a rung is the same program with fewer places
STEPS = METHODS | {
    "sampled_top_k": lambda: sparse(js.sampled_top_k(0.01)),
    "threshold": lambda: sparse(js.threshold(1.0, max_density=0.01)),
    "server": lambda: sparse(js.top_k(0.01), exchange=NO_LADDER, workers=8),
    "g_top_k": lambda: sparse(js.top_k(0.01), exchange=js.g_top_k()),
    "int8": lambda: sparse(js.top_k(0.01), js.codec.int8()),
}
every_step = pytest.mark.parametrize("name", STEPS)


def traced(reducer, workers=8, n=N):
    x = jax.ShapeDtypeStruct((n,), "float32")
    state = jax.eval_shape(reducer.init, x)
    return jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, workers)])(x, state)


@functools.cache
def equations_of(name):
    return [*equations(traced(STEPS[name]()))]


def equations(jaxpr):
    """All equations, those inside of others too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in _subjaxprs(eqn):
            yield from equations(inner)


@report("grace#22", "grace#5")
@every_step
def test_nothing_in_a_step_waits_for_the_host(name):
    names = {eqn.primitive.name for eqn in equations_of(name)}
    assert len(names) > 3
    assert not [n for n in names if "callback" in n or "infeed" in n or "outfeed" in n]


@report("jax#24414")
@every_step
def test_no_approximate_top_k_is_used(name):
    """It is no faster than the exact one on some backends, and then it is no better."""
    names = {eqn.primitive.name for eqn in equations_of(name)}
    assert "approx_top_k" not in names


@report("xla#46225", "jax#38806", "jax#17844", "jax#27796", "xla#22233")
@every_step
def test_no_addition_takes_entries_of_several_workers_at_once(name):
    """They would collide: slow, and in another order, other bits, at every run.

    What one worker sent lies at distinct places, and workers are added one by one.
    """
    k = math.ceil((0.3 if name in METHODS else 0.01) * N)
    for eqn in equations_of(name):
        if eqn.primitive.name == "scatter-add":
            assert eqn.invars[2].aval.size < 2 * k  # and not 8 k


def largest(reducer, workers):
    """Entries of the largest array in a step."""
    return max(
        variable.aval.size
        for eqn in equations(traced(reducer, workers))
        for variable in eqn.outvars
    )


@report("horovod#554", "OpenSeq2Seq#249", "grace#14")
def test_memory_grows_with_the_messages_and_not_with_workers_times_the_model():
    """Of N workers N messages lie in memory, and never N vectors."""
    words = 1 + index_words(41, N) + 41
    reducer = sparse(js.top_k(0.01))
    assert largest(reducer, 2) <= 2 * N
    assert largest(reducer, 256) <= max(2 * N, 256 * words) < 256 * N / 8


def payload(reducer, workers, **branches):
    return js.payload_bytes(js.traffic(traced(reducer, workers)), workers, **branches)


@report("mxnet#8979", "mxnet#9558", "horovod#3328")
def test_what_comes_down_does_not_grow_with_the_number_of_workers():
    """Entries are added up before they come down, the largest alone where asked for."""
    gathered, served = [], []
    for workers in (4, 16):
        exchange = js.server(limit=1.0, ladder=False)
        limited = sparse(js.top_k(0.05), exchange=exchange, workers=workers)
        served.append(payload(limited, workers)[1])
        gathered.append(payload(sparse(js.top_k(0.05)), workers)[1])
    assert gathered[1] > 3.9 * gathered[0]
    assert served[1] < 2 * served[0]  # a header, and room for chance, for each owner
    assert served[1] < gathered[1] / 5


@report("jax#23543", "jax#27496")
def test_the_compiled_program_moves_the_dtypes_that_were_asked_for():
    """No bfloat16 message widened to float32; no dense sum in half precision."""
    x = {"w": jnp.ones((2, 300), jnp.bfloat16)}

    def collectives(reducer):
        step = jax.pmap(lambda x: reducer.reduce(x, reducer.init(x))[0], AXIS)
        return js.traffic(step.lower(x).compile())[""]

    (message,) = collectives(sparse(js.top_k(0.1), js.codec.bfloat16()))
    assert (message.op, message.dtype) == ("all-gather", "uint32")
    assert message.bytes == 4 * (1 + index_words(30, 300) + 15)
    (total,) = collectives(js.dense(axis_name=AXIS))
    assert (total.op, total.dtype, total.bytes) == ("all-reduce", "float32", 4 * 300)


@report("marin#9127")
def test_sparse_messages_say_less_than_bfloat16_at_two_fifths_of_the_entries():
    """Value and int32 index, 6 bytes against 2, would say more from a third on."""
    dense = 2 * N
    for density in (0.01, 0.1, 1 / 3, 0.4):
        reducer = sparse(js.top_k(density), js.codec.bfloat16())
        up, _ = payload(reducer, 8)
        k = math.ceil(density * N)
        assert up < dense and up < 6 * k


@report("DGC#3", "singa#1140", "horovod#433")
@pytest.mark.parametrize("workers", [4, 8, 64])
def test_the_model_says_from_how_many_workers_on_dense_wins_over_all_gather(workers):
    """From density 1/N on, with hundreds of workers soon, at 8 bytes an entry.

    In words, as an index takes one as a value does: a ring moves 2 (N - 1)/N n, an
    all-gather 2 (N - 1) k.
    """
    n = 100_000
    dense = js.cost.dense(workers, n).link

    def gathered(density):
        pair = lambda k, n: 8 * k  # noqa: E731
        return js.cost.decentralised(workers, density * n, n, pair).link

    assert gathered(0.9 / workers) < dense < gathered(1.1 / workers)
    # Coded, it wins up to a higher density; and that is what the library sends.
    coded = js.cost.decentralised(workers, 1.1 / workers * n, n).link
    assert coded < gathered(1.1 / workers)


@report("powersgd#17", "horovod#1115", "horovod#578", "dstrbtd#75", "DeepSpeed#2305")
def test_the_model_says_at_which_rate_compression_stops_paying():
    """Selecting takes time: on a link fast enough dense averaging is done sooner."""
    n, k, workers, select = 1_000_000, 1000, 8, 0.005
    sparse, dense = js.cost.all_gather(workers, k, n), js.cost.dense(workers, n)
    rate = 8 * (dense.link - sparse.link) / select
    times = {
        factor: (
            js.cost.seconds(
                sparse, bits_per_second=factor * rate, select_seconds=select
            ),
            js.cost.seconds(dense, bits_per_second=factor * rate),
        )
        for factor in (0.5, 1, 2)
    }
    assert times[0.5][0] < times[0.5][1]
    assert times[1][0] == pytest.approx(times[1][1])
    assert times[2][0] > times[2][1]
