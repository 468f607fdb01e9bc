"""Steps of the contract's rows, compiled once for all laws; what laws compare."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import contract_table as table
import jax
import numpy as np
from contract_table import ROWS, SHAPES, on_workers

import jaxsparse as js

WORKERS = 4


class Prepared(NamedTuple):
    """A row ready to run over some workers."""

    row: table.Row
    reducer: js.Reducer
    state: Any  # before the first step, local parts stacked
    step: Callable  # (x, state) -> mean, left, state
    traces: list  # grows by one whenever the step is traced


def prepared(name, workers=WORKERS, shapes=None, dtype="float32"):
    """The row for float trees of these shapes.

    Out axes None for the mean and the shared state prove that all workers agree.
    """
    shapes = SHAPES if shapes is None else shapes
    return _prepared(name, workers, tuple(shapes.items()), dtype)


@functools.cache
def _prepared(name, workers, shapes, dtype):
    row = ROWS[name]
    reducer = row.make(workers)
    zeros = {k: None if s is None else np.zeros(s, dtype) for k, s in shapes}
    return Prepared(row, reducer, *mapped(reducer, zeros, workers))


def mapped(reducer, zeros, workers=WORKERS):
    """The state, local parts stacked, the step over all workers, and its traces."""
    traces = []

    def counted(x, state):
        traces.append(1)
        return reducer.reduce(x, state)

    state, axes = table.stacked(reducer.init(zeros), workers)
    return state, on_workers(counted, (None, 0, axes), (0, axes)), traces


def leaves(tree):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]


def flat(tree):
    parts = [leaf.reshape(-1) for leaf in leaves(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)


def over_workers(tree):
    """The sum over the workers, in float64, as one flat vector."""
    return flat(jax.tree.map(lambda v: np.asarray(v, np.float64).sum(0), tree))


def conserved(x, mean, left, tolerance, let_go=0.0):
    """Law 2: the sum over workers of (updates - left) is N times the mean.

    ``let_go`` is what the servers held before, less what they hold now: in units of
    the mean, as one flat vector.
    """
    workers = jax.tree.leaves(x)[0].shape[0]
    np.testing.assert_allclose(
        over_workers(x) - over_workers(left) + workers * let_go,
        workers * flat(mean),
        rtol=0,
        atol=tolerance * workers * 8,
    )


def one_step(step, x, state):
    """The step's results, and what the servers have let go of in it."""
    mean, left, after = step(x, state)
    n = sum(leaf[0].size for leaf in leaves(x))
    let_go = table.held_by_servers(state, n) - table.held_by_servers(after, n)
    return mean, left, after, let_go
