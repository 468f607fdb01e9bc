"""Which worker owns which entry, where the server's role is shared by all workers.

Entry j lies in row ``s = j // N`` and belongs to worker ``(j + h(s)) mod N``: each row
of N neighbours goes to N different workers, turned by a hash of the row. A plain
``j mod N`` would put one output channel of a layer, often hot as a whole, on one
worker. The map is a bijection, and for one owner rising rows are rising entries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def rows(n: int, num_workers: int) -> int:
    """Rows of a vector of n entries: the length of every worker's shard."""
    return -(-n // num_workers)


def owner(indices: Array, num_workers: int) -> Array:
    """The worker that owns each entry, int32.

    >>> owner(jnp.arange(8), 4).tolist()
    [0, 1, 2, 3, 3, 0, 1, 2]
    """
    row = indices // num_workers
    return (indices % num_workers + _turn(row, num_workers)) % num_workers


def index(row: Array, worker: Array, num_workers: int) -> Array:
    """The entry in a row that belongs to a worker: the inverse of `owner`, int32.

    >>> index(jnp.array([0, 1]), jnp.array(2), 4).tolist()
    [2, 7]
    """
    return row * num_workers + (worker - _turn(row, num_workers)) % num_workers


def to_shards(x: Array, num_workers: int) -> Array:
    """A flat vector as the shards of all workers, ``[N, rows]``; zeros fill up."""
    size = rows(x.shape[0], num_workers)
    row = jnp.arange(size, dtype=jnp.int32)[None]
    worker = jnp.arange(num_workers, dtype=jnp.int32)[:, None]
    return x.at[index(row, worker, num_workers)].get(mode="fill", fill_value=0)


def from_shards(shards: Array, n: int) -> Array:
    """The inverse of `to_shards`.

    >>> from_shards(to_shards(jnp.arange(5), 2), 5).tolist()
    [0, 1, 2, 3, 4]
    """
    num_workers = shards.shape[0]
    j = jnp.arange(n, dtype=jnp.int32)
    return shards[owner(j, num_workers), j // num_workers]


def _turn(row: Array, num_workers: int) -> Array:
    """A hash of the row, in [0, N): Knuth's multiplicative one."""
    hashed = row.astype(jnp.uint32) * jnp.uint32(2654435761)
    return ((hashed >> 16) % jnp.uint32(num_workers)).astype(jnp.int32)
