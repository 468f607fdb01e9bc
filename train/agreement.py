"""The same program everywhere: processes compare what they are about to run.

Were they to differ, some would wait for ever in a collective that the others never come
to, or train different models without a word. So each says what it has, as words by
name, to the service that JAX's processes meet at. Digests are compared first; only
where they differ the words are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import distributed  # there is no public way to the service
from ml_collections import ConfigDict

from jaxsparse import tree
from train.checkpoint import flat
from train.errors import SetupError

LIBRARIES = ("jax", "jaxlib", "optax", "flax", "numpy", "jaxsparse")
OURS = ("jaxsparse", "train")  # folders whose source must be the same

# Where files lie may differ from host to host.
FREE_KEYS = {"data.data_dir", "data.source_dir"}

TIMEOUT_S = 300
SHOWN = 8  # differences; the others are counted

_rounds = itertools.count()


class Service(Protocol):
    """What is needed of JAX's client of its coordination service."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def program(config: ConfigDict, *, fresh: bool) -> dict[str, str]:
    """What must be the same before anything is built: versions, source, settings."""
    settings = {k: v for k, v in flat(config.to_dict()) if k not in FREE_KEYS}
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "source": _source(),
        "jax_enable_x64": str(jax.config.jax_enable_x64),
        "--fresh": str(fresh),
        **{f"config.{key}": str(value) for key, value in settings.items()},
    }


def state(params: Any, others: Any) -> dict[str, str]:
    """What must be the same before the first step: structure, shapes, types, bits.

    Args:
      params: the initial parameters.
      others: the rest of the state.

    Example:
      >>> state({"w": np.ones((2, 3), np.float32)}, ())
      {'parameter w': 'float32[2, 3], bits ...'}
    """
    named = [("parameter", params), ("state", others)]
    return {
        f"{kind} {tree.name(path)}": _words(leaf)
        for kind, part in named
        for path, leaf in jax.tree_util.tree_leaves_with_path(part)
    }


def agree(parts: dict[str, str], of: str) -> None:
    """Compares this process's words with those of all others, if there are any.

    Args:
      parts: words by name.
      of: what they are of, for errors.

    Raises:
      SetupError: they differ, or a process says nothing; in all processes alike.
    """
    here = distributed.global_state
    if here.client is not None and here.num_processes > 1:
        compare(parts, of, here.client, here.process_id, here.num_processes)


def compare(
    parts: dict[str, str],
    of: str,
    service: Service,
    process: int,
    processes: int,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """`agree`, of a given process by a given service."""
    place = f"agreement/{next(_rounds)}"
    text = json.dumps(parts)
    service.key_value_set(f"{place}/words/{process}", text)
    service.key_value_set(f"{place}/digest/{process}", _digest(text.encode()))

    def theirs(kind: str, other: int) -> str:
        try:
            key = f"{place}/{kind}/{other}"
            return service.blocking_key_value_get(key, int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise SetupError(
                f"Process {other} of {processes} has not told its {of} within "
                f"{timeout_s} s: it is slow, or it has ended and has printed why."
            ) from error

    digests = [theirs("digest", other) for other in range(processes)]
    odd = [p for p in range(processes) if digests[p] != digests[0]]
    if odd:
        first, *others = (json.loads(theirs("words", p)) for p in (0, *odd))
        lines = [
            f"  {line}"
            for number, words in zip(odd, others, strict=True)
            for line in differences(first, words, number)
        ]
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"  and {len(lines) - SHOWN} more"]
        raise SetupError(
            f"The processes differ in their {of}:\n"
            + "\n".join(lines)
            + "\nStart all of them with the same command, code and libraries."
        )


def differences(first: dict[str, str], other: dict[str, str], number: int) -> list[str]:
    """What another process has in place of process 0's.

    >>> differences({"jax": "0.10.1"}, {"jax": "0.10.2"}, 3)
    ['jax: 0.10.1 in process 0, 0.10.2 in process 3']
    """
    return [
        f"{key}: {first.get(key, 'none')} in process 0, "
        f"{other.get(key, 'none')} in process {number}"
        for key in {**first, **other}
        if first.get(key) != other.get(key)
    ]


def _words(leaf: Any) -> str:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    values = np.ascontiguousarray(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}, bits {_digest(values.tobytes())[:8]}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _source() -> str:
    """A digest of our own files, whose version seldom tells."""
    root = Path(__file__).parents[1]
    files = sorted(path for part in OURS for path in root.glob(f"{part}/**/*.py"))
    named = [str(path.relative_to(root)).encode() + path.read_bytes() for path in files]
    return _digest(b"".join(named))[:8]
