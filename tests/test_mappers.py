"""Law 10: pmap, shard_map in both modes and vmap give the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, TRANSFORMATIONS, dyadic
from jax.sharding import AxisType, PartitionSpec

import jaxsparse as js

WORKERS = 4
STEPS = 6
# Of learned compression: its stages, and a gate that closes for a look and opens again.
STAGES = {"phase": [0, 1, 2, 2, 2, 2], "gate": [0, 0, 1, 0, 1, 1]}


def training(name):
    """A few steps of a chain, as one worker runs them; its state is split in two.

    Besides the state it returns what every step measured and all workers agree on.
    """
    tx = optax.chain(TRANSFORMATIONS[name](WORKERS), optax.sgd(0.5, momentum=0.5))
    params = jax.tree.map(jnp.zeros_like, dyadic(0))

    def step(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    local = js.local_leaves(step, state, dyadic(0), axis_name=AXIS, num_workers=WORKERS)
    shared, own = js.split(state, local)

    def run(shared, own, grads):
        def body(carry, g):
            state = step(js.merge(*carry), g)
            measured = js.metrics(state[1])
            measured = measured._replace(residual_norm=None, captured=None)
            return js.split(state, local), measured

        (shared, own), measured = jax.lax.scan(body, (shared, own), grads)
        return shared, own, measured

    return run, shared, js.stack_workers(own, WORKERS)


def steps_of_gradients():
    return {
        k: jnp.stack([dyadic(seed, workers=WORKERS)[k] for seed in range(STEPS)], 1)
        for k in dyadic(0)
    }


def by_vmap(run):
    return jax.jit(jax.vmap(run, (None, 0, 0), (None, 0, None), axis_name=AXIS))


def by_pmap(run):
    return jax.pmap(
        run,
        axis_name=AXIS,
        in_axes=(None, 0, 0),
        out_axes=(None, 0, None),
        donate_argnums=1,
        devices=jax.devices()[:WORKERS],
    )


def by_shard_map(run, check_vma):
    mesh = jax.make_mesh(
        (WORKERS,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:WORKERS]
    )
    everyone, mine = PartitionSpec(), PartitionSpec(AXIS)

    def body(shared, own, grads):
        own, grads = jax.tree.map(lambda v: v[0], (own, grads))
        shared, own, measured = run(shared, own, grads)
        return shared, jax.tree.map(lambda v: v[None], own), measured

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(everyone, mine, mine),
            out_specs=(everyone, mine, everyone),
            check_vma=check_vma,
        ),
        donate_argnums=1,
    )


# Nothing in these is rounded, so that the bits must agree.
EXACT = (
    "error_feedback",
    "stateless_dense",
    "random_k",
    "server",
    "server_limit",
    "shared_support",
)
MAPPERS = {
    "pmap": by_pmap,
    "shard_map": lambda run: by_shard_map(run, check_vma=False),
    "shard_map_checked": lambda run: by_shard_map(run, check_vma=True),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_mappers_agree(name):
    run, shared, own = training(name)
    grads = steps_of_gradients()
    wanted = by_vmap(run)(shared, jax.tree.map(jnp.copy, own), grads)
    exact = name in EXACT
    if name.startswith("lgc"):
        found = {field: getattr(wanted[2], field).tolist() for field in STAGES}
        assert found == STAGES
    for mapper, build in MAPPERS.items():
        found = build(run)(shared, jax.tree.map(jnp.copy, own), grads)
        leaves = jax.tree_util.tree_leaves_with_path(wanted)
        for (path, a), b in zip(leaves, jax.tree.leaves(found), strict=True):
            # Products are not dyadic; a norm is a root of a sum in any order.
            rounded = not exact or "norm" in jax.tree_util.keystr(path)
            tolerance = 1e-5 if rounded else 0
            np.testing.assert_allclose(
                a, b, rtol=tolerance, atol=tolerance, err_msg=mapper
            )
