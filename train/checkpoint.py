"""Checkpoints: what is shared once, what is local with its worker axis.

Orbax writes a checkpoint into a temporary folder and renames it when it is whole, so an
interrupt at any time leaves the one before. A checkpoint also holds who it is of: the
method, the workers, the shapes of the parameters, the config. Of these the number of
workers may change while a run is not finished, with or without the batch of each.

A checkpoint that a disk has damaged is put aside, and the run goes on from the one
before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

import jaxsparse as js
from train.errors import RunError, SetupError
from train.parallel import Workers

# These may change between a run's parts: they don't change its figures.
FREE_KEYS = {
    "check_replicas_every",
    "checkpoint_every",
    "checkpoints_kept",
    "data.data_dir",
    "data.source_dir",
    "lost_after_s",
    "max_consecutive_skips",
    "run",
}

# What differs where a run goes on with another number of workers.
OF_WORKERS = {"workers", "config.num_workers"}
BATCH = "config.batch_size"

NONE_READABLE = -1


class Parts(NamedTuple):
    """A state as `jaxsparse.split` parts it; gives the leaves their names on disk."""

    shared: Any
    local: Any


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        identity: dict,
        *,
        keep: int,
        say: Callable[[str], None],
    ):
        """Opens a run's checkpoints, and refuses those of another run.

        Args:
          folder: of the run.
          workers: how local state is spread.
          identity: from `identity`.
          keep: how many checkpoints to keep.
          say: told of a checkpoint that cannot be read and is put aside.
        """
        # Process 0 looks and the others hear: all must go on from the same step.
        found = _newest_readable(folder, say) if jax.process_index() == 0 else 0
        if workers.from_first(found) == NONE_READABLE:
            raise SetupError(
                f"No checkpoint in {folder / 'checkpoints'} can be read. Use --fresh "
                "to start over there, or another folder with --workdir."
            )
        self._workers, self._identity = workers, identity
        self._manager = ocp.CheckpointManager(
            (folder / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                # A donated buffer must not be written while the next step reuses it.
                enable_async_checkpointing=False,
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "run": ocp.JsonCheckpointHandler(),
            },
        )
        self.latest_step = self._manager.latest_step()
        # The identity's parts that were others there: the number of workers, if any.
        self.changed: dict[str, Any] = {}
        if self.latest_step is not None:
            theirs = self._record()["identity"]
            self.changed = {
                key: theirs.get(key, "none")
                for key in {**theirs, **identity}
                if theirs.get(key) != identity.get(key)
            }
            finished = self.latest_step >= theirs.get("config.steps", 0)
            if self.changed and (finished or not _may_change(theirs, identity)):
                _refuse(self.changed, identity, folder)

    def save(self, step: int, shared: Any, local: Any, progress: dict) -> None:
        """Writes a checkpoint, unless there is one of this step.

        Args:
          step: steps taken.
          shared: state that is the same on every worker.
          local: state with a worker axis.
          progress: what else a resumed run needs, as JSON.
        """
        if step == self.latest_step:
            return
        shared, local = self._workers.to_global(shared, local)
        record = {"identity": self._identity, "progress": progress}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_path(shared, local)),
            run=ocp.args.JsonSave(record),
        )
        try:
            self._manager.save(step, args=args)
        except (OSError, ValueError) as error:  # tensorstore has no other for a disk
            raise RunError(
                f"the checkpoint of step {step} could not be written: "
                f"{_brief(error)}. Make room on the disk; the same command goes on "
                "from the one before."
            ) from error
        self.latest_step = step

    def restore(self, shared: Any, local: Any) -> tuple[Any, Any, dict]:
        """Reads the latest checkpoint, for our number of workers.

        Args:
          shared: like the result's first part: a fresh state's.
          local: like the second.

        Returns:
          ``(shared, local, progress)``.
        """
        kept = self._manager.item_metadata(self.latest_step)["state"]
        by_path = _by_path(shared, local)
        if kept.keys() != by_path.keys():
            raise SetupError(
                "The checkpoint was written by another version of the program: "
                f"{', '.join(sorted(kept.keys() ^ by_path.keys())[:3])} are not in "
                "both. Use --fresh to start over."
            )
        if self.changed:
            # As wholes on the host: these shapes are not those of our workers.
            wanted = {name: np.zeros(x.shape, x.dtype) for name, x in kept.items()}
        else:
            wanted = _by_path(*self._workers.abstract(shared, local))
        found = self._manager.restore(
            self.latest_step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)),
        )["state"]
        treedef = jax.tree.structure(Parts(shared, local))
        parts = jax.tree.unflatten(treedef, [found[path] for path in by_path])
        if self.changed:
            local = js.reshard(parts.local, self._workers.num_workers, local=True)
            restored = self._workers.from_host(parts.shared, local)
        else:
            restored = self._workers.to_local(*parts)
        return *restored, self._record()["progress"]

    def close(self) -> None:
        """Waits for what is still being written."""
        self._manager.close()

    def _record(self) -> dict:
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        return self._manager.restore(self.latest_step, args=args)["run"]


def identity(config: Any, method: str, params: Any) -> dict[str, Any]:
    """What makes a run this run and no other, as flat JSON."""
    settings = config.to_dict()
    settings["method"] = settings.pop("methods")[method]
    return {
        "method": method,
        "workers": config.num_workers,
        **{
            f"parameter {jax.tree_util.keystr(path, simple=True, separator='/')}": (
                f"{x.dtype}{list(x.shape)}"
            )
            for path, x in jax.tree_util.tree_leaves_with_path(params)
        },
        **{f"config.{k}": v for k, v in flat(settings) if k not in FREE_KEYS},
    }


def remove(folder: Path) -> None:
    """Removes what a run has written, and nothing else."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("history.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)


