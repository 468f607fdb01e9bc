import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import simulation
from contract_table import AXIS, on_workers, sparse, stacked

import jaxsparse as js

WORKERS, N = 4, 24


def dense():
    return js.dense(axis_name=AXIS)


def gradients(steps=7):
    shape = (steps, WORKERS, N)
    return np.random.default_rng(3).integers(-300, 300, shape) / np.float32(64)


def over(reducer, grads):
    """Means, rests, counts and phases of every step; the selection's last state."""

    def step(state, x):
        mean, left, state = reducer.reduce(x, state)
        return state, (mean, left, state.count, state.phase)

    def run(x):
        state, out = jax.lax.scan(step, reducer.init(x[0]), x)
        return *out, getattr(state.reducer, "selection", ())

    run = on_workers(run, (None, 0, None, None, None), in_axes=1)
    mean, left, count, phase, selection = run(jnp.asarray(grads))
    return mean, jnp.swapaxes(left, 0, 1), count, phase, selection


def test_each_phase_lasts_until_its_step():
    reducer = js.phases([(2, dense()), (5, sparse(js.top_k(0.5))), (None, dense())])
    mean, left, count, phase, _ = over(reducer, gradients())
    assert count.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert phase.tolist() == [0, 0, 1, 1, 1, 2, 2]
    for step, g in enumerate(gradients()):
        sent = simulation.top_k(g, 12) if 2 <= step < 5 else g
        np.testing.assert_array_equal(mean[step], sent.mean(0))
        np.testing.assert_array_equal(left[step], g - sent)


def test_one_phase_for_ever_is_the_reducer_itself():
    alone = sparse(js.top_k(0.5))
    for end in (None, math.inf):
        mean = over(js.phases([(end, alone)]), gradients(2))[0]
        expected = [simulation.top_k(g, 12).mean(0) for g in gradients(2)]
        np.testing.assert_array_equal(mean, expected)


@pytest.mark.report("grace#15")
def test_switching_does_not_compile_again():
    reducer = js.phases([(1, dense()), (2, sparse(js.top_k(0.5))), (None, dense())])
    traces = []

    def step(x, state):
        traces.append(1)
        return reducer.reduce(x, state)

    x = jnp.asarray(gradients(1)[0])
    state, axes = stacked(reducer.init(x[0]), WORKERS)
    step = on_workers(step, (None, 0, axes), (0, axes))
    for phase in (0, 1, 2, 2):
        _, _, state = step(x, state)
        assert state.phase == phase
    assert len(traces) == 1


def test_a_state_goes_on_through_phases_that_have_none():
    # Alone, random_k would draw for its step 0 and 1 what it draws for 1 and 2 here:
    # once in phase 0, untouched by the dense phase, then on.
    random = sparse(js.random_k(0.25, seed=5))
    reducer = js.phases([(1, random), (2, dense()), (None, random)])
    ones = np.ones((5, WORKERS, N), np.float32)
    mixed, *_, selection = over(reducer, ones)
    alone, *_ = over(js.phases([(None, random)]), ones)
    np.testing.assert_array_equal(mixed[0], alone[0])
    np.testing.assert_array_equal(mixed[1], np.ones(N))
    np.testing.assert_array_equal(mixed[2:], alone[1:4])
    assert selection.step == 4
    assert (np.asarray(alone[1:]) != np.asarray(alone[:-1])).any(axis=1).all()


