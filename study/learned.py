"""Variants of learned compression and its controls, all on the reducers' one path.

``lgc_server`` and ``lgc_ring`` with the arguments of `js.lgc_server` and `js.lgc_ring`,
and ``code``: ``convolutional`` (with ``channels``), or as controls ``linear``, ``mean``
(sign and mean magnitude) and ``identity`` (values). ``lgc_server:code=identity,
innovation=0`` is the leader alone. Everything is averaged over the first tenth of the
steps, or the share ``dense``, and the code trained until a quarter of them.
"""

from __future__ import annotations

from typing import Any

import jax

import jaxsparse as js
from jaxsparse.arguments import entries
from jaxsparse.lgc import presets
from jaxsparse.lgc.ring_steps import latent_bits
from jaxsparse.lgc.server_steps import innovation_share
from study.simulation import AXIS, Setting

BOTH = ("preset", "code", "channels", "recheck", "dense")
DENSE, TRAINED = 0.1, 0.25  # shares of the steps: T1, by default, and T2
SETTINGS = {
    "lgc_server": (*BOTH, "innovation", "innovation_codec", "latent", "replay"),
    "lgc_ring": (*BOTH, "support", "latent_bits"),
}
KINDS = {
    "preset": str,
    "code": str,
    "channels": int,
    "recheck": int,
    "innovation_codec": str,
    "latent": str,
    "support": str,
    "latent_bits": int,
}
CODES = {
    "linear": lambda channels: js.lgc.linear(64, 4 * channels),
    "mean": lambda channels: js.lgc.mean(),
    "identity": lambda channels: js.lgc.identity(),
}
FORMS = {"lgc_server": js.lgc_server, "lgc_ring": js.lgc_ring}
CODECS = ("innovation_codec", "latent")
SERVER_COSTS = ("code", "order", "latent", "innovation", "innovation_codec", "codec")
RING_COSTS = ("code", "order", "support", "latent_bits", "codec")


def arguments(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a variant as arguments of its reducer."""
    given = {
        key: getattr(js.codec, value)() if key in CODECS else value
        for key, value in settings.items()
    }
    given.pop("dense", None)
    code, channels = given.pop("code", None), given.pop("channels", None)
    ring = name == "lgc_ring"
    if code in CODES:
        given["code"] = CODES[code](channels or (11 if ring else 2))
        given["gate"] = 1e6  # a control is what it is; its error is still measured
    elif channels is not None:
        slope = 1.0 if ring else 0.01
        given["code"] = js.lgc.convolutional(channels=channels, slope=slope)
    return given


def reducer(
    name: str, settings: dict[str, Any], density: float, setting: Setting
) -> js.Reducer:
    """The reducer of a variant."""
    first = settings.get("dense", DENSE)
    return FORMS[name](
        density,
        axis_name=AXIS,
        num_workers=setting.workers,
        stages=(round(first * setting.steps), round(TRAINED * setting.steps)),
        **arguments(name, settings),
    )


def chosen_for(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the cost model asks for: the variant's settings, and its preset's."""
    given = arguments(name, settings)
    ring = name == "lgc_ring"
    table = presets.RING if ring else presets.SERVER
    asked = {key: given.get(key) for key in (RING_COSTS if ring else SERVER_COSTS)}
    return presets.resolve(name, table, given.get("preset", "improved"), asked)


def payload(
    name: str, settings: dict[str, Any], workers: int, k: int, n: int
) -> js.lgc.cost.Payload:
    """What a variant says in a step of latents, by the cost model."""
    chosen = chosen_for(name, settings)
    code = chosen.pop("code")
    if name == "lgc_ring":
        chosen["contributed"] = chosen.pop("support") == "contributed"
        return js.lgc.cost.ring(workers, k, n, code, **chosen)
    return js.lgc.cost.server(workers, k, n, code, **chosen)


def link(exchange: Any, params: Any, workers: int, **taken: int) -> int:
    """Bytes on a worker's link in one step, read off the program."""
    state = jax.eval_shape(exchange.init, params)
    jaxpr = jax.make_jaxpr(exchange.update, axis_env=[(AXIS, workers)])
    return js.link_bytes(js.traffic(jaxpr(params, state, params)), workers, **taken)


def training_bytes(
    name: str, settings: dict[str, Any], workers: int, k: int, n: int
) -> float:
    """What a worker says in a step of the training stage."""
    preset = settings.get("preset", "improved")
    codec = js.codec.float32() if preset == "paper" else js.codec.bfloat16()
    if name == "lgc_server":  # its own entries
        return js.cost.all_gather(workers, k, n, codec=codec).up
    return payload(name, settings, workers, k, n).plain_mean


def value_bits(name: str, settings: dict[str, Any], workers: int, k: int) -> float:
    """Bits of the values alone in a step of latents, mean over the workers."""
    chosen = chosen_for(name, settings)
    code = chosen["code"]
    if name == "lgc_ring":
        return code.size(k) * latent_bits(chosen["latent_bits"], workers)
    own = (
        entries(innovation_share(chosen["innovation"], workers), k)
        * chosen["innovation_codec"].width
    )
    return code.size(k) * chosen["latent"].width / workers + own
