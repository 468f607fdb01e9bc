"""Counts of what the workers sent, kept while their messages are added up."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..base import ExchangeMetrics, WorkerLocal
from ..scaling import norm


class Tally(NamedTuple):
    """Who sent what: enough to know the union and how far the selections overlap."""

    hits: Array  # shape=(n,), unsigned; workers that have sent each entry so far
    union: Array  # shape=(), dtype=uint32; entries sent by any worker
    received: Array  # shape=(), dtype=uint32; entries, of all workers
    pairs: Array  # shape=(), dtype=uint32; pairs of workers that sent the same entry
    missed: Array  # shape=(), dtype=uint32; entries that found no place

    @classmethod
    def start(cls, n: int, num_workers: int) -> Tally:
        """Nothing counted yet."""
        dtype = jnp.uint8 if num_workers < 256 else jnp.uint32
        return cls(jnp.zeros(n, dtype), *(jnp.zeros((), jnp.uint32) for _ in range(4)))

    def add(self, indices: Array, missed: Array) -> Tally:
        """With one worker's entries; ``n`` in empty places."""
        n = self.hits.shape[0]
        valid = indices < n
        before = self.hits.at[indices].get(mode="fill", fill_value=0)
        return Tally(
            # Made from `before`, so that XLA need not copy `hits` to read it first.
            self.hits.at[indices].set(before + 1, mode="drop"),
            self.union + jnp.sum(valid & (before == 0), dtype=jnp.uint32),
            self.received + jnp.sum(valid, dtype=jnp.uint32),
            self.pairs + jnp.sum(before, dtype=jnp.uint32),
            self.missed + missed,
        )

    def counts(self) -> Array:
        """What goes into a message's header, uint32[4]."""
        return jnp.stack(self[1:])

    def metrics(
        self, num_workers: int, sent: Array, rung: Array | None = None
    ) -> ExchangeMetrics:
        """As metrics; ``sent`` are the values that this worker sent."""
        return from_counts(self.counts(), num_workers, sent, rung)


def of_shared(chosen: Array, num_workers: int, sent: Array) -> ExchangeMetrics:
    """Metrics where all workers send values at the same ``chosen`` entries (int32)."""
    return ExchangeMetrics(
        selected=chosen.astype(jnp.float32),
        aggregated=chosen,
        overlap=jnp.full((), num_workers, jnp.float32),
        common=chosen.astype(jnp.float32),
        overflow=jnp.zeros((), jnp.float32),
        rung=jnp.zeros((), jnp.int32),
        sent_norm=WorkerLocal(norm(sent)),
    )


def from_counts(
    counts: Array, num_workers: int, sent: Array, rung: Array | None = None
) -> ExchangeMetrics:
    """Metrics from the `Tally.counts` of all owners, summed."""
    union, received, pairs, missed = counts
    of_pairs = max(num_workers * (num_workers - 1) / 2, 1)
    return ExchangeMetrics(
        selected=received.astype(jnp.float32) / num_workers,
        aggregated=union.astype(jnp.int32),
        overlap=received.astype(jnp.float32)
        / jnp.maximum(union, 1).astype(jnp.float32),
        common=pairs.astype(jnp.float32) / of_pairs,
        overflow=missed.astype(jnp.float32) / num_workers,
        rung=jnp.zeros((), jnp.int32) if rung is None else rung,
        sent_norm=WorkerLocal(norm(sent)),
    )
