"""Ctrl-C and SIGTERM as a question that is asked between two steps."""

from __future__ import annotations

import os
import signal

import jax
from jax.experimental import multihost_utils


class Interrupt:
    """Turns the first SIGINT or SIGTERM into "stop after this step".

    A second one ends the program at once: the last checkpoint is whole at any time.
    """

    def __init__(self):
        self._asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        # JAX's own service waits for SIGTERM where there are several processes.
        several = jax.process_count() > 1
        for number in (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def asked(self, step: int) -> bool:
        """True from the step on after which all processes are to stop."""
        if jax.process_count() == 1:
            return self._asked
        # All processes must stop after the same step, else some wait for ever.
        return multihost_utils.reached_preemption_sync_point(step)

    def _ask(self, number: int, frame: object) -> None:
        del frame
        self._asked = True
        signal.signal(number, signal.SIG_DFL)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
