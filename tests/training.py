"""Small runs of the training example, shared by its tests."""

import io
import runpy
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console

from train import data, loop
from train.log import Log
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


def flags_of(config, *keys):
    """The command line that makes `config_of` of these keys."""
    flags = []
    for key in (*TINY, *keys):
        value = config
        for part in key.split("."):
            value = value[part]
        flags.append(f"--config.{key}={value}")
    return flags


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


def saved(folder, step):
    """The arrays of a checkpoint by name, read without the code under test."""
    path = folder / "checkpoints" / str(step) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path.absolute())
    return {name: np.asarray(array) for name, array in arrays.items()}


def assert_same_run(one, other, step):
    """Bit for bit the same state, and the same history."""
    a, b = saved(one, step), saved(other, step)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    histories = [(folder / "history.jsonl").read_text() for folder in (one, other)]
    assert histories[0] == histories[1]
