"""Variants of the server's studies: a name with settings, ``ema:weight=64,decay=0.9``.

``topk``, ``frequency``, ``ema``, ``penalty`` and ``regtopk`` choose, with the settings
of the library's priorities and `js.top_k`'s ``exploration``; ``limit`` and ``residual``
are those of `js.server`. ``leader`` is the leader's choice, ``dense`` sends everything;
``lgc_server`` and ``lgc_ring`` are in `learned.py`. ``start`` is the share of the steps
that average everything, before the method begins.
"""

from __future__ import annotations

from typing import Any

import jaxsparse as js
from study import learned
from study.simulation import AXIS, Setting

SERVER = ("limit", "residual", "exploration", "codec", "start")
SETTINGS = {
    "dense": (),
    "topk": SERVER,
    "ema": ("decay", "weight", "of", "local", *SERVER),
    "frequency": ("window", "weight", "local", *SERVER),
    "penalty": ("decay", "threshold", "factor", "local", *SERVER),
    "regtopk": ("mu", *SERVER),
    "leader": ("start",),
    **learned.SETTINGS,
}
# What a setting's value is, if not a number.
KINDS = {
    "of": str,
    "codec": str,
    "window": int,
    "local": lambda text: bool(int(text)),
    **learned.KINDS,
}


def priority(name: str, settings: dict[str, Any], workers: int) -> js.Priority | None:
    """The priority of a variant."""
    if name in ("topk", "leader"):
        return None
    if name == "regtopk":
        return js.reg_top_k(**settings, num_workers=workers)
    kinds = {"ema": js.ema, "frequency": js.frequency, "penalty": js.penalty}
    return kinds[name](**settings)


def parse(variant: str) -> tuple[str, dict[str, Any]]:
    """``ema:weight=64,of=support`` as a name and its settings.

    Raises:
      ValueError: a name or a setting that is not known.

    >>> parse("ema:weight=64,of=support")
    ('ema', {'weight': 64.0, 'of': 'support'})
    """
    name, _, rest = variant.partition(":")
    known = SETTINGS.get(name, ())
    settings: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise ValueError(
                f"variant {variant!r}: {name!r} has no setting {key!r}; "
                f"known: {', '.join(known) or 'none'}."
            )
        try:
            settings[key] = KINDS.get(key, float)(value)
        except ValueError as error:
            raise ValueError(f"variant {variant!r}: {error}") from error
    if name not in SETTINGS:
        raise ValueError(
            f"variant {variant!r}: choose from {', '.join(SETTINGS)}, each with "
            "settings as in 'ema:weight=64,limit=2.5'."
        )
    return name, settings


def exchange_of(variant: str, density: float, setting: Setting) -> Any:
    """The transformation of a variant: DGC's memory around its reducer."""
    name, settings = parse(variant)
    dense = js.dense(axis_name=AXIS)
    if name == "dense":
        reducer = dense
    elif name in learned.SETTINGS:
        reducer = learned.reducer(name, settings, density, setting)
    else:
        start = round(settings.pop("start", 0.0) * setting.steps)
        reducer = sparse_of(name, settings, density, setting.workers)
        if start:
            reducer = js.phases([(start, dense), (None, reducer)])
    return js.momentum_correction(reducer, setting.momentum)


def sparse_of(
    name: str, settings: dict[str, Any], density: float, workers: int
) -> js.Reducer:
    """The reducer of a variant that sends chosen entries."""
    limit = settings.pop("limit", None)
    held = bool(settings.pop("residual", 1.0))
    exploration = settings.pop("exploration", 0.0)
    codec = settings.pop("codec", "bfloat16")
    if name == "leader":
        way = js.shared_support()
    elif limit is not None:
        way = js.server(limit=limit, residual=held, ladder=False, slack=4.0)
    else:
        way = js.all_gather()  # its mean is the server's, its tally is the union
    selection = js.top_k(
        density, priority(name, settings, workers), exploration=exploration
    )
    return js.sparse(
        selection,
        way,
        axis_name=AXIS,
        num_workers=workers,
        codec=getattr(js.codec, codec)(),
    )


def sent_down(figures: dict[str, Any]) -> float:
    """Entries that come down in a mean step: the union, or what a limit lets pass."""
    limit = parse(figures["variant"])[1].get("limit")
    union: float = max(figures["aggregated"], figures["selected"])
    return union if limit is None else min(union, limit * figures["selected"])


def moved_step(figures: dict[str, Any], n: int) -> js.cost.Step:
    """A mean step, by the cost model of the variant's exchange, or a cheaper one."""
    workers, k = figures["workers"], round(figures["selected"])
    name, settings = parse(figures["variant"])
    if name == "dense":
        return js.cost.dense(workers, n)
    if name == "leader":
        return js.cost.shared_support(workers, k, n)
    union = min(max(figures["aggregated"], k), workers * k)
    server = js.cost.server(workers, k, union, n, limit=settings.get("limit"))
    if "limit" in settings:
        return server
    # The mean is the same: whoever has the choice takes what costs less.
    gathered = js.cost.all_gather(workers, k, n)
    return min(server, gathered, key=lambda step: step.up + step.down)


def moved(figures: dict[str, Any], n: int) -> dict[str, float]:
    """Payload of one worker in a mean step, in bytes up and down."""
    step = moved_step(figures, n)
    return {"up": step.up, "down": step.down}
