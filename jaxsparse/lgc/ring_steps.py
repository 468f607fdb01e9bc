"""The steps of the ring-allreduce form; see `ring.py` for what they compute."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..exchange import collectives
from ..exchange.fixed_point import fixed_point_mean, levels
from ..exchange.tally import of_shared
from . import order, vectors
from .stages import LgcState, Settings
from .training import nmse, train


class Agreed(NamedTuple):
    """What all workers agree on before they send values."""

    support: Array  # shape=(k,), dtype=int32; in the code's order, n in empty places
    signs: Array  # shape=(k,), float32
    scale: Array  # shape=(), float32


def latent_bits(bits: int | str, num_workers: int) -> int:
    """Bits of an entry: by default as few as leave every worker four levels.

    >>> [latent_bits("auto", workers) for workers in (2, 4, 8, 16)], latent_bits(32, 4)
    ([3, 4, 5, 6], 32)

    Raises:
      ValueError: so many workers' integers have no room in so few bits.
    """
    if bits == "auto":
        return next(b for b in range(32) if levels(b, num_workers) >= 4)
    if bits not in (*range(2, 17), 32) or levels(int(bits), num_workers) < 2:
        raise ValueError(
            f"`latent_bits={bits!r}` leaves {num_workers} workers no two levels each, "
            "or is not 2 to 16, 32 or 'auto'. Pass 'auto'."
        )
    return int(bits)


class RingSteps(NamedTuple):
    """The steps of `lgc_ring`, on flat vectors."""

    shared: Settings
    latent_bits: int | str

    def training(self, x: Array, own: Array, state: LgcState):
        """Everyone's values on the shared support; the code learns their mean."""
        shared, n = self.shared, x.shape[0]
        workers = collectives.axis_size(shared.axis_name)
        agreed = self._agree(x, own, state)
        k = agreed.support.shape[0]
        values = vectors.take(x, agreed.support)
        words = vectors.write(shared.codec, values, agreed.support < n)

        def read(words):
            values = vectors.read(shared.codec, words, k)
            return jnp.where(agreed.support < n, values, 0)

        def add(total, words):
            values = read(words)
            seen = vectors.normalised(values, agreed.scale, agreed.signs)
            return total + values / workers, seen

        averaged, seen = lax.scan(
            add,
            jnp.zeros(k, jnp.float32),
            collectives.gather(words, shared.axis_name),
        )
        state = self._learn(state, seen)
        return self._placed(x, agreed, averaged, read(words), state)

    def plain(self, x: Array, own: Array, state: LgcState):
        """The same in the compressed stage, where it counts as a fallback."""
        mean, left, state = self.training(x, own, state)
        return mean, left, state.fell_back()

    def compressed(self, x: Array, own: Array, state: LgcState):
        """Everyone's latent, averaged on the way."""
        shared = self.shared
        agreed = self._agree(x, own, state)
        k = agreed.support.shape[0]
        values = vectors.take(x, agreed.support)
        z = shared.encode(state, vectors.normalised(values, agreed.scale, agreed.signs))
        bits = latent_bits(self.latent_bits, collectives.axis_size(shared.axis_name))
        if bits == 32:
            averaged, sent = collectives.mean(z, shared.axis_name), z
        else:
            averaged, sent = fixed_point_mean(z, bits, shared.axis_name)
        averaged, sent = (
            vectors.restored(shared.decode(state, z, k), agreed.scale, agreed.signs)
            for z in (averaged, sent)
        )
        quality = state.quality._replace(gate=jnp.ones_like(state.quality.gate))
        state = state._replace(quality=quality)
        return self._placed(x, agreed, averaged, sent, state)

    def _agree(self, x: Array, own: Array, state: LgcState) -> Agreed:
        """The shared support, by one collective."""
        shared, n = self.shared, x.shape[0]
        workers = collectives.axis_size(shared.axis_name)
        support, values, signs = shared.order.arrange(own, vectors.take(x, own))
        scale = vectors.rms(values, support < n)
        words = shared.order.write(support, signs, n)
        message = jnp.concatenate([vectors.to_words(scale), words])

        def read(message):
            support, signs = shared.order.read(message[1:], own.shape[0], n)
            return Agreed(support, signs, vectors.from_words(message[:1])[0])

        if not shared.contributed:
            leader = shared.leader(state)
            return read(collectives.broadcast(message, leader, shared.axis_name))
        all_of_them = jax.vmap(read)(collectives.gather(message, shared.axis_name))
        support, signs = order.merge(all_of_them.support, all_of_them.signs, n)
        everyone = jnp.ones(workers, bool)
        return Agreed(support, signs, vectors.rms(all_of_them.scale, everyone))

    def _learn(self, state: LgcState, seen: Array) -> LgcState:
        """Measures the code on the mean of the vectors, then trains it."""
        shared, k = self.shared, seen.shape[1]
        z = jax.vmap(lambda x: shared.encode(state, x))(seen)
        error = nmse(seen.mean(0), shared.decode(state, z.mean(0), k))
        params, optimizer = train(
            shared.code,
            shared.training,
            state.params,
            state.optimizer,
            seen,
            None,
            "mean",
            jnp.zeros((), jnp.int32),
        )
        return state.learned(params, optimizer, error)

    def _placed(self, x, agreed: Agreed, averaged, sent, state: LgcState):
        """Mean and rest as vectors, and the metrics."""
        n = x.shape[0]
        workers = collectives.axis_size(self.shared.axis_name)
        mean = jnp.zeros(n, jnp.float32).at[agreed.support].set(averaged, mode="drop")
        left = vectors.subtract_at(x, agreed.support, sent)
        chosen = jnp.sum(agreed.support < n, dtype=jnp.int32)
        sent = jnp.where(agreed.support < n, sent, 0)
        metrics = of_shared(chosen, workers, sent)
        return mean, left, state._replace(metrics=metrics)
