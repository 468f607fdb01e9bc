"""Law 12: two real processes over gloo give what vmap gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import contract_table as table
import jax
import numpy as np
import pytest
import two_processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    processes = [
        subprocess.Popen(
            [sys.executable, two_processes.__file__, coordinator, str(i), folder],
            env=environment,
            cwd=Path(two_processes.__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=400)
            assert process.returncode == 0, output.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder


def by_vmap(reducer, axes):
    return table.on_workers(reducer.reduce, (None, 0, axes), (0, axes))


@pytest.mark.parametrize("name", (*two_processes.ROWS, *two_processes.CHAINS))
def test_two_processes_give_what_vmap_gives(results, name):
    wanted = two_processes.run(name, by_vmap, lambda x: x, 2)
    chain = name in two_processes.CHAINS
    if chain:
        gates = [int(measured.gate) for (_, measured), _ in wanted]
        assert gates == [0, 0, 1, 0, 1, 1]
    tolerance = 0 if not chain and table.ROWS[name].exact else 1e-5
    for worker in range(2):
        found = np.load(results / f"{name}-{worker}.npz")
        # A process sees the means whole, and of what is left its own worker's row.
        leaves = [
            leaf
            for mean, left in wanted
            for leaf in [
                *jax.tree.leaves(mean),
                *(v[worker][None] for v in jax.tree.leaves(left)),
            ]
        ]
        for i, leaf in enumerate(leaves):
            np.testing.assert_allclose(
                found[str(i)], leaf, rtol=tolerance, atol=tolerance
            )
