"""Laws of whole transformations (docs/design.md, section 3)."""

import contract_table as table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import WORKERS, conserved, leaves
from contract_table import AXIS, SHAPES, TRANSFORMATIONS, dyadic, on_workers

import jaxsparse as js

every_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)


@every_transformation
def test_delivered_plus_held_is_what_was_given(name):
    """Law 2 over many steps, for memories that forget nothing."""
    tx = TRANSFORMATIONS[name](WORKERS)
    rng = np.random.default_rng(12)
    grads = {
        k: jnp.asarray(rng.integers(-200, 200, (12, WORKERS, *s)) / 64, jnp.float32)
        for k, s in SHAPES.items()
    }
    zeros = jax.tree.map(lambda v: v[0, 0] * 0, grads)

    def run(grads):
        def body(carry, g):
            state, delivered = carry
            mean, state = tx.update(g, state, zeros, extra="passed on")
            return (state, jax.tree.map(jnp.add, delivered, mean)), None

        (state, delivered), _ = jax.lax.scan(body, (tx.init(zeros), zeros), grads)
        return delivered, state

    state_axes = js.state_axes(tx.init(zeros))
    delivered, state = on_workers(run, (None, state_axes), 1)(grads)
    held = [s for s in jax.tree.leaves(state, is_leaf=is_memory) if is_memory(s)]
    if name in ("error_feedback_decay", "dgc") or "momentum" in name:
        # These change the mass on purpose; what they do to it is in test_memory.py.
        assert all(np.all(np.isfinite(v)) for v in leaves((delivered, held)))
        return
    residual = jax.tree.map(lambda z: z[None], zeros)
    for memory in held:  # of a partition each one has its own leaves
        residual = jax.tree.map(
            lambda other, own: other if isinstance(own, optax.MaskedNode) else own,
            residual,
            memory.residual.value,
        )
    given = jax.tree.map(lambda g: g.sum(0), grads)
    held_back = -table.held_by_servers(state, table.size(SHAPES.values()))
    conserved(given, delivered, residual, 3e-5, held_back)


def is_memory(node):
    return type(node).__name__ in ("ErrorFeedbackState", "MomentumCorrectionState")


@every_transformation
def test_initial_buffers_are_distinct(name):
    """Aliased leaves abort under donation."""
    state = TRANSFORMATIONS[name](2).init(dyadic(13))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@every_transformation
def test_abstract_init(name):
    """``init`` and ``update`` agree on the state, without any array being made."""
    tx = TRANSFORMATIONS[name](2)
    abstract = jax.eval_shape(lambda: dyadic(14))
    state = jax.eval_shape(tx.init, abstract)
    stacked = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct((2, *v.shape), v.dtype), abstract
    )
    axes = js.state_axes(state)
    parts = jax.eval_shape(lambda s: table.stacked(s, 2)[0], state)
    update = jax.vmap(tx.update, (0, axes), (None, axes), axis_name=AXIS)
    _, after = jax.eval_shape(update, stacked, parts)
    describe = lambda t: jax.tree.map(lambda v: (v.shape, v.dtype), t)  # noqa: E731
    assert describe(after) == describe(parts)


@every_transformation
def test_bad_step_on_one_worker_is_skipped_by_all(name):
    """Law 13: parameters, moments and memories untouched, the counter goes up."""
    tx = js.skip_nonfinite(
        optax.chain(TRANSFORMATIONS[name](2), optax.adam(0.1)), axis_name=AXIS
    )
    good = dyadic(15, workers=2)
    zeros = jax.tree.map(lambda v: v[0] * 0, good)
    stacked = js.stack_workers(tx.init(zeros), 2)
    step = on_workers(tx.update)
    _, state = step(good, stacked)
    after = state
    for skipped, bad in enumerate([np.nan, -np.inf], 1):
        poisoned = {**good, "bias": good["bias"].at[1, 3].set(bad)}
        updates, after = step(poisoned, after)
        assert all(np.all(u == 0) for u in leaves(updates))
        for a, b in zip(leaves(state.inner), leaves(after.inner), strict=True):
            np.testing.assert_array_equal(a, b)
        assert after.skipped.tolist() == after.consecutive.tolist() == [skipped] * 2
    updates, after = step(good, after)
    assert after.skipped.tolist() == [2, 2] and after.consecutive.tolist() == [0, 0]
    assert any(np.any(u != 0) for u in leaves(updates))
