"""The k largest of long vectors, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import largest

N = 3000
RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=N)
VECTORS = {
    "normal": NORMAL,
    "heavy tails": NORMAL * np.exp(2 * RNG.normal(size=N)),
    "ascending": np.sort(np.abs(NORMAL)),
    "few values": np.round(NORMAL),
    "constant": np.full(N, -2.0),
    "zero": np.zeros(N),
    "few spikes among zeros": np.where(np.arange(N) % 500 == 7, NORMAL, 0),
    "one hot column": np.where(np.arange(N) % 64 == 3, 100 * NORMAL, NORMAL),
    "undefined": np.where(np.arange(N) % 400 == 5, np.nan, NORMAL),
    "infinite": np.where(np.arange(N) % 400 == 5, -np.inf, NORMAL),
    "all undefined": np.full(N, np.nan),
    "huge and tiny": NORMAL * np.where(np.arange(N) % 2, 1e37, 1e-37),
    "half precision": NORMAL.astype(np.float16),
}


def wanted(x, k):
    """NumPy's k largest magnitudes, ties to the lower index, NaN as infinity."""
    size = np.abs(np.where(np.isnan(x), np.inf, x))
    return np.argsort(-size, kind="stable")[:k]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What is done for long vectors is done for these."""
    monkeypatch.setattr(largest, "LONG", 100)
    monkeypatch.setattr(largest, "FEW", 1)


@pytest.mark.parametrize("k", [1, 17, 150])
@pytest.mark.parametrize("n", [N, N - 13])
def test_they_are_numpys(k, n):
    choose = jax.jit(lambda x: largest.k_largest(x, k))
    for name, vector in VECTORS.items():
        x = vector[:n].astype(np.float32)
        found = np.asarray(choose(x))
        assert found.dtype == np.int32, name
        assert set(found.tolist()) == set(wanted(x, k).tolist()), name
        size = np.nan_to_num(np.abs(x[found]), nan=np.inf, posinf=np.inf)
        assert (size[:-1] >= size[1:]).all(), f"{name}: the largest come first"


def test_a_wrong_guess_is_corrected_or_given_up(monkeypatch):
    x = VECTORS["heavy tails"].astype(np.float32)
    for factor in (0.0, 1e-3, 0.7, 1.5, 1e3, np.inf):
        monkeypatch.setattr(
            largest, "_guess", lambda x, share, factor=factor: jnp.float32(factor)
        )
        found = jax.jit(lambda x: largest.k_largest(x, 20))(x)
        assert set(found.tolist()) == set(wanted(x, 20).tolist())


def test_workers_choose_their_own():
    x = np.stack([VECTORS["normal"], VECTORS["zero"], VECTORS["few values"]])
    x = x.astype(np.float32)
    found = jax.jit(jax.vmap(lambda x: largest.k_largest(x, 30)))(x)
    for row, mine in zip(x, np.asarray(found), strict=True):
        assert set(mine.tolist()) == set(wanted(row, 30).tolist())


@pytest.mark.report("xla#25487")
def test_no_sort_of_everything_is_compiled(monkeypatch):
    """XLA turns some uses of `lax.top_k` into a sort; here at the real length."""
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((largest.LONG,), jnp.float32)
    text = jax.jit(lambda x: largest.k_largest(x, 300)).lower(x).compile().as_text()
    lengths = [
        line.split("=")[1].split("[")[1]
        for line in text.splitlines()
        if " sort(" in line
    ]
    assert all(int(length.split("]")[0]) < 1000 for length in lengths), lengths
