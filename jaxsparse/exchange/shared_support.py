"""One support for all: a leader chooses the entries, all workers send theirs there.

The leader is worker ``t mod N`` at step t. Its indices go to all (one all-reduce in
which the others contribute zeros), then the values at them are averaged. The aggregate
has exactly k entries however many workers there are; the price is that the others'
largest entries may not be among them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .. import bits
from ..base import Exchange, ExchangeMetrics, PyTree, Selected
from ..codec import Codec
from . import collectives
from .tally import of_shared


class SharedSupportState(NamedTuple):
    """State of `shared_support`."""

    step: Array  # shape=(), dtype=uint32; whose turn it is to lead


def shared_support() -> Exchange:
    """Exchanges values at the leader's indices, the cyclic local top-k of ScaleCom.

    Payload of one worker and step: the coded indices and ``4 k`` bytes of values, up
    and down alike, whatever the number of workers. A selection that all workers agree
    on (`random_k`) needs no leader and sends no indices.

    Returns:
      An `Exchange`.

    Differences from the paper:
      Indices are coded by Elias-Fano. Values are rounded to the codec's precision
      before they are summed, but the sum travels as float32: it is an all-reduce.

    Example:
      >>> import jax, jaxsparse as js
      >>> reducer = js.sparse(js.top_k(0.5), js.shared_support(), axis_name="w")
      >>> step = lambda x: reducer.reduce(x, reducer.init(x))[0]
      >>> x = jnp.array([[4.0, 0.0, 0.0, 1.0], [6.0, 0.0, 8.0, 1.0]])
      >>> jax.jit(jax.vmap(step, axis_name="w", out_axes=None))(x)
      Array([5., 0., 0., 1.], dtype=float32)

    References:
      Chen, Ni, Lu, Cui, Chen, Sun, Wang, Venkataramani, Srinivasan, Zhang,
      Gopalakrishnan, "ScaleCom: Scalable Sparsified Gradient Compression for
      Communication-Efficient Distributed Training", 2020.
    """

    def init(n: int, k: int, num_workers: int | None) -> SharedSupportState:
        del n, k, num_workers
        return SharedSupportState(jnp.zeros((), jnp.uint32))

    def send(
        x: Array,
        selected: Selected,
        state: SharedSupportState,
        axis_name: str,
        codec: Codec,
    ) -> tuple[Array, Array, PyTree, ExchangeMetrics]:
        n, k = x.shape[0], selected.indices.shape[0]
        workers = collectives.axis_size(axis_name)
        support = jnp.sort(selected.indices)
        if not selected.agreed:
            leader = state.step % workers
            words = bits.encode_indices(support, n)
            words = collectives.broadcast(words, leader, axis_name)
            support = bits.decode_indices(words, k, n)
        values = x.at[support].get(mode="fill", fill_value=0)
        sent = codec.decode(*codec.encode(values, support < n))
        sent = jnp.where(support < n, sent, 0)
        averaged = collectives.mean(sent, axis_name)
        mean = jnp.zeros(n, jnp.float32).at[support].set(averaged, mode="drop")
        left = x.at[support].add(-sent, mode="drop")
        chosen = jnp.sum(support < n, dtype=jnp.int32)
        metrics = of_shared(chosen, workers, sent)
        return mean, left, SharedSupportState(state.step + jnp.uint32(1)), metrics

    return Exchange(init, send)
