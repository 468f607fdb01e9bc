"""The one exception that means: you can put this right."""


class SetupError(Exception):
    """A wrong config, missing data, a foreign checkpoint: `main` prints no traceback.

    The message names what was given, what was expected, and what to do about it.
    """
