"""One run in a folder at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import jax

from train.errors import SetupError
from train.parallel import Workers


@contextlib.contextmanager
def only_user(folder: Path, workers: Workers) -> Iterator[None]:
    """Holds a run's folder for process 0, which is the one that writes to it.

    The system lets go of the lock when the process ends, however it ends. The file
    stays: were it removed, two could hold a lock on two files of one name.

    Args:
      folder: of the run; must exist.
      workers: through which the other processes hear of a refusal.

    Raises:
      SetupError: another program holds the folder; in all processes alike.
    """
    with contextlib.ExitStack() as held:
        free = True
        if jax.process_index() == 0:
            file = held.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            except OSError:
                pass  # a file system without locks
        if not workers.from_first(free):
            raise SetupError(
                f"Another run is using {folder}. Wait for it to end, or choose another "
                "folder with --workdir."
            )
        yield
