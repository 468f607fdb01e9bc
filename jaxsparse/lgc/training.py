"""Training of a code inside the run, the same update on every worker.

All workers hold the same vectors, gathered before, and take the same Adam steps: no
gradient passes a collective. With z_i the latent of worker i's vector x_i, l the
leader, v_i an innovation and all squares averaged over the entries,

    own:     R = sum_i ||x_i - D(z_i, v_i)||^2
    leader:  R = sum_i ||x_i - D(z_l, v_i)||^2
    mean:    R = ||mean_i x_i - D(mean_i z_i)||^2
    S = sum over i != j of ||z_i - z_j||^2
    loss = reconstruction * R + similarity * S

Vectors come normalised to a root mean square of about 1: at the scale of gradients
nothing is learned.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ..arguments import check_number, check_positive_int
from ..base import PyTree
from .code import Code

Target = Literal["own", "leader", "mean"]


class Training(NamedTuple):
    """How a code is trained.

    Attributes:
      learning_rate: of Adam, > 0.
      steps: of Adam in each step of the run that trains.
      reconstruction: weight of the reconstruction loss.
      similarity: weight of the similarity loss, which draws the workers' latents
        together.
    """

    learning_rate: float = 2e-3
    steps: int = 4
    reconstruction: float = 1.0
    similarity: float = 0.0

    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.learning_rate)


def check_training(call: str, training: Training) -> None:
    """Refuses settings out of their ranges.

    Raises:
      TypeError, ValueError: names the setting.
    """
    if not isinstance(training, Training):
        raise TypeError(f"`{call}` must be a `js.lgc.Training(...)`, got {training!r}.")
    check_number(
        f"{call}.learning_rate",
        training.learning_rate,
        "be positive and finite",
        lambda x: 0 < x < math.inf,
        static=True,
    )
    for name in ("reconstruction", "similarity"):
        check_number(
            f"{call}.{name}",
            getattr(training, name),
            "be finite and at least 0",
            lambda x: 0 <= x < math.inf,
            static=True,
        )
    check_positive_int(f"{call}.steps", training.steps)


def losses(
    code: Code,
    params: PyTree,
    x: Array,
    innovation: Array | None,
    target: Target,
    leader: Array,
) -> tuple[Array, Array]:
    """The two losses, float32 scalars.

    Args:
      code: the code.
      params: its parameters.
      x: float32[N, k], the workers' vectors.
      innovation: float32[N, k], or None if the code's decoder wants none.
      target: what the decoder has to give.
      leader: int32 scalar, whose latent is decoded for all.
    """
    k = x.shape[1]
    z = jax.vmap(lambda x: code.encode(params, x))(x)
    if target == "mean":
        reconstruction = _square(x.mean(0) - code.decode(params, z.mean(0), k, None))
    else:
        decoded = z if target == "own" else jnp.broadcast_to(z[leader], z.shape)
        rec = jax.vmap(lambda z, v: code.decode(params, z, k, v))(decoded, innovation)
        reconstruction = x.shape[0] * _square(x - rec)
    # Of ordered pairs: N times the spread around the mean, twice.
    similarity = 2 * x.shape[0] ** 2 * _square(z - z.mean(0))
    return reconstruction, similarity


def train(
    code: Code,
    training: Training,
    params: PyTree,
    opt_state: PyTree,
    *batch,
) -> tuple[PyTree, PyTree]:
    """A few Adam steps on one batch, `losses`' arguments from ``x`` on."""
    if not jax.tree.leaves(params):
        return params, opt_state

    def loss(params: PyTree) -> Array:
        reconstruction, similarity = losses(code, params, *batch)
        total = training.reconstruction * reconstruction
        return (
            total + training.similarity * similarity if training.similarity else total
        )

    def step(carry, _):
        params, opt_state = carry
        updates, opt_state = training.optimizer().update(
            jax.grad(loss)(params), opt_state, params
        )
        return (optax.apply_updates(params, updates), opt_state), None

    return lax.scan(step, (params, opt_state), length=training.steps)[0]


def nmse(x: Array, reconstruction: Array) -> Array:
    """``||x - rec||^2 / ||x||^2``, a float32 scalar, at most 1e6.

    Of zeros it is 1: they say nothing of a code, and must not open its gate.

    >>> nmse(jnp.array([3.0, 4.0]), jnp.array([3.0, 3.0])).item()
    0.04
    """
    energy, error = jnp.sum(x**2), jnp.sum((x - reconstruction) ** 2)
    return jnp.where(energy > 0, jnp.minimum(error / energy, 1e6), 1.0)


def _square(x: Array) -> Array:
    return jnp.mean(x**2)
