"""What the compressed stage of the two forms has to say, to the byte, on the host.

The programs run on workers that are all alike: the leader's message travels by an
all-reduce to which the others add zeros, and `js.payload_bytes` counts it for each of
them. Here it is the leader's alone, so the mean over the workers can be told, and what
a real server would send down: the union of the supports.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import codec as codec_lib
from ..arguments import check_fraction, check_positive_int, entries
from ..codec import Codec, message_words
from ..exchange import fixed_point
from . import ring_steps, server_steps, vectors
from .code import Code
from .order import Order, flipped


class Payload(NamedTuple):
    """Bytes of a step in the compressed stage."""

    leader: int  # what the leader says
    others: int  # what any other worker says
    mean: float  # over the workers
    plain_mean: float  # the same while the gate is closed
    down: int  # what a central server would send to each worker


def server(
    num_workers: int,
    k: int,
    n: int,
    code: Code,
    *,
    union: float | None = None,
    order: Order | None = None,
    latent: Codec | None = None,
    innovation: float | str = "auto",
    innovation_codec: Codec | None = None,
    codec: Codec | None = None,
) -> Payload:
    """Bytes of `lgc_server`; by default with what the improved preset has.

    Args:
      num_workers: N.
      k: entries of a worker's own choice.
      n: parameters.
      code: as in `lgc_server`.
      union: entries in the mean; by default as many as if no two coincided.
      order: as in `lgc_server`.
      latent: as in `lgc_server`.
      innovation: as in `lgc_server`.
      innovation_codec: as in `lgc_server`.
      codec: as in `lgc_server`.

    Raises:
      ValueError, TypeError: an argument out of its range.

    Example:
      >>> from .code import convolutional
      >>> payload = server(8, 25_557, 25_557_032, convolutional(channels=2))
      >>> top_k = 4 * message_words(25_557_032, 25_557, codec_lib.bfloat16())
      >>> round(top_k / payload.mean, 1), round(4 * 25_557_032 / payload.mean)
      (4.8, 5503)
    """
    _check_sizes("server", num_workers, k, n)
    share = server_steps.innovation_share(innovation, num_workers)
    check_fraction("server(innovation=...)", share)
    order = flipped() if order is None else order
    latent = codec_lib.int8() if latent is None else latent
    codec = codec_lib.bfloat16() if codec is None else codec
    if innovation_codec is None:
        innovation_codec = codec_lib.sign_mean()
    m = entries(share, k)
    support = 2 + order.words(k, n)
    own = 4 * message_words(n, m, innovation_codec) if m else 0
    lead = 4 * (support + vectors.words_of(latent, code.size(k)))
    plain = 4 * (support + vectors.words_of(codec, k))
    touched = min(k + num_workers * m, n) if union is None else round(union)
    return Payload(
        leader=lead + own,
        others=own,
        mean=lead / num_workers + own,
        plain_mean=plain / num_workers + own,
        down=4 * message_words(n, touched, codec),
    )


def ring(
    num_workers: int,
    k: int,
    n: int,
    code: Code,
    *,
    contributed: bool = True,
    order: Order | None = None,
    latent_bits: int | str = "auto",
    codec: Codec | None = None,
) -> Payload:
    """Bytes of `lgc_ring`; by default with what the improved preset has.

    Args:
      num_workers: N.
      k: entries of the shared support.
      n: parameters.
      code: as in `lgc_ring`.
      contributed: whether every worker brings its part of the support.
      order: as in `lgc_ring`.
      latent_bits: as in `lgc_ring`.
      codec: as in `lgc_ring`.

    Raises:
      ValueError: ``num_workers`` is no positive number.

    Example:
      >>> from .code import convolutional
      >>> ring(8, 1000, 1_000_000, convolutional(channels=11, slope=1.0)).mean
      716
    """
    _check_sizes("ring", num_workers, k, n)
    order = flipped() if order is None else order
    codec = codec_lib.bfloat16() if codec is None else codec
    if contributed:
        k = num_workers * -(-k // num_workers)
    support = 4 * (1 + order.words(k // num_workers if contributed else k, n))
    width = ring_steps.latent_bits(latent_bits, num_workers)
    values = 4 * code.size(k)
    if width < 32:
        values = 4 + 4 * fixed_point.words(code.size(k), width)
    plain = 4 * vectors.words_of(codec, k)
    led = 0 if not contributed else support
    share = support if contributed else support / num_workers
    return Payload(
        leader=support + values,
        others=led + values,
        mean=share + values,
        plain_mean=share + plain,
        down=(num_workers - 1) * support + values if contributed else support + values,
    )


def _check_sizes(call: str, num_workers: int, k: int, n: int) -> None:
    """Raises ValueError: no positive number, or more entries chosen than there are."""
    for name, value in (("num_workers", num_workers), ("k", k), ("n", n)):
        check_positive_int(f"{call}({name}=...)", value)
    if k > n:
        raise ValueError(f"`{call}(k=...)` must be at most n = {n}, got {k}.")
