"""Learned gradient compression, ring-allreduce form.

All workers send the latents of their values at the same entries S; the latents are
averaged on the way and decoded once. With E and D the code, s and r the signs and root
mean square that all agree on,

    z_i = E(s x_i[S] / r)             rounded to what is sent
    mean = r s D(mean_i z_i)          on S
    left_i = x_i - r s D(z_i)

S is one worker's choice, another one's at every step, or every worker contributes its
own ``k / N`` largest entries. An affine code makes the mean of what the workers take
for sent the mean that is delivered; with another one the difference is lost.
"""

from __future__ import annotations

from typing import Literal

from ..arguments import check_positive_int
from ..base import Reducer
from ..codec import Codec
from ..exchange import collectives
from . import presets
from .code import Code
from .order import Order
from .ring_steps import RingSteps
from .stages import settings, staged
from .training import Training


def lgc_ring(
    density: float = 0.001,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None = None,
    preset: Literal["paper", "improved"] = "improved",
    stages: tuple[int, int] = (200, 500),
    scope: Literal["global", "leaf"] = "global",
    support: Literal["leader", "contributed"] | None = None,
    code: Code | None = None,
    order: Order | None = None,
    latent_bits: int | Literal["auto"] | None = None,
    rotate: bool | None = None,
    codec: Codec | None = None,
    training: Training | None = None,
    gate: float | None = None,
    recheck: int = 101,
    seed: int = 0,
) -> Reducer:
    """Averages the latents of a learned code on a shared support.

    What is None is the preset's.

    Args:
      density: ``k / n`` of the shared support, in (0, 1].
      axis_name: name of the mapped axis.
      num_workers: size of that axis, checked where given.
      preset: ``"improved"``, or ``"paper"``: as in the paper, as far as that trains.
      stages: steps (T1, T2): dense averaging before T1, plain values on the shared
        support and training of the code before T2, latents from then on.
      scope: ``"global"`` chooses over all leaves together, ``"leaf"`` in every leaf.
      support: ``"leader"`` or ``"contributed"``: whose entries are the shared ones.
      code: what makes values a latent, as `js.lgc.convolutional()`.
      order: how the code sees the values, as `js.lgc.flipped()`.
      latent_bits: of an entry of the latent: 32, a float, 2 to 16, an integer with
        room for the sum, or ``"auto"``: as few as leave every worker four levels.
      rotate: whether the leader changes from step to step.
      codec: how plain values are written.
      training: how the code is trained.
      gate: reconstruction error (NMSE) of the mean above which plain values are sent
        and the code is trained on; infinite: never.
      recheck: steps between measurements of that error, by a step of plain values. A
        number that has no factor in common with the workers measures all leaders.
      seed: of the code's first parameters.

    Returns:
      A `Reducer`. Under a memory, what is left is what was not applied.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> import jax, jax.numpy as jnp, jaxsparse as js
      >>> reducer = js.lgc_ring(0.5, axis_name="w", stages=(0, 0), gate=float("inf"),
      ...                       code=js.lgc.identity(), latent_bits=32)
      >>> step = lambda x: reducer.reduce(x, reducer.init(x))[0]
      >>> x = jnp.array([[4.0, 0.0, 1.0, 1.0], [2.0, 1.0, 2.0, -6.0]])
      >>> print(jax.jit(jax.vmap(step, axis_name="w", out_axes=None))(x).round(4))
      [ 3.   0.   0.  -2.5]

    Differences from the paper:
      See docs/methods/lgc.md.

    References:
      Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned Gradient Compression for
      Distributed Deep Learning", IEEE TNNLS 33(12), 2022, arXiv 2103.08870.
    """
    chosen = presets.resolve(
        "lgc_ring",
        presets.RING,
        preset,
        {
            "support": support,
            "code": code,
            "order": order,
            "latent_bits": latent_bits,
            "rotate": rotate,
            "codec": codec,
            "training": training,
            "gate": gate,
        },
    )
    whose, bits, gate = (chosen.pop(k) for k in ("support", "latent_bits", "gate"))
    if whose not in ("leader", "contributed"):
        raise ValueError(
            f"`lgc_ring(support=...)` must be 'leader' or 'contributed', got {whose!r}."
        )
    if isinstance(bits, str):
        known = bits == "auto"
    else:
        bits = check_positive_int("lgc_ring(latent_bits=...)", bits)
        known = bits in (*range(2, 17), 32)
    if not known:
        raise ValueError(
            f"`lgc_ring(latent_bits=...)` must be 2 to 16, 32 or 'auto', got {bits!r}."
        )
    shared = settings(
        "lgc_ring",
        density,
        axis_name=axis_name,
        num_workers=num_workers,
        scope=scope,
        seed=seed,
        contributed=whose == "contributed",
        **chosen,
    )
    if whose == "contributed" and not shared.order.mergeable:
        raise ValueError(
            f"`lgc_ring(support='contributed')` cannot merge supports in the order "
            f"{shared.order.name!r}. Pass order=js.lgc.flipped(), or support='leader'."
        )
    if shared.code.innovation:
        raise ValueError(
            "`lgc_ring(code=...)` sends no innovation, but the code's decoder wants "
            "one. Pass js.lgc.convolutional(innovation=False)."
        )
    form = RingSteps(shared, bits)
    return staged(
        shared,
        stages,
        gate,
        recheck,
        training=form.training,
        latent=form.compressed,
        plain=form.plain,
    )
