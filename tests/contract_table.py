"""The table of the contract: every reducer and what it promises. A new method is a row.

Formulas are written out here, from the methods' papers and the message layout, and not
taken from the library.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse as js
from jaxsparse.exchange.ownership import from_shards

AXIS = "workers"


class Row(NamedTuple):
    make: Callable[[int], js.Reducer]  # of the number of workers
    # (shapes, N) -> what one worker brings to collectives: (op, dtype, bytes)
    traffic: Callable[[list[tuple[int, ...]], int], list[tuple[str, str, int]]]
    limit: Callable[[int], js.Reducer] | None = None  # must equal dense
    limit_tolerance: float = 0.0  # relative to the largest entry
    exact: bool = True  # dyadic numbers are handled without rounding
    # (n, shapes) -> delta of ||left||^2 <= (1 - delta) ||x||^2
    contraction: Callable[[list[tuple[int, ...]]], float] | None = None
    unbiased: bool = False  # (n / k) mean over many steps converges to the input
    variant: bool = False  # of another row, by selection or codec alone
    worker_order: bool = True  # which worker is which does not matter
    power_of_two: bool = False  # other numbers of workers are refused


def size(shapes):
    return sum(math.prod(s) for s in shapes)


def ceil_words(bits):
    return -(-bits // 32)


def index_words(k, n):
    """Elias-Fano of k indices in [0, n], n being padding, or a bitmap if smaller."""
    if k == 0:
        return 0
    plain = ceil_words(n)
    low = int(math.log2(n / k)) if n > k else 0
    while (k << (low + 1)) <= n:
        low += 1
    while low and (k << low) > n:
        low -= 1
    return min(plain, ceil_words(k * low) + ceil_words(k + (n >> low)))


def message(shapes, density, bits, *, scales=lambda k: 0, leaf=False, agreed=False):
    """Bytes of one sparse message: a header word, indices, values, scales."""
    n = size(shapes)
    k = sum(count(density, math.prod(s)) for s in shapes) if leaf else count(density, n)
    indices = 0 if agreed else index_words(k, n)
    return 4 * (1 + indices + ceil_words(k * bits) + scales(k))


def gathered(*args, **kwargs):
    return lambda shapes, N: [
        ("all-gather", "uint32", message(shapes, *args, **kwargs))
    ]


def low_rank_traffic(rank):
    def traffic(shapes, N):
        first, second = 0, 0
        for shape in shapes:
            rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
            columns = shape[-1] if len(shape) > 1 else math.prod(shape)
            if rank * (rows + columns) < rows * columns:
                first += rank * rows
                second += rank * columns
            else:
                first += rows * columns
        return [("all-reduce", "float32", 4 * part) for part in (first, second) if part]

    return traffic


def sign_traffic(shapes, N):
    return [("all-gather", "uint32", 4 * (ceil_words(size(shapes)) + len(shapes)))]


def dense_traffic(shapes, N):
    return [("all-reduce", "float32", 4 * size(shapes))]


def server_traffic(density, bits, limit=None):
    """All-to-all of N parts, then an all-gather of the owners' messages.

    A header word in each part, four on the way down; a part has k / N places and one
    standard deviation.
    """

    def traffic(shapes, N):
        n = size(shapes)
        k = math.ceil(round(density * n, 9))
        rows = -(-n // N)
        share = k / N
        places = math.ceil(share + math.sqrt(share * (1 - 1 / N)))
        places = min(places, k, rows)
        most = min(rows, places * N)
        if limit is not None:
            most = min(most, math.ceil(limit * k / N))
        part = 1 + index_words(places, rows) + ceil_words(places * bits)
        down = 4 + index_words(most, rows) + ceil_words(most * bits)
        return [
            ("all-gather", "uint32", 4 * down),
            ("all-to-all", "uint32", 4 * N * part),
        ]

    return traffic


def shared_traffic(density):
    def traffic(shapes, N):
        n = size(shapes)
        k = math.ceil(round(density * n, 9))
        return [
            ("all-reduce", "float32", 4 * k),
            ("all-reduce", "uint32", 4 * index_words(k, n)),
        ]

    return traffic


def count(density, n):
    return min(n, math.ceil(round(density * n, 9)))


def lgc_server_traffic(density, innovation, latent_words, *, order=None, bits=32):
    """The leader's message, all-reduced, and the innovations, all-gathered.

    Two words of header, the support with its signs, the latent; entries as in any
    sparse message, without a header.
    """

    def traffic(shapes, N):
        n = size(shapes)
        k = count(density, n)
        m = count(innovation, k)
        support = index_words(k, n) + ceil_words(k)
        if order == "signed":
            support = ceil_words(k * n.bit_length())
        leader = 2 + support + latent_words(k)
        return [
            ("all-gather", "uint32", 4 * (index_words(m, n) + ceil_words(m * bits))),
            ("all-reduce", "uint32", 4 * leader),
        ]

    return traffic


def contribution(density, shapes, N):
    """Bytes that a worker says of its share of the support, and the size of all."""
    n = size(shapes)
    share = math.ceil(count(density, n) / N)
    return 4 * (1 + index_words(share, n) + ceil_words(share)), share * N


def lgc_ring_traffic(density, latent, bits):
    """Everyone's share of the support, the largest magnitude, the latents."""

    def traffic(shapes, N):
        said, k = contribution(density, shapes, N)
        return [
            ("all-gather", "uint32", said),
            ("all-reduce", "float32", 4),
            ("all-reduce", "uint32", 4 * ceil_words(latent(k) * bits)),
        ]

    return traffic


