from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS

import jaxsparse as js
from jaxsparse.arguments import check_fraction, check_positive_int, entries

DENSITY = {
    "top_k(density=...)": js.top_k,
    "sampled_top_k(density=...)": js.sampled_top_k,
    "sampled_top_k(sample=...)": lambda d: js.sampled_top_k(0.1, sample=d),
    "threshold(max_density=...)": lambda d: js.threshold(1.0, max_density=d),
    "random_k(density=...)": js.random_k,
    "random_block(density=...)": js.random_block,
    "dgc(density=...)": lambda d: js.dgc(d, axis_name=AXIS),
    "dgc(warmup_densities=...)": lambda d: js.dgc(
        axis_name=AXIS, warmup_steps=4, warmup_densities=[d]
    ),
}


def literally(text):
    return text.replace("(", r"\(").replace(")", r"\)").replace(".", r"\.")


@pytest.mark.parametrize("call", DENSITY)
@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, 10, 99.9, np.nan, np.inf])
def test_a_density_outside_its_range_is_refused_with_the_remedy(call, density):
    message = rf"`{literally(call)}` must lie in \(0, 1\], got {density}.*0\.01 for one"
    with pytest.raises(ValueError, match=message):
        DENSITY[call](density)


@pytest.mark.parametrize("call", DENSITY)
@pytest.mark.parametrize("density", ["0.1", "1%", None, True, [0.1], 1j])
def test_a_density_that_is_no_number_is_refused(call, density):
    with pytest.raises(TypeError, match=rf"`{literally(call)}` must be a number in"):
        DENSITY[call](density)


@pytest.mark.parametrize("call", DENSITY)
def test_a_density_that_is_an_array_is_refused_and_static_args_named(call):
    with pytest.raises(TypeError, match=rf"`{literally(call)}`.*static_args"):
        DENSITY[call](jnp.float32(0.1))
    with pytest.raises(TypeError, match=rf"`{literally(call)}`.*static_args"):
        jax.eval_shape(lambda d: DENSITY[call](d) and d, jnp.float32(0.1))


def test_a_density_under_inject_hyperparams_is_refused_unless_it_is_static():
    def tx(density):
        reducer = js.sparse(js.top_k(density), js.all_gather(), axis_name=AXIS)
        return js.error_feedback(reducer)

    with pytest.raises(TypeError, match="static_args"):
        optax.inject_hyperparams(tx)(density=0.5).init(jnp.ones(4))
    optax.inject_hyperparams(tx, static_args="density")(density=0.5).init(jnp.ones(4))


@pytest.mark.parametrize("density", [0.5, 1, np.float64(0.5), Fraction(1, 2)])
def test_every_kind_of_python_number_is_a_density(density):
    assert js.top_k(density).count(8) == 8 * density


def test_entries_are_the_ceiling_in_decimal_arithmetic():
    # 0.07 * 100 and 0.29 * 100 are not whole in binary.
    for hundredths in range(1, 101):
        for n in (0, 1, 7, 100, 300, 25_557_032):
            wanted = -(-hundredths * n // 100)
            assert entries(hundredths / 100, n) == wanted


def test_entries_are_at_least_one_and_at_most_all():
    assert entries(1e-30, 5) == 1 and entries(1.0, 5) == 5 and entries(1.0, 0) == 0


def test_entries_of_more_than_2_to_the_53_are_exact():
    assert entries(0.1, 10**18 + 1) == 10**17 + 1


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None, True, np.nan, 2.5])
def test_what_is_no_positive_int_is_refused(value):
    with pytest.raises(ValueError, match=r"`f\(n\)`.*at least 1, got"):
        check_positive_int("f(n)", value)


def test_positive_ints_of_numpy_become_python_ints():
    assert type(check_positive_int("f(n)", np.int64(3))) is int
    assert check_positive_int("f(n)", 0, minimum=0) == 0