def _newest_readable(folder: Path, say: Callable[[str], None]) -> int:
    """Puts aside what is newer than the newest checkpoint that can be read.

    Called by one process alone.

    Returns:
      The step of that checkpoint; 0 if there is none at all, `NONE_READABLE` if there
      are some and none can be read. These are left where they are.
    """
    found = [p for p in (folder / "checkpoints").glob("*") if p.name.isdigit()]
    damaged: list[Path] = []
    for path in sorted(found, key=lambda p: int(p.name), reverse=True):
        problem = _problem(path)
        if problem is None:
            # Orbax saves nothing at a step that it finds a folder of.
            for other in damaged:
                aside = other.with_name(f"{other.name}.unreadable")
                shutil.rmtree(aside, ignore_errors=True)
                other.rename(aside)
            return int(path.name)
        say(f"{path} cannot be read: {problem}")
        damaged.append(path)
    return NONE_READABLE if damaged else 0


def _problem(path: Path) -> str | None:
    """Why a checkpoint cannot be read; None if it can."""
    try:
        record = json.loads((path / "run" / "metadata").read_text())
        _ = record["identity"].items(), record["progress"].items()
        state = (path / "state").absolute()
        wanted = len(json.loads((state / "_METADATA").read_text())["tree_metadata"])
        for file in (state / "array_metadatas").iterdir():
            json.loads(file.read_text())
        # Orbax reads it although it is told where arrays go: JSON in the texts of JSON.
        for file in state.glob("_sharding"):
            for text in json.loads(file.read_text()).values():
                json.loads(text)
        # Not by Orbax: it needs all processes, and reads on after the first failure.
        store = {"driver": "ocdbt", "base": f"file://{state}/"}
        found = 0
        for key in tensorstore.KvStore.open(store).result().list().result():
            array, _, name = key.decode().rpartition("/")
            if name in (".zarray", "zarr.json"):
                spec = {"driver": "auto", "kvstore": {**store, "path": f"{array}/"}}
                tensorstore.open(spec).result().read().result()
                found += 1
        if found != wanted:
            return f"{found} of {wanted} arrays are there"
    except Exception as error:  # whatever a damaged file makes of its readers
        return f"{type(error).__name__}: {_brief(error)}"
    return None


def _brief(error: Exception) -> str:
    """The beginning of an error's words: tensorstore shows all its settings."""
    return str(error).partition("\n")[0][:200]


def _may_change(theirs: dict, ours: dict) -> bool:
    """Whether the workers are the difference: their number, at most their batch too.

    A batch of another size is taken for the same run's if a step of all workers has as
    many examples as before.
    """
    keys = {k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)}
    if BATCH in keys:
        a, b = (x["workers"] * x[BATCH] for x in (theirs, ours))
        return a == b and keys - {BATCH} == OF_WORKERS
    return keys == OF_WORKERS


def _refuse(theirs: dict, ours: dict, folder: Path) -> None:
    shown = [
        f"  {k}: {there} there, {ours.get(k, 'none')} in this run"
        for k, there in list(theirs.items())[:8]
    ]
    if len(theirs) > len(shown):
        shown.append(f"  and {len(theirs) - len(shown)} more")
    raise SetupError(
        f"{folder} holds a checkpoint of another run:\n"
        + "\n".join(shown)
        + "\nUse --fresh to start over there, or another folder with --workdir. Before "
        "its end a run goes on with other config.num_workers, and with another "
        "config.batch_size if their product stays."
    )


def _by_path(shared: Any, local: Any) -> dict[str, Any]:
    """Arrays by name: a file that can be read without the classes of the state."""
    leaves = jax.tree_util.tree_leaves_with_path(Parts(shared, local))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves
    }


def flat(settings: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted keys; tuples as lists, as JSON will give them back."""
    items: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict):
            items += flat(value, f"{prefix}{key}.")
        else:
            value = list(value) if isinstance(value, tuple) else value
            items.append((f"{prefix}{key}", value))
    return items
