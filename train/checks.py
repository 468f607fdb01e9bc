"""What a config's values must be, checked before anything is built from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from train.errors import SetupError


class Check(NamedTuple):
    """One setting and what holds of its value; the config is there for comparison."""

    key: str
    holds: Callable[[Any, ConfigDict], bool]
    must: str  # goes on after "must"


COUNTS = (
    "num_workers",
    "batch_size",
    "steps",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "checkpoints_kept",
    "lost_after_s",
)

COUNTS_OR_NEVER = ("check_replicas_every", "max_consecutive_skips")

CHECKS = (
    *(Check(key, lambda x, _: x >= 1, "be at least 1") for key in COUNTS),
    *(Check(key, lambda x, _: x >= 0, "be at least 0") for key in COUNTS_OR_NEVER),
    Check("seed", lambda x, _: 0 <= x < 2**32, "lie in [0, 2**32)"),
    Check(
        "data.max_value", lambda x, _: 0 < x < math.inf, "be finite and greater than 0"
    ),
    Check(
        "data.size",
        lambda x, _: len(x) in (0, 2) and all(isinstance(n, int) and n >= 1 for n in x),
        "be a height and a width of at least 1, or () for images as they are",
    ),
    Check(
        "learning_rate.peak",
        lambda x, _: 0 < x < math.inf,
        "be finite and greater than 0",
    ),
    Check(
        "learning_rate.warmup_steps",
        lambda x, config: 0 <= x < config.steps,
        "lie in [0, config.steps)",
    ),
    Check("weight_decay", lambda x, _: 0 <= x < math.inf, "be finite and at least 0"),
    Check("run", lambda names, _: len(names) > 0, "name at least one method"),
)


def check(config: ConfigDict) -> None:
    """Refuses values that no run can be made of.

    The methods' own settings are checked by what is built from them.

    Raises:
      SetupError: the first setting that is wrong, its value and what it must be.
    """
    for key, holds, must in CHECKS:
        value = _at(config, key)
        if not holds(value, config):
            raise SetupError(
                f"config.{key}={value!r} must {must}; set it with --config.{key}=VALUE."
            )
    for name in config.run:
        if name not in config.methods:
            raise SetupError(
                f"config.run={tuple(config.run)!r} names {name!r}, and config.methods "
                f"has {', '.join(config.methods)}. Choose methods with "
                "--config=FILE:METHOD."
            )


def _at(config: ConfigDict, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config