@pytest.mark.parametrize("value", [-0.1, 1.1, np.nan, np.inf])
@pytest.mark.parametrize(
    ("call", "make"),
    [
        ("error_feedback(decay=...)", js.error_feedback),
        ("momentum_correction(momentum=...)", js.momentum_correction),
    ],
)
def test_a_factor_outside_0_to_1_is_refused(call, make, value):
    with pytest.raises(
        ValueError, match=rf"`{literally(call)}`.*\[0, 1\], got {value}"
    ):
        make(js.dense(axis_name=AXIS), value)


@pytest.mark.parametrize("value", ["0.9", None, True, 1j])
def test_a_factor_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=r"`f\(x\)` must be a number, got"):
        check_fraction("f(x)", value)


def test_factors_may_be_traced():
    jax.eval_shape(lambda x: check_fraction("f(x)", x) or x, jnp.float32(7))


@pytest.mark.parametrize("axis_name", [None, 0, "", (), ("a", 1), ["a"]])
@pytest.mark.parametrize(
    "make",
    [
        js.dense,
        js.sign_mean,
        lambda **kw: js.low_rank(1, **kw),
        lambda **kw: js.sparse(js.top_k(0.1), js.all_gather(), **kw),
        lambda **kw: js.skip_nonfinite(optax.sgd(0.1), **kw),
        lambda **kw: js.clip_by_local_norm(1.0, **kw),
        lambda **kw: js.dgc(0.1, **kw),
        lambda **kw: js.power_sgd(1, **kw),
        lambda **kw: js.ef_sign_sgd(**kw),
        lambda **kw: js.local_leaves(
            lambda s, b: s, jnp.ones(1), jnp.ones(1), num_workers=2, **kw
        ),
    ],
)
def test_an_axis_name_that_is_no_name_is_refused(make, axis_name):
    with pytest.raises(TypeError, match="must name the mapped axis.*got"):
        make(axis_name=axis_name)


USES = {
    "dense": lambda: js.stateless(js.dense(axis_name="wrokers")),
    "sign_mean": lambda: js.ef_sign_sgd(axis_name="wrokers"),
    "low_rank": lambda: js.power_sgd(1, axis_name="wrokers"),
    "sparse": lambda: js.error_feedback(
        js.sparse(js.top_k(0.5), js.all_gather(), axis_name="wrokers")
    ),
    "phases": lambda: js.dgc(0.1, axis_name="wrokers", warmup_steps=4),
    "clip": lambda: js.clip_by_local_norm(1.0, axis_name="wrokers"),
    "skip": lambda: js.skip_nonfinite(optax.sgd(0.1), axis_name="wrokers"),
}


@pytest.mark.report("gpt-neox#128", "gpt-neox#206")
@pytest.mark.parametrize("use", USES)
def test_an_unknown_axis_and_use_outside_any_axis_are_refused(use):
    tx, x = USES[use](), jnp.ones((2, 3, 3))
    step = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    message = "axis_name='wrokers' is not bound here.*`jax.pmap"
    with pytest.raises(NameError, match=message):
        jax.vmap(step, axis_name=AXIS)(x)
    with pytest.raises(NameError, match=message):
        step(x)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_threshold_that_is_negative_or_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=rf"`threshold\(value=\.\.\.\)`.*got {value}"):
        js.threshold(value, max_density=0.5)


@pytest.mark.parametrize("value", [0, -1.0, np.nan])
def test_a_clip_norm_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=rf"clip_norm.*be positive, got {value}"):
        js.dgc(0.1, axis_name=AXIS, clip_norm=value)


@pytest.mark.parametrize(
    "tolerance", [(1.1, 1.3), (0.8, 0.9), (0, 2), (0.5, np.inf), (np.nan, 2)]
)
def test_a_tolerance_that_does_not_enclose_one_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"tolerance=.*0 < low <= 1 <= high"):
        js.sampled_top_k(0.1, tolerance=tolerance)
