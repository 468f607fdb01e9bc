import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse as js
from jaxsparse import selection as selections

ALL = {
    "top_k": js.top_k,
    "sampled_top_k": js.sampled_top_k,
    "threshold": lambda d: js.threshold(0.5, max_density=d),
    "random_k": js.random_k,
    "random_block": js.random_block,
}
every_selection = pytest.mark.parametrize("name", ALL)


def chosen(selection, x, select=None):
    """The indices as a NumPy array, padding included, and the overflow."""
    x = jnp.asarray(x, jnp.float32)
    select = jax.jit(selection.select) if select is None else select
    indices, overflow = select(x, selection.init(x.shape[0]))
    assert indices.shape == (selection.count(x.shape[0]),)
    assert indices.dtype == jnp.int32
    assert overflow.shape == () and overflow.dtype == jnp.int32
    return np.asarray(indices), int(overflow)


@functools.cache
def made(name, density):
    """A selection and its compiled choice."""
    selection = ALL[name](density)
    return selection, jax.jit(selection.select)


def valid(indices, n):
    """The entries chosen, after checking that they are distinct and in range."""
    inside = indices[indices != n]
    assert len(set(inside.tolist())) == inside.size
    assert ((0 <= inside) & (inside < n)).all()
    return inside


def largest(x, k):
    """NumPy's answer: by magnitude, ties to the lower index."""
    return np.argsort(-np.abs(x), kind="stable")[:k]


@pytest.mark.parametrize("k", [1, 15, 16, 17, 100])
def test_top_k_is_numpys_with_ties_to_the_lower_index(k):
    x = np.random.default_rng(k).integers(-9, 9, 200).astype(np.float32)
    indices, overflow = chosen(js.top_k(k / 200), x)
    np.testing.assert_array_equal(indices, largest(x, k))
    assert overflow == 0


@pytest.mark.report("tensorflow#117287", "xla#48119", "jax#21397")
def test_top_k_takes_nan_and_infinity_first_in_order_of_index():
    x = np.array([1, np.inf, 9, -np.nan, 3, np.nan, -np.inf, 2])
    indices, _ = chosen(js.top_k(5 / 8), x)
    assert indices.tolist() == [1, 3, 5, 6, 2]


@every_selection
def test_tiny_vectors_yield_distinct_entries_in_range(name):
    cases = [(n, density) for n in (0, 1, 2, 5) for density in (1e-9, 0.3, 1.0)]

    def select(n, density):
        selection = ALL[name](density)
        return selection.select(jnp.arange(1.0, n + 1), selection.init(n))[0]

    all_at_once = jax.jit(lambda: [select(*case) for case in cases])
    for (n, density), indices in zip(cases, all_at_once(), strict=True):
        k = min(n, max(1, math.ceil(density * n)))
        assert ALL[name](density).count(n) == k
        assert indices.shape == (k,) and valid(np.asarray(indices), n).size == k


@every_selection
def test_density_one_chooses_all(name):
    indices, overflow = chosen(ALL[name](1.0), np.linspace(1, 3, 37))
    assert sorted(indices.tolist()) == list(range(37)) and overflow == 0


@pytest.mark.report("pytorch#1810", "torch-xpu-ops#4839")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_selection
def test_bad_numbers_give_distinct_entries_in_range(name, bad):
    x = np.random.default_rng(0).normal(size=50)
    x[::7] = bad
    indices, _ = chosen(made(name, 0.5)[0], x, made(name, 0.5)[1])
    assert valid(indices, 50).size > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["top_k", "sampled_top_k", "threshold"])
def test_a_bad_number_is_the_first_to_be_chosen(name, bad):
    x = np.random.default_rng(0).normal(size=400)
    x[123] = bad
    indices, _ = chosen(made(name, 0.1)[0], x, made(name, 0.1)[1])
    assert 123 in indices


N, K = 4000, 40
LAWS = {
    "gaussian": lambda rng: rng.normal(size=N),
    "laplace": lambda rng: rng.laplace(size=N),
    "cauchy": lambda rng: rng.standard_cauchy(size=N),
    "rising": lambda rng: np.linspace(0, 1, N),
    "falling": lambda rng: np.linspace(1, 0, N),
    "steep": lambda rng: np.geomspace(1e-30, 1e30, N),
    "huge and tiny": lambda rng: rng.permuted(np.geomspace(1e-37, 3e38, N)),
}


@functools.cache
def sampled(**kwargs):
    selection = js.sampled_top_k(K / N, **kwargs)
    return selection, jax.jit(lambda x: selection.select(x, ()))


def sample_of(x, **kwargs):
    selection, select = sampled(**kwargs)
    indices, overflow = select(jnp.asarray(x, jnp.float32))
    assert indices.shape == (selection.count(N),)
    return valid(np.asarray(indices), N), int(overflow)