def lgc_training_traffic(density):
    """Everyone's share of the support, then everyone's float32 values there."""

    def traffic(shapes, N):
        said, k = contribution(density, shapes, N)
        return [("all-gather", "uint32", said), ("all-gather", "uint32", 4 * k)]

    return traffic


def small(**kwargs):
    """An autoencoder of two layers: a latent of 2 channels of about k / 4 entries."""
    return js.lgc.convolutional((4, 4), 2, **kwargs)


def small_latent(k):
    return 2 * max(math.ceil((k + 1) / 4) - 1, 1)  # m positions are 4 m + 3 entries


def lgc(form, **kwargs):
    """Latents from the first step on, and float32 values, unless said otherwise."""
    given = {"stages": (0, 0), "gate": math.inf, "codec": js.codec.float32()}
    return form(D, axis_name=AXIS, **(given | kwargs))


def layered(N, form):
    """Of a chain whose first layer stays dense and whose last gets top-k only.

    Dense, training, latents; the gate closes for a look at every third step.
    """
    dense, top_k = js.dense(axis_name=AXIS), sparse(js.top_k(D), workers=N)
    # Adam makes a step of its rate of a mere rounding error: a small rate keeps the
    # programs of different mappers comparable.
    training = js.lgc.Training(1e-6)
    stages = {"num_workers": N, "stages": (1, 2), "gate": 2.0, "recheck": 3}
    stages["training"] = training
    if form == "server":
        encoded = lgc(js.lgc_server, code=js.lgc.linear(4, 2), **stages)
    else:
        encoded = lgc(js.lgc_ring, code=small(slope=1.0), latent_bits=32, **stages)
    return {
        "dense": js.stateless(dense),
        "top_k": js.error_feedback(js.phases([(1, dense), (2, top_k), (None, top_k)])),
        "encoded": js.error_feedback(encoded),
    }


def sparse(selection, codec=None, scope="global", exchange=None, workers=None):
    return js.sparse(
        selection,
        js.all_gather() if exchange is None else exchange,
        axis_name=AXIS,
        num_workers=workers,
        codec=js.codec.float32() if codec is None else codec,
        scope=scope,
    )


def top_k_contraction(density):
    return lambda shapes: math.ceil(round(density * size(shapes), 9)) / size(shapes)


