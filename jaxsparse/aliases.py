"""The papers' names: each a short composition, memory included."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from .arguments import (
    check_axis_name,
    check_density,
    check_number,
    check_positive_int,
)
from .base import Reducer
from .codec import Codec
from .exchange import collectives
from .exchange.all_gather import all_gather
from .memory import error_feedback, momentum_correction
from .phases import phases
from .reducers.dense import dense
from .reducers.low_rank import low_rank
from .reducers.sign_mean import sign_mean
from .reducers.sparse import sparse
from .scaling import norm
from .selection import sampled_top_k


def dgc(
    density: float = 0.001,
    *,
    axis_name: collectives.AxisName,
    num_workers: int | None = None,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: float | None = None,
    warmup_steps: int = 0,
    warmup_densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004),
    sample: float = 0.01,
    codec: Codec | None = None,
    scope: str = "leaf",
) -> optax.GradientTransformationExtraArgs:
    """Deep gradient compression: momentum correction, masking, clipping and warm-up.

    Follow it by ``optax.sgd(learning_rate)`` without momentum.

    Args:
      density: fraction of the entries sent after the warm-up, in (0, 1].
      axis_name: name of the mapped axis.
      num_workers: size of that axis, checked where given.
      momentum: in [0, 1].
      nesterov: Nesterov's form of it.
      masking: clear the momentum of entries that were sent.
      clip_norm: global norm to clip to; every worker clips its own gradient to
        ``clip_norm / sqrt(N)`` before it enters the memory. None: no clipping.
      warmup_steps: steps over which the density falls, in equal parts, through
        ``warmup_densities``; those not above ``density`` are left out.
      warmup_densities: falling, each in (0, 1].
      sample: fraction of the entries that the threshold is estimated from.
      codec: how values are written; bfloat16 by default.
      scope: ``"leaf"`` for a budget per layer, as in the paper, or ``"global"``.

    Returns:
      A transformation from one worker's gradients to the mean.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Differences from the paper:
      Values are sent as bfloat16, indices by Elias-Fano. Biases and norms, which the
      authors' code keeps dense, are kept dense by
      ``optax.partition(..., js.label_leaves(min_ndim=2))``.

    Example:
      >>> tx = optax.chain(dgc(0.01, axis_name="workers"), optax.sgd(0.1))

    References:
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the
      Communication Bandwidth for Distributed Training", 2018, arXiv 1712.01887.
    """
    check_density("dgc(density=...)", density)
    check_positive_int("dgc(warmup_steps=...)", warmup_steps, 0)
    for d in warmup_densities:
        check_density("dgc(warmup_densities=...)", d)
    if list(warmup_densities) != sorted(warmup_densities, reverse=True):
        raise ValueError(
            f"`dgc(warmup_densities=...)` must fall, got {tuple(warmup_densities)}."
        )

    def at(density: float) -> Reducer:
        return sparse(
            sampled_top_k(density, sample=sample),
            all_gather(),
            axis_name=axis_name,
            num_workers=num_workers,
            codec=codec,
            scope=scope,  # type: ignore[arg-type]
        )

    warm = [d for d in warmup_densities if d > density] if warmup_steps else []
    if warm and warmup_steps < len(warm):
        raise ValueError(
            f"`dgc(warmup_steps=...)` must be at least {len(warm)}, a step for each "
            f"warm-up density, got {warmup_steps}. Give more steps, fewer "
            "`warmup_densities`, or `warmup_steps=0` for none."
        )
    ends = [warmup_steps * (i + 1) // len(warm) for i in range(len(warm))]
    steps: list[tuple[int | None, Reducer]] = [
        (end, at(d)) for end, d in zip(ends, warm, strict=True)
    ]
    tx = momentum_correction(
        phases([*steps, (None, at(density))]), momentum, nesterov, masking
    )
    if clip_norm is None:
        return tx
    return optax.chain(clip_by_local_norm(clip_norm, axis_name=axis_name), tx)


def clip_by_local_norm(
    clip_norm: float, *, axis_name: collectives.AxisName
) -> optax.GradientTransformationExtraArgs:
    """Clips each worker's gradient to ``clip_norm / sqrt(N)``.

    The sum of N independent gradients clipped so has a norm of about ``clip_norm``.

    Args:
      clip_norm: norm of the sum over the workers, > 0.
      axis_name: name of the mapped axis.

    Returns:
      A transformation without state.

    Raises:
      ValueError, TypeError: ``clip_norm`` is not positive, ``axis_name`` is no name.

    References:
      Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", 2018.
    """
    check_number(
        "clip_by_local_norm(clip_norm=...)", clip_norm, "be positive", lambda x: x > 0
    )
    check_axis_name("clip_by_local_norm(axis_name=...)", axis_name)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        limit = clip_norm / collectives.axis_size(axis_name) ** 0.5
        # Not optax's: its squares overflow, and large gradients become zero.
        factor = limit / jnp.maximum(norm(updates), limit)
        clipped = jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)


def power_sgd(
    rank: int,
    *,
    axis_name: collectives.AxisName,
    start_step: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """PowerSGD: error feedback around `low_rank`. Momentum comes after it.

    Args:
      rank: of the approximation, >= 1.
      axis_name: name of the mapped axis.
      start_step: average densely before this step.
      seed: of the first factors.

    Returns:
      A transformation from one worker's gradients to the mean.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> tx = optax.chain(
      ...     power_sgd(2, axis_name="workers"), optax.sgd(0.1, momentum=0.9))

    References:
      Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression
      for Distributed Optimization", 2019, arXiv 1905.13727.
    """
    check_positive_int("power_sgd(start_step=...)", start_step, 0)
    reducer = low_rank(rank, axis_name=axis_name, seed=seed)
    if start_step:
        reducer = phases([(start_step, dense(axis_name=axis_name)), (None, reducer)])
    return error_feedback(reducer)


def ef_sign_sgd(
    *, axis_name: collectives.AxisName
) -> optax.GradientTransformationExtraArgs:
    """EF-signSGD: error feedback around `sign_mean`, one bit an entry.

    Args:
      axis_name: name of the mapped axis.

    Returns:
      A transformation from one worker's gradients to the mean.

    Example:
      >>> tx = optax.chain(ef_sign_sgd(axis_name="workers"), optax.sgd(0.1))

    References:
      Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other
      Gradient Compression Schemes", 2019, arXiv 1901.09847.
    """
    return error_feedback(sign_mean(axis_name=axis_name))
