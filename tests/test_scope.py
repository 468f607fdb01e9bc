import jax.numpy as jnp
import numpy as np

import jaxsparse as js
from jaxsparse.scope import per_leaf


def test_every_leaf_has_its_budget_and_ranks_alternate():
    """Of leaves with 2 and 4 places, by rank over places: b a b b a b."""
    selection = per_leaf(js.top_k(0.5), (4, 8))
    x = jnp.array([1.0, 4, 3, 2, *range(8)])
    indices, overflow = selection.select(x, selection.init(12))
    assert selection.count(12) == 6 and overflow == 0
    assert indices.tolist() == [11, 1, 10, 9, 2, 8]


def test_places_left_empty_hold_n():
    selection = per_leaf(js.threshold(2.5, max_density=0.5), (4, 2, 0))
    indices, _ = selection.select(jnp.array([3.0, 0, 0, 5, 0, 1]), selection.init(6))
    assert sorted(indices.tolist()) == [0, 3, 6]


def test_the_first_places_are_shared_out_among_the_leaves():
    """So a server without room drops of every leaf, not all of the last ones."""
    selection = per_leaf(js.top_k(0.5), (8, 8, 32))
    indices, _ = selection.select(jnp.arange(48.0), selection.init(48))
    leaf = np.searchsorted([8, 16], indices[:12], side="right")
    assert np.bincount(leaf).tolist() == [2, 2, 8]  # a half of the places of each