D = 0.1
ROWS = {
    "dense": Row(
        lambda N: js.dense(axis_name=AXIS),
        dense_traffic,
        limit=lambda N: js.dense(axis_name=AXIS),
        contraction=lambda shapes: 1.0,
    ),
    "top_k": Row(
        lambda N: sparse(js.top_k(D)),
        gathered(D, 32),
        limit=lambda N: sparse(js.top_k(1.0)),
        contraction=top_k_contraction(D),
    ),
    "top_k_leaf": Row(
        lambda N: sparse(js.top_k(D), scope="leaf"),
        gathered(D, 32, leaf=True),
        limit=lambda N: sparse(js.top_k(1.0), scope="leaf"),
        contraction=lambda shapes: D,
        variant=True,
    ),
    "top_k_bfloat16": Row(
        lambda N: sparse(js.top_k(D), js.codec.bfloat16()),
        gathered(D, 16),
        variant=True,
    ),
    "top_k_float16": Row(
        lambda N: sparse(js.top_k(D), js.codec.float16()),
        gathered(D, 16),
        variant=True,
    ),
    "top_k_int8": Row(
        lambda N: sparse(js.top_k(D), js.codec.int8(block=4)),
        gathered(D, 8, scales=lambda k: -(-k // 4)),
        exact=False,
        variant=True,
    ),
    "top_k_sign": Row(
        lambda N: sparse(js.top_k(D), js.codec.sign_mean()),
        gathered(D, 1, scales=lambda k: 1),
        exact=False,
        variant=True,
    ),
    "sampled_top_k": Row(
        lambda N: sparse(js.sampled_top_k(D, sample=0.3)),
        gathered(D, 32),
        limit=lambda N: sparse(js.sampled_top_k(1.0)),
        variant=True,
    ),
    "threshold": Row(
        lambda N: sparse(js.threshold(1.0, max_density=D)),
        gathered(D, 32),
        limit=lambda N: sparse(js.threshold(0.0, max_density=1.0)),
        variant=True,
    ),
    "random_k": Row(
        lambda N: sparse(js.random_k(D, seed=3)),
        gathered(D, 32, agreed=True),
        limit=lambda N: sparse(js.random_k(1.0)),
        unbiased=True,
    ),
    "random_block": Row(
        lambda N: sparse(js.random_block(D, seed=3), scope="leaf"),
        gathered(D, 32, agreed=True, leaf=True),
        limit=lambda N: sparse(js.random_block(1.0)),
        variant=True,
    ),
    "server": Row(
        lambda N: sparse(js.top_k(D), exchange=js.server(ladder=False), workers=N),
        server_traffic(D, 32),
        limit=lambda N: sparse(js.top_k(1.0), exchange=js.server(), workers=N),
    ),
    "server_ladder": Row(
        lambda N: sparse(js.top_k(D), exchange=js.server(), workers=N),
        None,  # see test_server.py: its bytes follow the union
    ),
    "server_limit": Row(
        lambda N: sparse(
            js.top_k(D), exchange=js.server(limit=1.5, ladder=False), workers=N
        ),
        server_traffic(D, 32, limit=1.5),
    ),
    "server_bfloat16": Row(
        lambda N: sparse(
            js.top_k(D),
            js.codec.bfloat16(),
            exchange=js.server(ladder=False),
            workers=N,
        ),
        server_traffic(D, 16),
        variant=True,
    ),
    "server_random_k": Row(
        lambda N: sparse(
            js.random_k(D), exchange=js.server(slack=9.0, ladder=False), workers=N
        ),
        None,
        limit=lambda N: sparse(
            js.random_k(1.0), exchange=js.server(slack=9.0, ladder=False), workers=N
        ),
        variant=True,
    ),
    "shared_support": Row(
        lambda N: sparse(js.top_k(D), exchange=js.shared_support()),
        shared_traffic(D),
        limit=lambda N: sparse(js.top_k(1.0), exchange=js.shared_support()),
        worker_order=False,
    ),
    "shared_random_k": Row(
        lambda N: sparse(js.random_k(D), exchange=js.shared_support()),
        lambda shapes, N: shared_traffic(D)(shapes, N)[:1],
        limit=lambda N: sparse(js.random_k(1.0), exchange=js.shared_support()),
        unbiased=True,
        variant=True,
    ),
    "g_top_k": Row(
        lambda N: sparse(js.top_k(D), exchange=js.g_top_k()),
        gathered(D, 32),  # for two workers; see test_g_top_k.py
        limit=lambda N: sparse(js.top_k(1.0), exchange=js.g_top_k()),
        worker_order=False,  # of a tree of merges
        power_of_two=True,
    ),
    "frequency": Row(
        lambda N: sparse(js.top_k(D, js.frequency(2, weight=3.0))),
        gathered(D, 32),
        limit=lambda N: sparse(js.top_k(1.0, js.frequency())),
        contraction=lambda shapes: top_k_contraction(D)(shapes) / (1 + 3.0) ** 2,
        variant=True,
    ),
    "ema_local": Row(
        lambda N: sparse(js.top_k(D, js.ema(0.5, 3.0, local=True)), scope="leaf"),
        gathered(D, 32, leaf=True),
        limit=lambda N: sparse(js.top_k(1.0, js.ema(local=True)), scope="leaf"),
        contraction=lambda shapes: D / (1 + 3.0) ** 2,
        variant=True,
    ),
    "penalty_exploration": Row(
        lambda N: sparse(js.top_k(D, js.penalty(factor=0.5), exploration=0.3)),
        gathered(D, 32),
        limit=lambda N: sparse(js.top_k(1.0, js.penalty(factor=0.0))),
        contraction=lambda shapes: top_k_contraction(D)(shapes) * 0.5**2,
        variant=True,
    ),
    "server_ema": Row(
        lambda N: sparse(
            js.top_k(D, js.ema(0.5, 3.0)), exchange=js.server(ladder=False), workers=N
        ),
        server_traffic(D, 32),
        limit=lambda N: sparse(
            js.top_k(1.0, js.ema()), exchange=js.server(), workers=N
        ),
        contraction=lambda shapes: top_k_contraction(D)(shapes) / (1 + 3.0) ** 2,
        variant=True,
    ),
    "low_rank": Row(
        lambda N: js.low_rank(1, axis_name=AXIS),
        low_rank_traffic(1),
        limit=lambda N: js.low_rank(64, axis_name=AXIS),
        limit_tolerance=1e-5,
        exact=False,
    ),
    "sign_mean": Row(
        lambda N: js.sign_mean(axis_name=AXIS),
        sign_traffic,
        exact=False,
        contraction=lambda shapes: 0.0,
    ),
    "lgc_server": Row(
        lambda N: lgc(
            js.lgc_server,
            code=js.lgc.identity(),
            latent=js.codec.float32(),
            innovation=0.5,
            innovation_codec=js.codec.float32(),
        ),
        lgc_server_traffic(D, 0.5, lambda k: k),
        limit=lambda N: js.lgc_server(
            1.0,
            axis_name=AXIS,
            stages=(0, 0),
            gate=math.inf,
            code=js.lgc.identity(),
            innovation=1.0,
            innovation_codec=js.codec.float32(),
        ),
        limit_tolerance=1e-6,
        exact=False,
        contraction=top_k_contraction(D),  # of a single worker
        worker_order=False,
    ),
    "lgc_server_autoencoder": Row(
        lambda N: lgc(
            js.lgc_server,
            code=small(),
            innovation=0.2,
            innovation_codec=js.codec.bfloat16(),
        ),
        # int8: four entries to a word, and a scale
        lgc_server_traffic(D, 0.2, lambda k: -(-small_latent(k) // 4) + 1, bits=16),
        exact=False,
        worker_order=False,
        variant=True,
    ),
    "lgc_server_innovation_inside": Row(
        lambda N: lgc(
            js.lgc_server, preset="paper", code=small(innovation=True), innovation=0.3
        ),
        lgc_server_traffic(D, 0.3, small_latent, order="signed"),
        exact=False,
        worker_order=False,
        variant=True,
    ),
    "lgc_server_leader_only": Row(
        lambda N: lgc(js.lgc_server, code=js.lgc.mean(), innovation=0.0, replay=0.0),
        lambda shapes, N: lgc_server_traffic(D, 0.0, lambda k: 2)(shapes, N)[1:],
        exact=False,
        worker_order=False,
        variant=True,
    ),
    "lgc_ring": Row(
        lambda N: lgc(js.lgc_ring, code=small(slope=1.0), latent_bits=16),
        lgc_ring_traffic(D, small_latent, 16),
        limit=lambda N: js.lgc_ring(
            1.0,
            axis_name=AXIS,
            stages=(0, 0),
            gate=math.inf,
            support="leader",
            code=js.lgc.identity(),
            latent_bits=32,
        ),
        limit_tolerance=1e-6,
        exact=False,
    ),
    "lgc_ring_stages": Row(  # training, plain values for want of quality, latents
        lambda N: lgc(js.lgc_ring, code=js.lgc.linear(4, 2), stages=(0, 1), gate=0.9),
        lgc_training_traffic(D),
        exact=False,
        variant=True,
    ),
    "phases": Row(
        lambda N: js.phases(
            [(1, js.dense(axis_name=AXIS)), (None, sparse(js.top_k(D)))]
        ),
        dense_traffic,  # of the first phase
        limit=lambda N: js.phases(
            [(1, js.dense(axis_name=AXIS)), (None, sparse(js.top_k(1.0)))]
        ),
        contraction=top_k_contraction(D),
    ),
}

TRANSFORMATIONS = {
    "error_feedback": lambda N: js.error_feedback(sparse(js.top_k(D))),
    "error_feedback_decay": lambda N: js.error_feedback(sparse(js.top_k(D)), 0.9),
    "error_feedback_int8": lambda N: js.error_feedback(
        sparse(js.top_k(D), js.codec.int8())
    ),
    "momentum_correction": lambda N: js.momentum_correction(sparse(js.top_k(D)), 0.9),
    "momentum_nesterov": lambda N: js.momentum_correction(
        sparse(js.top_k(D)), 0.9, nesterov=True
    ),
    "stateless_dense": lambda N: js.stateless(js.dense(axis_name=AXIS)),
    "dgc": lambda N: js.dgc(
        D,
        axis_name=AXIS,
        clip_norm=4.0,
        warmup_steps=2,
        warmup_densities=(0.5, 0.25),
        scope="global",
    ),
    "power_sgd": lambda N: js.power_sgd(1, axis_name=AXIS),
    "ef_sign_sgd": lambda N: js.ef_sign_sgd(axis_name=AXIS),
    "random_k": lambda N: js.error_feedback(sparse(js.random_k(D))),
    "server": lambda N: js.error_feedback(
        sparse(js.top_k(D), exchange=js.server(), workers=N)
    ),
    "server_limit": lambda N: js.error_feedback(
        sparse(js.top_k(D), exchange=js.server(limit=1.5, ladder=False), workers=N)
    ),
    "server_momentum": lambda N: js.momentum_correction(
        sparse(
            js.top_k(D, js.ema(local=True)),
            exchange=js.server(ladder=False),
            workers=N,
        ),
        0.9,
    ),
    "shared_support": lambda N: js.error_feedback(
        sparse(js.top_k(D), exchange=js.shared_support())
    ),
    "lgc_server": lambda N: optax.partition(
        layered(N, "server"), js.lgc.layers(dense=["scale"], top_k=["bias"])
    ),
    "lgc_ring": lambda N: layered(N, "ring")["encoded"],
}

SHAPES = {"bias": (7,), "kernel": (5, 11), "scale": ()}


def dyadic(seed, shapes=None, workers=None, dtype=jnp.float32):
    """A tree of multiples of 1/64: sums of a few are exact in float32."""
    rng = np.random.default_rng(seed)
    lead = () if workers is None else (workers,)
    draw = lambda s: rng.integers(-300, 300, (*lead, *s)) / 64  # noqa: E731
    return {
        name: jnp.asarray(draw(shape), dtype)
        for name, shape in (SHAPES if shapes is None else shapes).items()
    }


def on_workers(f, out_axes=0, in_axes=0):
    """The function on every worker by vmap, jitted; ``out_axes`` None is a proof."""
    return jax.jit(jax.vmap(f, in_axes, out_axes, axis_name=AXIS))


def is_local(node):
    return isinstance(node, js.WorkerLocal)


def stacked(state, workers):
    """The state with its local parts on a worker axis, and the axes that say so."""
    parts = jax.tree.map(
        lambda node: js.stack_workers(node, workers) if is_local(node) else node,
        state,
        is_leaf=is_local,
    )
    return parts, js.state_axes(state)


def held_by_servers(state, n):
    """What the shards of all servers hold back, as one vector in units of the mean."""
    shards = [
        node.value
        for node in jax.tree.leaves(state, is_leaf=lambda v: hasattr(v, "reshard"))
        if getattr(node, "reshard", None) == "shard"
    ]
    return sum((np.asarray(from_shards(shard, n), np.float64) for shard in shards), 0.0)


def worker_zero(tree):
    return jax.tree.map(lambda x: x[0], tree)