@pytest.mark.parametrize("law", LAWS)
def test_sampled_top_k_finds_about_k_and_they_are_the_largest(law):
    x = LAWS[law](np.random.default_rng(1)).astype(np.float32)
    indices, overflow = sample_of(x)
    assert 0.8 * K <= indices.size + overflow <= 1.3 * K
    np.testing.assert_array_equal(indices, largest(x, indices.size))


def test_sampled_top_k_bounds_the_threshold_where_factors_would_step_over_it():
    # The sample (every 20th entry) sees only ones. 150 entries lie within 10 % of one
    # another: factors of 0.8 and 1.25 jump between 150 candidates and none.
    x = np.ones(N)
    x[1:301:2] = np.linspace(2.0, 2.2, 150)
    indices, overflow = sample_of(x)
    assert 0.8 * K <= indices.size + overflow <= 1.3 * K
    np.testing.assert_array_equal(indices, largest(x, indices.size))


@pytest.mark.parametrize("adjustments", [9, 10])
@pytest.mark.parametrize("value", [1.0, 0.1, 0.3, 1e-30, 3e38])
def test_sampled_top_k_of_equal_entries_is_full(value, adjustments):
    indices, overflow = sample_of(np.full(N, value), max_adjustments=adjustments)
    assert indices.size == K and overflow == N - K


def test_sampled_top_k_of_zeros_is_empty():
    indices, overflow = sample_of(np.zeros(N))
    assert indices.size == 0 and overflow == 0


