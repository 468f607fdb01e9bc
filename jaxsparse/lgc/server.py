"""Learned gradient compression, parameter-server form.

One worker leads, another one at every step. It sends which entries it chose, S, and the
latent of its values there; then every worker sends its innovation: a few values, at
their true coordinates, for which that will not do. With E and D the code, s and r the
leader's signs and root mean square,

    rec = r s D(E(s x_l[S] / r))                       on S
    C_i = g_i rec + innovation_i                       g_l = 1, g_i = replay else
    mean = sum_i C_i / N,    left_i = x_i - C_i

The innovation is the largest part of ``x_i - g_i rec`` among worker i's own k largest
entries. A decoder that takes the innovation in decodes once for each worker; then the
innovation is the largest part of ``x_i``, and C_i is ``r s D(z, innovation_i)`` on S
and the innovation elsewhere.
"""

from __future__ import annotations

from typing import Literal

from ..arguments import check_fraction
from ..base import Reducer
from ..codec import Codec
from ..exchange import collectives
from . import presets
from .code import Code
from .order import Order
from .server_steps import ServerSteps
from .stages import settings, staged
from .training import Training


def lgc_server(
    density: float = 0.001,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None = None,
    preset: Literal["paper", "improved"] = "improved",
    stages: tuple[int, int] = (200, 500),
    scope: Literal["global", "leaf"] = "global",
    code: Code | None = None,
    order: Order | None = None,
    latent: Codec | None = None,
    innovation: float | Literal["auto"] | None = None,
    innovation_codec: Codec | None = None,
    replay: float | None = None,
    rotate: bool | None = None,
    codec: Codec | None = None,
    training: Training | None = None,
    gate: float | None = None,
    recheck: int = 101,
    seed: int = 0,
) -> Reducer:
    """Averages by a leader's learned code and everyone's innovation.

    What is None is the preset's.

    Args:
      density: ``k / n`` of a worker's own choice, in (0, 1].
      axis_name: name of the mapped axis.
      num_workers: size of that axis, checked where given.
      preset: ``"improved"``, or ``"paper"``: as in the paper, as far as that trains.
      stages: steps (T1, T2): dense averaging before T1, own top-k and training of the
        code before T2, latents from then on.
      scope: ``"global"`` chooses over all leaves together, ``"leaf"`` in every leaf.
      code: what makes values a latent, as `js.lgc.convolutional()`.
      order: how the code sees the values, as `js.lgc.flipped()`.
      latent: how the latent is written, as `js.codec.int8()`.
      innovation: share of k that every worker sends besides, in [0, 1], or ``"auto"``,
        ``max(0.4 - 1 / N, 0.1)``: with its turns as leader a worker then sends 0.4 k
        entries in a mean step, however many workers there are.
      innovation_codec: how the values of that are written.
      replay: how much of the leader's reconstruction stands for another worker's own
        values, in [0, 1]: 1 as in the paper; 0, the improved preset's: the leader
        speaks for itself alone, and the others' values wait until they lead. A decoder
        that takes the innovation in always stands for everyone.
      rotate: whether the leader changes from step to step.
      codec: how plain values are written.
      training: how the code is trained.
      gate: reconstruction error (NMSE) above which plain values are sent and the code
        is trained on; infinite: never. The leader measures it at every step.
      recheck: a step of plain values at least so often, if there is a gate.
      seed: of the code's first parameters.

    Returns:
      A `Reducer`. Under a memory, what is left is what was not applied.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxsparse as js
      >>> reducer = js.lgc_server(0.5, axis_name="w", stages=(0, 0), gate=float("inf"),
      ...                         code=js.lgc.mean(), innovation=0.0)
      >>> step = lambda x: reducer.reduce(x, reducer.init(x))[:2]
      >>> x = jnp.array([[4.0, 0.0, 0.0, -6.0], [0.0, 1.0, 2.0, 0.0]])
      >>> mean, left = jax.jit(jax.vmap(step, axis_name="w", out_axes=(None, 0)))(x)
      >>> print(mean, left[0])
      [ 2.5  0.   0.  -2.5] [-1.  0.  0. -1.]

    Differences from the paper:
      See docs/methods/lgc.md.

    References:
      Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned Gradient Compression for
      Distributed Deep Learning", IEEE TNNLS 33(12), 2022, arXiv 2103.08870.
    """
    chosen = presets.resolve(
        "lgc_server",
        presets.SERVER,
        preset,
        {
            "code": code,
            "order": order,
            "latent": latent,
            "innovation": innovation,
            "innovation_codec": innovation_codec,
            "replay": replay,
            "rotate": rotate,
            "codec": codec,
            "training": training,
            "gate": gate,
        },
    )
    latent, share, of_share, replay, gate = (
        chosen.pop(key)
        for key in ("latent", "innovation", "innovation_codec", "replay", "gate")
    )
    if share != "auto":
        check_fraction("lgc_server(innovation=...)", share, static=True)
        share = float(share)
    check_fraction("lgc_server(replay=...)", replay, static=True)
    for argument, given in (("latent", latent), ("innovation_codec", of_share)):
        if not isinstance(given, Codec):
            raise TypeError(
                f"`lgc_server({argument}=...)` must be made by a call such as "
                f"`js.codec.int8()`, got {given!r}."
            )
    shared = settings(
        "lgc_server",
        density,
        axis_name=axis_name,
        num_workers=num_workers,
        scope=scope,
        seed=seed,
        **chosen,
    )
    form = ServerSteps(shared, latent, share, of_share, float(replay))
    return staged(
        shared,
        stages,
        gate,
        recheck,
        training=form.training,
        latent=form.compressed,
        plain=form.plain,
    )
