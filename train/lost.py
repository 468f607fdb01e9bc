"""A lost process: the others say so and end, they do not wait for it.

A process that is killed closes its connections, and a collective with it fails at once;
one that is cut off, or whose host stops, is given up when it has sent no heartbeat for
`config.lost_after_s`. Then nothing can be done but start again, from the checkpoint:
the collectives of those that are left need all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from typing import NoReturn

import jax

# Kept: a handler that is no longer referenced must not be called.
_handlers: list = []


def end(error: BaseException | None = None) -> NoReturn:
    """Ends this process at once, after words about what has become of the run.

    Not by `sys.exit`: JAX would wait for the lost process once more.

    Args:
      error: what the collective raised; None where JAX has aborted, and said why.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        why = f"a collective failed ({str(error).splitlines()[0]})"
    elif error is not None:
        traceback.print_exception(error)
        why = f"{type(error).__name__}, see above"
    else:
        why = "JAX has given up, see above"
    text = (
        f"error: process {_number()} ends: {why}. Most likely another process of this "
        "run was lost; what that one printed says why. Start all again, or fewer of "
        "them with another --num_processes: the run goes on from its last checkpoint."
    )
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def speak_on_abort() -> None:
    """Has JAX's abort, when its service or process 0 is gone, end in the same words.

    JAX gives up in a thread of its own, which Python's signal handlers never see.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: end())
    _handlers.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _number() -> str:
    from jax._src import distributed  # `jax.process_index` may want a lost process

    here = distributed.global_state
    return f"{here.process_id} of {here.num_processes}"
