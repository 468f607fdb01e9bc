"""One of two real processes that average over gloo; run by test_processes.py.

Usage: python tests/two_processes.py COORDINATOR PROCESS_ID FOLDER
"""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import contract_table as table  # noqa: E402

import jaxsparse as js  # noqa: E402

ROWS = (
    "dense",
    "top_k",
    "top_k_int8",
    "random_k",
    "server",
    "server_ladder",
    "shared_support",
    "g_top_k",
    "low_rank",
    "sign_mean",
    "phases",
)
# With their memories: through all stages, with a gate that closes and opens again.
CHAINS = ("lgc_server", "lgc_ring")
STEPS = 3


def gradients(name):
    steps = 2 * STEPS if name in CHAINS else STEPS
    return [table.dyadic(seed, workers=2) for seed in range(steps)]


def run(name, mapped, pick, here):
    """Means and what is left over a few steps; of a chain, what it measured as well.

    ``mapped`` maps a reducer's step over the workers, given the axes of its state;
    ``pick`` gives a process its part of the gradients, for ``here`` workers.
    """
    reducer = of_chain(name) if name in CHAINS else table.ROWS[name].make(2)
    xs = gradients(name)
    state = reducer.init(table.worker_zero(xs[0]))
    if name in CHAINS:
        state, axes = (state[0], js.stack_workers(state[1], here)), (None, 0)
    else:
        state, axes = table.stacked(state, here)
    step, found = mapped(reducer, axes), []
    for x in xs:
        mean, left, state = step(pick(x), state)
        found.append((mean, left))
    return found


def of_chain(name):
    """A transformation in the shape of a reducer: shared results, own ones, state.

    The state is parted, since pmap over processes takes no axes in dicts.
    """
    tx = table.TRANSFORMATIONS[name](2)

    def parted(state):
        local = jax.tree.map(
            lambda node: jax.tree.map(lambda _: table.is_local(node), node),
            state,
            is_leaf=table.is_local,
        )
        return js.split(state, local)

    def reduce(updates, state):
        mean, state = tx.update(updates, js.merge(*state))
        measured = js.metrics(state)
        own = measured.residual_norm, measured.captured
        shared = measured._replace(residual_norm=None, captured=None)
        return (mean, shared), own, parted(state)

    return js.Reducer(lambda params: parted(tx.init(params)), reduce)


def by_pmap(reducer, axes):
    return jax.pmap(
        reducer.reduce, table.AXIS, in_axes=(0, axes), out_axes=(None, 0, axes)
    )


def main(coordinator, process, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_disable_most_optimizations", True)  # many small programs
    jax.distributed.initialize(coordinator, 2, int(process))

    def mine(x):
        return jax.tree.map(lambda v: v[int(process)][None], x)

    for name in (*ROWS, *CHAINS):
        found = jax.tree.leaves(run(name, by_pmap, mine, 1))
        leaves = {str(i): np.asarray(v) for i, v in enumerate(found)}
        np.savez(Path(folder) / f"{name}-{process}.npz", **leaves)


if __name__ == "__main__":
    main(*sys.argv[1:])
