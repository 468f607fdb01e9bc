"""Small runs of the training example, shared by its tests."""

import io
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from study.soak import saved as saved
from train import data, loop
from train.log import Log
from train.loop import Stopped as Stopped
from train.parallel import Workers

ROOT = Path(__file__).parents[1]

# A net of some hundred parameters, a few steps.
TINY = {
    "model.channels": (2,),
    "model.hidden": 4,
    "num_workers": 2,
    "batch_size": 4,
    "steps": 6,
    "eval_every": 3,
    "checkpoint_every": 100,
}


def config_of(methods, **overrides):
    path = ROOT / "configs" / "digits.py"
    config = runpy.run_path(str(path))["get_config"](methods)
    config.update_from_flattened_dict({**TINY, **overrides})
    return config


def splits_in(data_dir):
    return data.load("digits", data_dir=str(data_dir), source_dir="")


def run(config, folder, splits, *, stop_after=None):
    """One method's run; returns its summary and what it said."""
    [method] = config.run
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    summary = loop.run(
        config,
        method,
        folder=folder,
        splits=splits,
        workers=Workers(config.num_workers),
        log=Log(Console(file=text, width=200)),
        should_stop=lambda step: step == stop_after,
    )
    return summary, text.getvalue()


def assert_same_run(one, other, step):
    """Bit for bit the same state, and the same history."""
    a, b = saved(one, step), saved(other, step)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    histories = [(folder / "history.jsonl").read_text() for folder in (one, other)]
    assert histories[0] == histories[1]


def command(config, workdir, data_dir, *flags):
    """The command line of `config_of`'s config."""
    return [
        sys.executable,
        "-m",
        "train.main",
        f"--config={ROOT}/configs/digits.py:{','.join(config.run)}",
        f"--config.data.data_dir={data_dir}",
        f"--workdir={workdir}",
        *(f"--config.{key}={_value(config, key)}" for key in TINY),
        *flags,
    ]


def launch(arguments):
    """Starts a program whose output comes through one pipe."""
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_checkpoint(process, folder):
    """Waits until a running program has saved its first checkpoint."""
    for _ in range(900):
        if any(p.name.isdigit() for p in folder.glob("checkpoints/*")):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise TimeoutError(f"no checkpoint in {folder} after 90 seconds")


def _value(config, key):
    for part in key.split("."):
        config = config[part]
    return config