@pytest.mark.parametrize("spike", [0, 1, N // 2 + 1, N - 1])
def test_sampled_top_k_finds_one_spike_among_zeros_and_nothing_else(spike):
    x = np.zeros(N)
    x[spike] = -3.0
    indices, overflow = sample_of(x)
    assert indices.tolist() == [spike] and overflow == 0


@pytest.mark.parametrize("spike", [0, 1, N // 2 + 1, N - 1])
def test_sampled_top_k_takes_a_spike_among_small_ones_first(spike):
    x = np.random.default_rng(2).normal(size=N)
    x[spike] = 100.0
    assert sample_of(x)[0][0] == spike


def test_sampled_top_k_orders_by_magnitude():
    x = np.random.default_rng(3).normal(size=N)
    magnitudes = np.abs(x[sample_of(x)[0]])
    assert (np.diff(magnitudes) <= 0).all()


@jax.jit
def by_threshold(value, x):  # which may be traced
    return js.threshold(value, max_density=1.0).select(x, ())


@pytest.mark.parametrize("value", [0.0, 0.5, 2.5, 100.0])
def test_threshold_is_numpys(value):
    x = np.random.default_rng(4).normal(size=301)
    found = np.flatnonzero(np.abs(x) > np.float32(value))
    indices, overflow = by_threshold(value, jnp.asarray(x, jnp.float32))
    np.testing.assert_array_equal(valid(np.asarray(indices), 301), found)
    assert overflow == 0


def test_threshold_is_strict():
    assert chosen(js.threshold(1.0, max_density=1.0), [1.0, -1.0, 1.5])[0][0] == 2


def test_threshold_beyond_its_capacity_keeps_the_largest_and_counts_the_rest():
    x = np.random.default_rng(5).normal(size=300)
    indices, overflow = chosen(js.threshold(0.1, max_density=0.1), x)
    np.testing.assert_array_equal(np.sort(indices), np.sort(largest(x, 30)))
    assert overflow == np.sum(np.abs(x) > np.float32(0.1)) - 30


DRAWS = 4000


@functools.cache
def drawn(name, n, k, seed=0):
    """The indices of many steps, [DRAWS, k]."""
    selection = ALL[name]((k - 0.5) / n, seed=seed)  # rounded up
    x = jnp.zeros(n)

    def step(state, _):
        return selection.observe(state, x, x), selection.select(x, state)[0]

    return np.asarray(jax.lax.scan(step, selection.init(n), length=DRAWS)[1])


@pytest.mark.report("fedjax@5f75a97", "fedjax@48d1bc8", "BytePS randomk")
@pytest.mark.parametrize(("n", "k"), [(23, 7), (10, 9), (11, 1)])
@pytest.mark.parametrize("name", ["random_k", "random_block"])
def test_every_entry_is_drawn_equally_often_and_never_twice(name, n, k):
    steps = drawn(name, n, k)
    assert all(len(set(step)) == k for step in steps.tolist())
    counts = np.bincount(steps.ravel(), minlength=n)
    assert counts.shape == (n,)
    p = k / n
    # Counts of single entries are binomial; six standard deviations of it.
    assert np.abs(counts - DRAWS * p).max() < 6 * np.sqrt(DRAWS * p * (1 - p))


@pytest.mark.report("fedjax@9efee58")
def test_random_k_is_independent_of_the_step_before():
    first, second = drawn("random_k", 11, 1)[:-1, 0], drawn("random_k", 11, 1)[1:, 0]
    pairs = np.histogram2d(first, second, bins=11)[0]
    expected = (DRAWS - 1) / 121
    chi_square = ((pairs - expected) ** 2 / expected).sum()
    # 120 degrees of freedom: mean 120, standard deviation sqrt(240).
    assert abs(chi_square - 120) < 6 * np.sqrt(240)


@pytest.mark.parametrize("name", ["random_k", "random_block"])
def test_draws_change_by_step_and_by_seed_and_repeat_with_the_seed(name):
    one, other = drawn(name, 23, 7), drawn(name, 23, 7, seed=1)
    assert (one[:-1] != one[1:]).any(axis=1).mean() > 0.9
    assert (one != other).any(axis=1).mean() > 0.9
    again, _ = chosen(ALL[name](6.5 / 23, seed=1), np.zeros(23))
    np.testing.assert_array_equal(again, other[0])


def test_random_block_is_a_block_that_wraps_round():
    steps = drawn("random_block", 23, 7)
    np.testing.assert_array_equal((steps[:, :1] + np.arange(7)) % 23, steps)
    assert (steps[:, 0] > 16).any()  # some do wrap


@pytest.mark.parametrize("name", ["random_k", "random_block"])
def test_what_random_selections_draw_does_not_depend_on_the_data(name):
    selection = ALL[name](0.3)
    x = jnp.asarray(np.random.default_rng(6).normal(size=(4, 50)), jnp.float32)
    # out_axes None proves that the choice is the same on all workers.
    select = jax.vmap(
        lambda x, s: selection.select(x, s)[0], in_axes=(0, None), out_axes=None
    )
    assert selection.agreed and select(x, selection.init(50)).shape == (15,)


@pytest.mark.parametrize("name", ["top_k", "sampled_top_k", "threshold"])
def test_selections_that_look_at_the_data_are_not_agreed(name):
    assert not ALL[name](0.3).agreed


def test_rotation_does_not_overflow_near_2_to_the_31():
    n = 2**31 - 2
    at = np.array([0, n // 2, n - 1])
    got = selections._rotate(jnp.asarray(at, jnp.int32), jnp.int32(n - 1), n)
    np.testing.assert_array_equal(got, (at + n - 1) % n)


def favourite(entry):
    """A priority that puts one entry first and keeps the last mean that it saw."""
    return js.Priority(
        init=lambda n: jnp.full(n, -1.0),
        score=lambda state, x: jnp.abs(x).at[entry].set(jnp.inf),
        observe=lambda state, mean, sent: mean,
    )


def test_a_priority_decides_the_order_and_observes_the_mean():
    selection = js.top_k(0.25, priority=favourite(5))
    x = np.arange(8, 0, -1.0)
    state = selection.init(8)
    np.testing.assert_array_equal(state, np.full(8, -1))
    assert chosen(selection, x)[0].tolist() == [5, 0]
    np.testing.assert_array_equal(
        selection.observe(state, jnp.arange(8.0), jnp.zeros(8)), range(8)
    )


def test_a_priority_sees_the_mean_over_the_workers():
    reducer = js.sparse(
        js.top_k(0.5, priority=favourite(3)),
        js.all_gather(),
        axis_name="w",
        codec=js.codec.float32(),
    )
    x = jnp.array([[4.0, 3.0, 2.0, 1.0], [0.0, 8.0, 2.0, 3.0]])

    def step(x):
        mean, _, state = reducer.reduce(x, reducer.init(x))
        return mean, state.selection

    mean, seen = jax.jit(jax.vmap(step, axis_name="w", out_axes=None))(x)
    np.testing.assert_array_equal(mean, [2.0, 4.0, 0.0, 2.0])
    np.testing.assert_array_equal(seen, mean)


@pytest.mark.parametrize("width", [10, 64, 100])
def test_sampled_top_k_does_not_fall_on_one_column_of_a_matrix(width):
    """A strided sample would see column 0 alone, whose entries are small or zero."""
    selection = js.sampled_top_k(0.01, sample=0.05)
    select = jax.jit(lambda x: selection.select(x, ())[0])
    x = np.random.default_rng(0).normal(size=(200, width)).astype(np.float32)
    for scale in (1e-3, 0.0):
        x[:, 0] *= scale
        flat = np.abs(x.ravel())
        k = -(-flat.size // 100)
        indices = np.asarray(select(flat))
        energy = np.sum(flat[indices[indices < flat.size]] ** 2)
        assert energy >= 0.8 * np.sum(np.sort(flat)[-k:] ** 2)


def test_sampled_top_k_starves_nothing_that_error_feedback_holds():
    """Equal gradients: the first by index must not win for ever."""
    tx = js.error_feedback(
        js.sparse(js.sampled_top_k(0.1), js.all_gather(), axis_name="w")
    )

    def run(g):
        def body(carry, _):
            state, sent = carry
            mean, state = tx.update(g, state)
            return (state, sent | (mean != 0)), None

        start = (tx.init(g), g == 0)
        return jax.lax.scan(body, start, None, length=30)[0][1]

    assert jax.jit(jax.vmap(run, axis_name="w"))(jnp.ones((1, 100))).all()
