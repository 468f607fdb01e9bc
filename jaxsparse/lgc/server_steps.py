"""The steps of the parameter-server form; see `server.py` for what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import codec as codec_lib
from ..arguments import entries
from ..codec import Codec
from ..exchange import collectives
from ..exchange.tally import Tally
from ..scaling import norm
from . import vectors
from .stages import LgcState, Settings
from .training import nmse, train

# Of worker j with the innovation (at, values): its part of the mean, as values on the
# support and as entries elsewhere.
Applied = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


class Leading(NamedTuple):
    """What all workers know of the leader's values."""

    support: Array  # shape=(k,), dtype=int32; in the code's order, n in empty places
    signs: Array  # shape=(k,), float32
    scale: Array  # shape=(), float32
    error: Array  # shape=(), float32; as the leader measured it
    payload: Array  # uint32 words: the latent or the plain values


def innovation_share(innovation: float | str, num_workers: int) -> float:
    """The share of k that a worker sends besides; see `lgc_server`.

    >>> [innovation_share("auto", workers) for workers in (2, 4, 8)]
    [0.1, 0.15, 0.275]
    """
    if innovation == "auto":
        return max(round(0.4 - 1 / num_workers, 9), 0.1)  # else 0.15 is a little more
    return float(innovation)


class ServerSteps(NamedTuple):
    """The steps of `lgc_server`, on flat vectors."""

    shared: Settings
    latent: Codec
    innovation: float | str
    innovation_codec: Codec
    replay: float

    def training(self, x: Array, own: Array, state: LgcState):
        """Everyone's own entries, all-gathered; the code learns from all of them."""
        shared, n, k = self.shared, x.shape[0], own.shape[0]
        workers = collectives.axis_size(shared.axis_name)
        message, at, sent = codec_lib.encode(x, own, shared.codec)

        def add(carry, message):
            total, tally = carry
            _, at, values = codec_lib.decode(message, n, k, shared.codec)
            total = total.at[at].add(values / workers, mode="drop")
            _, _, _, seen = self._arranged(at, values, n)
            return (total, tally.add(at, _none())), seen

        (mean, tally), seen = lax.scan(
            add,
            (jnp.zeros(n, jnp.float32), Tally.start(n, workers)),
            collectives.gather(message, shared.axis_name),
        )
        state = self._learn(state, seen, shared.leader(state))
        left = x.at[at].add(-sent, mode="drop")
        return mean, left, state._replace(metrics=tally.metrics(workers, sent))

    def compressed(self, x: Array, own: Array, state: LgcState):
        """The leader's latent, then everyone's innovation."""
        shared, k = self.shared, own.shape[0]
        support, signs, scale, seen = self._arranged(
            own, vectors.take(x, own), x.shape[0]
        )
        z = shared.encode(state, seen)
        payload = vectors.write(self.latent, z)
        decoded = vectors.read(self.latent, payload, z.shape[0])
        rec = shared.decode(state, decoded, k, self._helped(seen))
        header = vectors.to_words(scale, nmse(seen, rec))
        known = self._lead(header, support, signs, payload, x.shape[0], state)

        z = vectors.read(self.latent, known.payload, z.shape[0])
        quality = state.quality._replace(
            nmse=known.error,
            gate=jnp.ones_like(state.quality.gate),
            measured=state.quality.measured + 1,
        )
        state = state._replace(quality=quality)
        if not shared.code.innovation:
            rec = vectors.restored(shared.decode(state, z, k), known.scale, known.signs)
            return self._decoded_once(x, own, known, rec, state)
        return self._average(
            x,
            own[: self._places(k)],
            x,
            known,
            self._for_each(known, z, x, state),
            state,
        )

    def plain(self, x: Array, own: Array, state: LgcState):
        """The leader's plain values, on which the code is measured and trained."""
        shared, n, k = self.shared, x.shape[0], own.shape[0]
        support, values, signs = shared.order.arrange(own, vectors.take(x, own))
        header = vectors.to_words(*jnp.zeros(2))
        payload = vectors.write(shared.codec, values, support < n)
        known = self._lead(header, support, signs, payload, n, state)
        values = vectors.read(shared.codec, known.payload, k)
        values = jnp.where(known.support < n, values, 0)
        scale = vectors.rms(values, known.support < n)
        seen = vectors.normalised(values, scale, known.signs)
        state = self._learn(state, seen[None], jnp.zeros((), jnp.int32))
        return self._decoded_once(x, own, known, values, state.fell_back())

    def _arranged(self, at: Array, values: Array, n: int):
        """Support, signs, scale, and the values as the code sees them."""
        support, values, signs = self.shared.order.arrange(at, values)
        scale = vectors.rms(values, support < n)
        return support, signs, scale, vectors.normalised(values, scale, signs)

    def _places(self, k: int) -> int:
        """Entries of an innovation."""
        workers = collectives.axis_size(self.shared.axis_name)
        return entries(innovation_share(self.innovation, workers), k)

    def _helped(self, seen: Array) -> Array | None:
        """The innovation as the decoder takes it, of known values."""
        if not self.shared.code.innovation:
            return None
        return vectors.largest(seen, self._places(seen.shape[0]))

    def _learn(self, state: LgcState, seen: Array, leader: Array) -> LgcState:
        """Measures the code on the leader's vector, then trains it on all."""
        shared, k = self.shared, seen.shape[1]
        helped = jax.vmap(self._helped)(seen) if shared.code.innovation else None
        of_leader = None if helped is None else helped[leader]
        z = shared.encode(state, seen[leader])
        error = nmse(seen[leader], shared.decode(state, z, k, of_leader))
        params, optimizer = train(
            shared.code,
            shared.training,
            state.params,
            state.optimizer,
            seen,
            helped,
            "leader" if shared.code.innovation else "own",
            leader,
        )
        return state.learned(params, optimizer, error)

    def _lead(self, header, support, signs, payload, n: int, state) -> Leading:
        """The leader's message, on all workers."""
        shared, k = self.shared, support.shape[0]
        words = shared.order.write(support, signs, n)
        message = collectives.broadcast(
            jnp.concatenate([header, words, payload]),
            shared.leader(state),
            shared.axis_name,
        )
        scale, error = vectors.from_words(message[:2])
        split = 2 + words.shape[0]
        support, signs = shared.order.read(message[2:split], k, n)
        return Leading(support, signs, scale, error, message[split:])

    def _decoded_once(self, x, own, known: Leading, rec: Array, state: LgcState):
        """One reconstruction for all; the innovation mends what it does not give."""
        shared = self.shared
        leader = shared.leader(state)

        def applied(worker, at, values):
            weight = jnp.where(worker == leader, 1.0, self.replay).astype(rec.dtype)
            return weight * rec, at, values

        me = collectives.worker(shared.axis_name)
        rest = vectors.subtract_at(x, known.support, applied(me, own, x)[0])
        errors = jnp.abs(vectors.take(rest, own))
        mended = own[lax.top_k(errors, self._places(own.shape[0]))[1]]
        return self._average(rest, mended, x, known, applied, state)

    def _for_each(self, known: Leading, z: Array, x: Array, state) -> Applied:
        """One reconstruction for each worker, with the help of its innovation."""
        shared, k, n = self.shared, known.support.shape[0], x.shape[0]
        place = (
            jnp.full(n, k, jnp.int32)
            .at[known.support]
            .set(lax.iota(jnp.int32, k), mode="drop")
        )

        def applied(worker, at, values):
            del worker
            inside = place.at[at].get(mode="fill", fill_value=k)
            signs = known.signs.at[inside].get(mode="fill", fill_value=1)
            seen = vectors.normalised(values, known.scale, signs)
            helped = jnp.zeros(k, jnp.float32).at[inside].set(seen, mode="drop")
            rec = shared.decode(state, z, k, helped)
            rec = vectors.restored(rec, known.scale, known.signs)
            outside = inside == k
            return rec, jnp.where(outside, at, n), jnp.where(outside, values, 0)

        return applied

    def _average(self, source, chosen, x, known: Leading, applied: Applied, state):
        """Exchanges the innovations, entries of ``source``, and averages."""
        shared, n, m = self.shared, x.shape[0], chosen.shape[0]
        workers = collectives.axis_size(shared.axis_name)
        numbers = lax.iota(jnp.int32, workers)
        if m:
            message, at, sent = codec_lib.encode(source, chosen, self.innovation_codec)
            messages = collectives.gather(message, shared.axis_name)
        else:
            at, sent = chosen, jnp.zeros(0, jnp.float32)
            messages = jnp.zeros((workers, 0), jnp.uint32)

        def add(carry, of_worker):
            total, tally = carry
            worker, message = of_worker
            innovation = [chosen, sent]  # nothing
            if m:
                _, *innovation = codec_lib.decode(message, n, m, self.innovation_codec)
            rec, at, values = applied(worker, *innovation)
            total = vectors.add_at(total, known.support, rec / workers)
            total = vectors.add_at(total, at, values / workers)
            return (total, tally.add(innovation[0], _none())), None

        tally = Tally.start(n, workers).add(known.support, _none())
        (mean, tally), _ = lax.scan(
            add, (jnp.zeros(n, jnp.float32), tally), (numbers, messages)
        )
        rec, at, values = applied(collectives.worker(shared.axis_name), at, sent)
        left = vectors.subtract_at(x, known.support, rec)
        left = vectors.subtract_at(left, at, values)
        metrics = tally.metrics(workers, sent)
        metrics = metrics._replace(
            sent_norm=metrics.sent_norm.__class__(norm((rec, values)))
        )
        return mean, left, state._replace(metrics=metrics)


def _none() -> Array:
    """No entry that found no place."""
    return jnp.zeros((), jnp.uint32)