def test_densities_may_change_while_a_priority_goes_on():
    counting = js.Priority(
        init=lambda n: jnp.zeros(n),
        score=lambda state, x: jnp.abs(x),
        observe=lambda state, mean, sent: state + (mean != 0),
    )
    reducer = js.phases(
        [(2, sparse(js.top_k(0.5, counting))), (None, sparse(js.top_k(0.25, counting)))]
    )
    ones = np.ones((5, WORKERS, N), np.float32)
    # Ties go to the lower index: half for two steps, a quarter for three.
    expected = 2 * (np.arange(N) < N // 2) + 3 * (np.arange(N) < N // 4)
    np.testing.assert_array_equal(over(reducer, ones)[-1], expected)


def test_a_tree_without_leaves_has_the_same_state():
    reducer = js.phases([(1, dense()), (None, sparse(js.random_k(0.5)))])
    full, empty = reducer.init(jnp.ones(3)), reducer.init({})
    assert jax.tree.structure(full) == jax.tree.structure(empty)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_goes_on_from_a_dense_phase_into_a_sparse_one(nesterov):
    switch, k = 3, 6
    reducer = js.phases([(switch, dense()), (None, sparse(js.top_k(k / N)))])
    tx = js.momentum_correction(reducer, 0.9, nesterov)

    def run(x):
        def step(state, g):
            mean, state = tx.update(g, state)
            return state, mean

        return jax.lax.scan(step, tx.init(x[0]), x)[1]

    means = on_workers(run, None, in_axes=1)(jnp.asarray(gradients()))
    # The dense phase is momentum SGD ...
    trace = optax.trace(0.9, nesterov)
    state, total = trace.init(jnp.zeros(N)), []
    for g in gradients()[:switch]:
        update, state = trace.update(jnp.asarray(g.mean(0)), state)
        total.append(update)
    np.testing.assert_allclose(means[:switch], np.stack(total), atol=1e-5)
    # ... and its momentum is not lost at the switch: DGC's equations with all sent,
    # but nothing masked, until then.
    u, v = np.zeros((WORKERS, N)), np.zeros((WORKERS, N))
    for step, g in enumerate(gradients()):
        u = 0.9 * (u + g) if nesterov else 0.9 * u + g
        v = v + u + g if nesterov else v + u
        sent = v if step < switch else simulation.top_k(v, k)
        if step >= switch:
            u = np.where(sent != 0, 0, u)
        v = v - sent
        np.testing.assert_allclose(means[step], sent.mean(0), atol=2e-5)


def bad(schedule, error, match):
    with pytest.raises(error, match=match):
        js.phases(schedule)


def test_schedules_that_make_no_sense_are_refused():
    one = dense()
    bad([], ValueError, "needs at least one")
    bad([(3, one)], ValueError, r"last phase.*must be \(None, reducer\).*got 3")
    bad([(5, one), (5, one), (None, one)], ValueError, "must rise: phase 1 ends at 5")
    bad([(5, one), (4, one), (None, one)], ValueError, "ends at 4.*before it at 5")
    bad([(2**31, one), (None, one)], ValueError, "2147483648, which an int32 count")
    for until in (0, -1, 1.5, None, "3", True):
        match = r"`phases\(\[\.\.\.\]\)\[0\] until_step` must be a whole number"
        bad([(until, one), (None, one)], ValueError, match)


def test_what_is_no_reducer_or_no_pair_is_refused():
    memory = js.error_feedback(dense())
    bad([(None, memory)], TypeError, "phase 0.*must hold a Reducer.*memory around")
    bad(dense(), TypeError, "list of pairs")
    bad([dense(), dense(), 3], TypeError, "list of pairs")
    bad([(None, dense(), 1)], TypeError, "list of pairs")


def test_phases_with_different_states_are_refused_and_both_are_shown():
    reducer = js.phases(
        [(1, js.low_rank(1, axis_name=AXIS)), (None, sparse(js.top_k(0.5)))]
    )
    match = r"phase 0 has \{'factors': 'float32\[5\]'\}.*phase 1 has .*metrics/selected"
    with pytest.raises(ValueError, match=match):
        reducer.init(jnp.ones((7, 5)))


def test_phases_with_states_of_different_shapes_are_refused():
    low_rank = functools.partial(js.low_rank, axis_name=AXIS)
    reducer = js.phases([(1, dense()), (2, low_rank(1)), (None, low_rank(2))])
    with pytest.raises(ValueError, match=r"phase 1 .*float32\[9\].*phase 2.*\[18\]"):
        reducer.init(jnp.ones((9, 9)))
