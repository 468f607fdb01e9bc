"""The two presets of each form: the paper as it is read, and what trains better."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import codec
from .code import convolutional
from .order import flipped, signed
from .training import Training

# Values are made when they are asked for: the autoencoder needs Flax.
Preset = dict[str, Callable[[], Any]]

_PAPER: Preset = {
    "order": signed,
    "codec": codec.float32,
    "gate": lambda: math.inf,
}
_IMPROVED: Preset = {
    "order": flipped,
    "codec": codec.bfloat16,
    "rotate": lambda: True,
    "training": Training,
}
SERVER: dict[str, Preset] = {
    "paper": _PAPER
    | {
        "code": lambda: convolutional((64, 128, 256, 64), innovation=True),
        "latent": codec.float32,
        "innovation": lambda: 0.01,
        "innovation_codec": codec.float32,
        "replay": lambda: 1.0,
        "rotate": lambda: False,
        "training": lambda: Training(1e-3, 1, 0.5, 0.5),
    },
    "improved": _IMPROVED
    | {
        "code": lambda: convolutional(channels=2),
        "latent": codec.int8,
        "innovation": lambda: "auto",
        "innovation_codec": codec.sign_mean,
        "replay": lambda: 0.0,
        "gate": lambda: 0.05,
    },
}
RING: dict[str, Preset] = {
    "paper": _PAPER
    | {
        "code": lambda: convolutional((64, 128, 256, 64)),
        "support": lambda: "leader",
        "latent_bits": lambda: 32,
        "rotate": lambda: True,
        "training": lambda: Training(1e-3, 1),
    },
    "improved": _IMPROVED
    | {
        "code": lambda: convolutional(channels=11, slope=1.0),
        "support": lambda: "contributed",
        "latent_bits": lambda: "auto",
        "gate": lambda: 0.5,
    },
}


def resolve(
    call: str, presets: dict[str, Preset], preset: str, given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments given, and the preset's in place of None.

    Raises:
      ValueError: there is no such preset.
    """
    if preset not in presets:
        raise ValueError(
            f"`{call}(preset=...)` must be 'paper' or 'improved', got {preset!r}."
        )
    return {
        name: presets[preset][name]() if value is None else value
        for name, value in given.items()
    }
