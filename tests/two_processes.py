"""One of two real processes that average over gloo; run by test_processes.py.

Usage: python tests/two_processes.py COORDINATOR PROCESS_ID FOLDER
"""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import contract_table as table  # noqa: E402

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
    "lgc_server_autoencoder",
    "lgc_ring",
    "lgc_ring_stages",
    "phases",
)
STEPS = 3


def gradients():
    return [table.dyadic(seed, workers=2) for seed in range(STEPS)]


def run(name, mapped, pick, here):
    """Means and what is left over a few steps.

    ``mapped`` maps a reducer's step over the workers, given the axes of its state;
    ``pick`` gives a process its part of the gradients, for ``here`` workers.
    """
    reducer = table.ROWS[name].make(2)
    state = reducer.init(table.worker_zero(gradients()[0]))
    state, axes = table.stacked(state, here)
    step, found = mapped(reducer, axes), []
    for x in gradients():
        mean, left, state = step(pick(x), state)
        found.append((mean, left))
    return found


def by_pmap(reducer, axes):
    return jax.pmap(
        reducer.reduce, table.AXIS, in_axes=(0, axes), out_axes=(None, 0, axes)
    )


def main(coordinator, process, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, 2, int(process))

    def mine(x):
        return jax.tree.map(lambda v: v[int(process)][None], x)

    for name in ROWS:
        found = jax.tree.leaves(run(name, by_pmap, mine, 1))
        leaves = {str(i): np.asarray(v) for i, v in enumerate(found)}
        np.savez(Path(folder) / f"{name}-{process}.npz", **leaves)


if __name__ == "__main__":
    main(*sys.argv[1:])
