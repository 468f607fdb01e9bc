import re

import jax.numpy as jnp
import pytest

import jaxsparse as js


def params():
    return {
        "Conv_0": {"kernel": jnp.ones((3, 3, 1, 8)), "bias": jnp.ones(8)},
        "Head": {"kernel": jnp.ones((8, 10)), "bias": jnp.ones(10)},
        "scale": jnp.ones(()),
    }


def dense_leaves(**kwargs):
    labels = js.label_leaves(**kwargs)(params())
    flat = {
        "Conv_0/kernel": labels["Conv_0"]["kernel"],
        "Conv_0/bias": labels["Conv_0"]["bias"],
        "Head/kernel": labels["Head"]["kernel"],
        "Head/bias": labels["Head"]["bias"],
        "scale": labels["scale"],
    }
    assert set(flat.values()) <= {"dense", "sparse"}
    return {name for name, label in flat.items() if label == "dense"}


def test_without_rules_all_leaves_are_sparse():
    assert dense_leaves() == set()


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["Head"], {"Head/kernel", "Head/bias"}),
        (["bias$"], {"Conv_0/bias", "Head/bias"}),
        (("^Conv_0/k", "scale"), {"Conv_0/kernel", "scale"}),
        ([re.compile("head", re.IGNORECASE)], {"Head/kernel", "Head/bias"}),
    ],
)
def test_leaves_whose_path_contains_a_pattern_stay_dense(patterns, expected):
    assert dense_leaves(dense=patterns) == expected


SIZES = {
    "Conv_0/kernel": 72,
    "Conv_0/bias": 8,
    "Head/kernel": 80,
    "Head/bias": 10,
    "scale": 1,
}


@pytest.mark.parametrize("least", [0, 1, 8, 9, 73, 81])
def test_leaves_of_fewer_entries_stay_dense(least):
    expected = {name for name, size in SIZES.items() if size < least}
    assert dense_leaves(min_size=least) == expected


def test_leaves_of_fewer_dimensions_stay_dense():
    assert dense_leaves(min_ndim=1) == {"scale"}
    assert dense_leaves(min_ndim=2) == {"scale", "Conv_0/bias", "Head/bias"}
    assert "Head/kernel" in dense_leaves(min_ndim=3)


def test_rules_add_up():
    both = dense_leaves(dense=["Head"], min_ndim=2)
    assert both == dense_leaves(dense=["Head"]) | dense_leaves(min_ndim=2)


def test_a_pattern_that_matches_nothing_is_refused_and_the_leaves_are_listed():
    with pytest.raises(ValueError, match="'Haed' matches no leaf.*Head/kernel"):
        js.label_leaves(dense=["Head", "Haed"])(params())


def test_a_pattern_that_is_no_expression_is_refused():
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        js.label_leaves(dense=["("])


def test_one_string_is_refused_with_the_remedy():
    with pytest.raises(
        TypeError, match=r"list of patterns, got 'head': write \['head'"
    ):
        js.label_leaves(dense="head")


def test_a_tree_without_leaves_has_no_labels():
    assert js.label_leaves(dense=["head"])({}) == {}
