"""The command line, with errors that say what there is."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from train.errors import SetupError

flags.disclaim_key_flags()  # --help shows them as `main`'s

NO_SETUPS = ("common", "methods")  # files beside the setups that these are made from
# What absl and ml_collections raise on keys and values that are no Python literals.
MALFORMED = IndexError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError
DEFAULT_CONFIG = str(Path(__file__).parents[1] / "configs" / "digits.py")


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Defines the flags of `train.main`."""
    config_flags.DEFINE_config_file(
        "config",
        help_string="FILE or FILE:METHOD; METHOD is one of configs/methods.py, or "
        "several with commas; among them, where a setup has one, `generated`: "
        "a small run on generated data. --config.KEY=VALUE overrides a setting.",
        flag_values=values,
        sys_argv=argv,
    )
    text = {"default": None, "flag_values": values}
    flags.DEFINE_string("workdir", help="Folder of the results.", **text)
    flags.DEFINE_boolean(
        "fresh", False, "Start over where the folder holds a run.", flag_values=values
    )
    flags.DEFINE_string("coordinator", help="HOST:PORT of process 0.", **text)
    flags.DEFINE_integer("num_processes", help="How many there are.", **text)
    flags.DEFINE_integer("process_id", help="Which one this is, from 0.", **text)


def parse(argv: list[str], values: flags.FlagValues) -> list[str]:
    """Parses a command line into ``values``, with the default setup if none is named.

    Returns:
      What is left of it.

    Raises:
      SetupError: an unknown flag, setting, file or method; a value of a wrong type.
    """
    argv, path = _config_first(argv)
    if Path(path.partition(":")[0]).stem in NO_SETUPS:
        raise SetupError(f"--config={path} is no setup. {_setups()}")
    define(values, argv)
    try:
        rest = values(argv)
        _ = values.config.setup  # a file that isn't there is reported on first use
        return rest
    except flags.Error as error:
        raise SetupError(f"{error}\n--help lists the flags.") from error
    except (AttributeError, KeyError) as error:
        raise SetupError(_unknown_key(argv, path) or str(error)) from error
    except OSError as error:
        raise SetupError(f"{error}\n{_setups()}") from error
    except MALFORMED as error:
        raise SetupError(
            f"{type(error).__name__}: {error}\nThe command line cannot be read. "
            "Settings are --config.KEY=VALUE, with KEY such as data.name."
        ) from error


def _setups() -> str:
    """What there is to train, for an error."""
    found = {p.name for p in Path(DEFAULT_CONFIG).parent.glob("[!_]*.py")}
    known = sorted(found - {f"{name}.py" for name in NO_SETUPS})
    return f"Setups here: {', '.join(known)}."


def _config_first(argv: list[str]) -> tuple[list[str], str]:
    """The command line with ``--config`` in front of its overrides; and its value."""
    path, others, rest = DEFAULT_CONFIG, [], iter(argv[1:])
    for arg in rest:
        if arg in ("-config", "--config"):
            path = next(rest, "")
        elif match := re.fullmatch(r"--?config=(.*)", arg):
            path = match[1]
        else:
            others.append(arg)
    return [argv[0], f"--config={path}", *others], path


def _unknown_key(argv: list[str], path: str) -> str | None:
    """The first setting of a command line that its config lacks, and what it has."""
    file, _, methods = path.partition(":")
    config = runpy.run_path(file)["get_config"](methods)
    for match in (re.match(r"--?config\.([\w.]+)", arg) for arg in argv):
        node = config
        for part in match[1].split(".") if match else ():
            if not isinstance(node, ConfigDict) or part not in node:
                known = sorted(node) if isinstance(node, ConfigDict) else []
                close = difflib.get_close_matches(part, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                return (
                    f"--config.{match[1]}: there is no setting {part!r}.{hint} "
                    f"Known here: {', '.join(known) or 'none'}."
                )
            node = node[part]
    return None
