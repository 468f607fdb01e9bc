"""Every worker's message to every worker: simplest, and best for few workers.

Each worker sends its k entries as one message of m words; all receive all N messages
and add them up in the same order. Payload of one worker and step: ``4 m`` bytes up,
``4 m (N - 1)`` down. The cost grows with N but not with how little the selections
overlap.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from .. import codec as codec_lib
from ..base import Exchange, ExchangeMetrics, PyTree, Selected
from ..codec import Codec
from . import collectives
from .tally import Tally


def all_gather() -> Exchange:
    """Exchanges sparse messages by one ``all_gather`` of a flat uint32 array.

    >>> import jax, jaxsparse as js
    >>> reducer = js.sparse(js.top_k(0.5), js.all_gather(), axis_name="w")
    >>> step = lambda x: reducer.reduce(x, reducer.init(x))[0]
    >>> x = jnp.array([[4.0, 0.0, 0.0, 1.0], [0.0, 0.0, 2.0, 2.0]])
    >>> jax.jit(jax.vmap(step, axis_name="w", out_axes=None))(x)
    Array([2. , 0. , 1. , 1.5], dtype=float32)
    """

    def init(n: int, k: int, num_workers: int | None) -> PyTree:
        del n, k, num_workers
        return ()

    def send(
        x: Array, selected: Selected, state: PyTree, axis_name: str, codec: Codec
    ) -> tuple[Array, Array, PyTree, ExchangeMetrics]:
        n, k = x.shape[0], selected.indices.shape[0]
        workers = collectives.axis_size(axis_name)
        message, indices, sent = codec_lib.encode(
            x,
            selected.indices,
            codec,
            agreed=selected.agreed,
            header=selected.overflow.astype(jnp.uint32)[None],
        )
        known = indices if selected.agreed else None

        # One message after the other: decoding all at once would hold N of them.
        def add(carry, message):
            total, tally = carry
            header, at, values = codec_lib.decode(
                message, n, k, codec, indices=known, header=1
            )
            total = total.at[at].add(values / workers, mode="drop")
            return (total, tally.add(at, missed=header[0])), None

        messages = collectives.gather(message, axis_name)
        start = jnp.zeros(n, jnp.float32), Tally.start(n, workers)
        start = collectives.vary_like(start, messages)
        (mean, tally), _ = lax.scan(add, start, messages)
        left = x.at[indices].add(-sent, mode="drop")
        metrics = tally.metrics(workers, sent)
        return mean, left, state, metrics

    return Exchange(init, send)
