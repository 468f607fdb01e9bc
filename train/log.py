"""Messages and progress: on the terminal of process 0, silent in all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Log:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None):
        """Speaks on a console of the caller's, or on standard output."""
        if console is None:
            console = Console(quiet=jax.process_index() != 0, highlight=False)
            if not console.is_terminal:
                console.width = 100  # a file's, which has none of its own
        self.console = console

    def say(self, text: str) -> None:
        """Prints a message, above the bar if there is one."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """Shows how far a run is.

        Args:
          title: of the bar.
          total: its end, in steps.

        Yields:
          ``show(step, figures)``. Call it as often as you like with the bar in mind;
          with empty ``figures`` the last ones stay and plain lines stay away.
        """
        if not self.console.is_terminal:
            self.say(f"{title}: compiling, minutes for large models")
            yield (
                lambda step, figures: (
                    self.say(f"{title} {step}/{total}  {figures}") if figures else None
                )
            )
            return
        columns = (
            TextColumn("{task.description:>12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task(title, total=total, figures="compiling")

            def show(step: int, figures: str) -> None:
                fields = {"figures": figures} if figures else {}
                bar.update(task, completed=step, **fields)

            yield show
