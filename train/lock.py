"""One run in a folder at a time."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from train.errors import SetupError
from train.parallel import Workers

NETWORK_DISK = 10  # seconds after which one shows what another host has written


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
        token = workers.from_first(secrets.randbelow(2**31))
        if jax.process_index() == 0:
            file = held.enter_context((folder / ".lock").open("a+"))
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
        if jax.process_index() == 0:
            file.truncate(0)
            print(token, file=file, flush=True)
        _check_shared(folder, workers, token)
        yield


def _check_shared(folder: Path, workers: Workers, token: int) -> None:
    """All processes write into one folder: does each find there what the first wrote?

    Raises:
      SetupError: some do not; in all processes alike.
    """
    workers.wait_for_all()
    seen, deadline = False, time.monotonic() + NETWORK_DISK
    while not seen and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            seen = (folder / ".lock").read_text().split() == [str(token)]
        if not seen:
            time.sleep(0.2)
    without = [str(i) for i, one in enumerate(workers.from_all(seen)) if not one]
    if without:
        raise SetupError(
            f"Process 0 writes into {folder}, which is not the folder that process "
            f"{', '.join(without)} sees there. Give all processes the same --workdir, "
            "on a disk that all of them have."
        )
