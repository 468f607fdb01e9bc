"""The exceptions that `main` tells in words, without a traceback."""


class SetupError(Exception):
    """You can put this right: a wrong config, missing data, a foreign checkpoint.

    The message names what was given, what was expected, and what to do about it.
    """


class RunError(Exception):
    """A run that has begun and cannot go on: its numbers, a device or a worker fail.

    The message names the step, the worker and the part of the state. What was saved
    before stays, and the same command goes on from there.
    """
