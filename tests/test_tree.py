import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsparse import tree


def mixed():
    return {
        "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "a": [jnp.float32(7), jnp.zeros((0, 4), jnp.float16), None],
        "c": (jnp.array([-1.5], jnp.float16),),
    }


def test_flatten_lays_the_leaves_end_to_end_in_the_order_of_jax_tree_leaves():
    vector, spec = tree.flatten(mixed())
    expected = [np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(mixed())]
    assert vector.dtype == jnp.float32
    np.testing.assert_array_equal(vector, np.concatenate(expected))
    assert spec.sizes == (1, 0, 6, 1) and spec.size == 8


@pytest.mark.report("templar#481")
def test_unflatten_is_the_inverse_of_flatten():
    back = tree.unflatten(*tree.flatten(mixed()))
    assert jax.tree.structure(back) == jax.tree.structure(mixed())
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(mixed()), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("empty", [{}, [], None, {"a": None}])
def test_a_tree_without_leaves_is_a_vector_without_entries(empty):
    vector, spec = tree.flatten(empty)
    assert vector.shape == (0,) and vector.dtype == jnp.float32 and spec.size == 0
    assert tree.unflatten(vector, spec) == empty


def test_the_layout_of_an_abstract_tree_is_that_of_the_concrete_one():
    abstract = jax.eval_shape(mixed)
    assert tree.layout(abstract) == tree.layout(mixed())


def test_the_size_of_a_huge_tree_is_exact():
    huge = [jax.ShapeDtypeStruct((2**31, 3), jnp.float32)] * 2
    assert tree.layout(huge).size == 2**31 * 6


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (jnp.zeros(2, jnp.int32), "int32"),
        (jnp.zeros(2, jnp.complex64), "complex64"),
        (jnp.zeros(2, bool), "bool"),
        (jax.random.key(0), "key<fry>"),
        (1.0, "float"),
    ],
)
def test_a_leaf_that_is_no_floating_point_array_is_named(leaf, kind):
    with pytest.raises(TypeError, match=rf"leaf `layer/1` is {kind}.*optax.partition"):
        tree.layout({"layer": [jnp.ones(1), leaf]})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_keeps_what_is_finite_finite(dtype):
    most = float(jnp.finfo(dtype).max)
    x = jnp.array([3.4e38, -3.4e38, most, jnp.inf, -jnp.inf, jnp.nan, 0.0])
    expected = [most, -most, most, np.inf, -np.inf, np.nan, 0.0]
    got = tree.narrow(x, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), np.float32(expected))


def test_narrow_of_the_same_dtype_changes_nothing():
    x = jnp.array([3.4e38, jnp.inf, 1e-45])
    np.testing.assert_array_equal(tree.narrow(x, jnp.float32), x)


def test_cast_like_and_cast_float32_are_inverse_for_exact_values():
    back = tree.cast_like(tree.cast_float32(mixed()), mixed())
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(mixed()), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_cast_float32_refuses_integers():
    with pytest.raises(TypeError, match="leaf `n` is int32"):
        tree.cast_float32({"n": jnp.zeros(2, jnp.int32)})


def test_2_to_the_31_minus_2_entries_are_the_most():
    of = lambda n: tree.layout(jax.ShapeDtypeStruct((n,), jnp.float32))  # noqa: E731
    tree.check_size(of(2**31 - 2))
    with pytest.raises(
        ValueError, match=r"at most 2\*\*31 - 2 .*2147483647.*partition"
    ):
        tree.check_size(of(2**31 - 1))


@pytest.mark.parametrize(
    ("given", "leaf", "shapes"),
    [
        ({"a": jnp.ones(3), "b": jnp.ones(1)}, "a", r"\(3,\).*at init it was \(2,\)"),
        ({"a": jnp.ones(2)}, "b", r"missing, at init it was \(1,\)"),
        (
            {"a": jnp.ones(2), "b": jnp.ones(1), "c": jnp.ones(())},
            "c",
            r"\(\), at init it was missing",
        ),
    ],
)
def test_a_leaf_that_does_not_match_is_named_with_both_shapes(given, leaf, shapes):
    known = {"a": jnp.ones(2), "b": jnp.ones(1)}
    with pytest.raises(ValueError, match=rf"the memory: leaf `{leaf}` has .*{shapes}"):
        tree.check_matches(given, known, "the memory")


def test_containers_that_differ_do_not_match_though_all_leaves_do():
    with pytest.raises(ValueError, match="the containers differ"):
        tree.check_matches([jnp.ones(2)], (jnp.ones(2),), "the memory")


def test_the_same_tree_matches_whatever_its_dtypes():
    half = {"a": jnp.ones(2, jnp.bfloat16), "b": None}
    tree.check_matches(half, {"a": jnp.ones(2), "b": None}, "the memory")


def test_a_state_made_for_another_tree_is_shown_beside_the_one_wanted():
    init = lambda p: {"score": jnp.zeros(tree.layout(p).size)}  # noqa: E731
    state = init(jnp.ones(3))
    tree.check_state(state, init, jnp.ones((3, 1)), "method")
    with pytest.raises(ValueError, match=r"`method`.*float32\[3\].*float32\[4\].*init"):
        tree.check_state(state, init, jnp.ones(4), "method")


def test_names_are_paths_through_dicts_tuples_and_fields():
    path, _ = jax.tree_util.tree_leaves_with_path({"a": (jnp.ones(1), [2.0])})[1]
    assert tree.name(path) == "a/1/0"
