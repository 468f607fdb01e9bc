"""What a run has sent, in bytes: Python ints on the host, no formula."""

from __future__ import annotations

from typing import Any

import jax
import optax

import jaxsparse as js

TAKEN = (
    "phase",
    "rung",
    "gate",
    "skipped",
)  # what a step's metrics say of its branches
PROGRESS = ("up", "down", *TAKEN)


class Ledger:
    """Adds up every step's payload, by the branch that the step took on the devices."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        *,
        axis_name: str,
        num_workers: int,
    ):
        """Reads the collectives of an update off its jaxpr; nothing is computed.

        Args:
          tx: the whole chain.
          params: the parameters, maybe abstract.
          axis_name: of the workers.
          num_workers: over all processes.
        """
        opt_state = jax.eval_shape(tx.init, params)
        jaxpr = jax.make_jaxpr(tx.update, axis_env=[(axis_name, num_workers)])
        self._traffic = js.traffic(jaxpr(params, opt_state, params))
        self._num_workers = num_workers
        self.dense_per_step = sum(4 * x.size for x in jax.tree.leaves(params))
        self.up = self.down = 0  # bytes so far
        self.phase = self.rung = self.gate = 0  # of the latest step
        self.skipped = 0  # steps so far

    def per_step(
        self, phase: int, rung: int = 0, gate: int = 1, *, finite: bool = True
    ) -> tuple[int, int]:
        """Bytes up and down of a step.

        Args:
          phase: of `js.phases`.
          rung: of the server's ladder.
          gate: 1 for a learned code's latent, 0 for plain values.
          finite: whether the step was taken.
        """
        taken = {"phases": phase, "ladder": rung, "gate": gate, "finite": int(finite)}
        return js.payload_bytes(self._traffic, self._num_workers, **taken)

    def add(self, *, phase: int, rung: int, gate: int, skipped: int) -> None:
        """Books a step.

        Args:
          phase: that the step ran in.
          rung: that its union fell on.
          gate: whether it sent a learned code's latent.
          skipped: steps skipped so far, this one included.
        """
        up, down = self.per_step(phase, rung, gate, finite=skipped == self.skipped)
        self.up, self.down = self.up + up, self.down + down
        self.phase, self.rung, self.gate, self.skipped = phase, rung, gate, skipped

    def progress(self) -> dict[str, int]:
        """What a checkpoint needs."""
        return {name: getattr(self, name) for name in PROGRESS}

    def restart(self, progress: dict[str, int]) -> None:
        """Goes on from what `progress` gave."""
        for name in PROGRESS:
            setattr(self, name, progress[name])
