"""The studies of faults and of replicas: what they find, and that they find it."""

import argparse
import subprocess
import sys

import jax
import numpy as np
import pytest
import training
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from study import faulty, replicas, soak


def test_a_copy_that_differs_is_named():
    devices = jax.devices()[:2]
    sharding = NamedSharding(Mesh(np.array(devices), ("workers",)), PartitionSpec())

    def copies(*values):
        parts = [
            jax.device_put(np.float32(v), d)
            for v, d in zip(values, devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays((), sharding, parts)

    same, nan = copies(1.0, 1.0), copies(np.nan, np.nan)
    assert replicas.differing({"same": same, "nan": nan}) == []
    state = {"same": same, "zeros": copies(0.0, -0.0), "other": copies(1.0, 2.0)}
    assert replicas.differing(state) == ["other", "zeros"]


def test_bad_examples_are_two_and_of_the_training_split(tmp_path):
    splits = training.splits_in(tmp_path)
    bad = faulty.poisoned(splits)
    kinds = [bad["train"].images[number] for number in faulty.BAD]
    assert np.isnan(kinds[0]).sum() == np.isinf(kinds[1]).sum() == 1
    finite = np.isfinite(bad["train"].images).all((1, 2, 3))
    assert np.flatnonzero(~finite).tolist() == sorted(faulty.BAD)
    assert bad["test"] is splits["test"]


def test_a_run_that_goes_no_further_is_told_from_one_that_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "PATIENCE", 0.2)
    arguments = argparse.Namespace(
        method="topk", workdir=tmp_path, workers=2, steps=10, seed=0, faults=1
    )
    run = soak.Training(arguments, tmp_path / "run")
    run.process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(99)"]
    )
    with pytest.raises(RuntimeError, match="It hangs: no step after 0"):
        run.end()
    run.process.wait()
    run.process = subprocess.Popen(["sh", "-c", "exit 3"])
    assert not run.wait(lambda: False)
    assert run.end() == 3


@pytest.mark.slow
def test_a_short_soak_ends_with_the_same_bits(tmp_path):
    command = [sys.executable, "-m", "study", "soak", "--quick"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"], cwd=training.ROOT, capture_output=True
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "are the same bits" in (tmp_path / "table.md").read_text()
