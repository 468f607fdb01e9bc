"""What users reported of workers that disagree, states and meshes: docs/reports.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, on_workers, sparse, stacked
from test_reports_numbers import METHODS, every_method, one_step

import jaxsparse as js

report = pytest.mark.report


def gradients(seed, workers=4, n=24):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-300, 300, (workers, n)) / 64, jnp.float32)


@report("pytorch#162338", "powersgd#10", "spd#790")
def test_workers_with_one_gradient_get_what_one_worker_gets():
    """A mean and no sum, whatever the method."""
    x = gradients(0, 1).reshape(1, 4, 6)

    def run(x):
        reducers = [make() for make in METHODS.values()]
        return [reducer.reduce(x, reducer.init(x))[0] for reducer in reducers]

    alone = on_workers(run, None)(x)
    together = on_workers(run, None)(jnp.repeat(x, 8, 0))
    for one, all_of_them in zip(alone, together, strict=True):
        assert np.any(one != 0)
        np.testing.assert_allclose(one, all_of_them, rtol=1e-6)
    np.testing.assert_array_equal(together[0], x[0])


@report("pytorch#75666", "pytorch#79334", "pytorch#102717", "pytorch#102721")
@pytest.mark.parametrize("name", ["low_rank", "random_k"])
def test_a_saved_state_goes_on_with_the_same_bits(name, tmp_path):
    tx = js.error_feedback(METHODS[name]())
    state, axes = stacked(tx.init(jnp.zeros((4, 6))), 4)
    step = on_workers(tx.update, (None, axes), (0, axes))
    x = gradients(1).reshape(4, 4, 6)
    _, state = step(x, state)

    leaves, treedef = jax.tree.flatten(state)
    np.savez(tmp_path / "state.npz", *leaves)
    saved = np.load(tmp_path / "state.npz")
    loaded = jax.tree.unflatten(treedef, [saved[name] for name in saved.files])
    assert np.any(loaded.residual.value[0] != loaded.residual.value[1])
    for one, other in zip(
        *map(jax.tree.leaves, (step(x, state), step(x, loaded))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@report("DeepSpeed OnebitAdam.load_state_dict")
@pytest.mark.parametrize("workers", [2, 8])
def test_every_workers_residual_survives_a_change_of_their_number(workers):
    x = gradients(2)
    _, state = one_step(js.error_feedback(METHODS["top_k"]()), x)
    owed = np.asarray(state.residual.value).mean(0)
    assert np.abs(owed).max() > 1
    after = js.reshard({"residual": state.residual}, workers)["residual"].value
    assert after.shape == (workers, 24)
    np.testing.assert_allclose(np.asarray(after).mean(0), owed, atol=1e-6)


@report("grace#7")
@every_method
def test_the_order_in_which_leaves_are_named_changes_no_program(name):
    shapes = {"b": (3, 4), "a": (5,), "c": ()}

    def program(names):
        reducer = METHODS[name]()
        x = {leaf: jnp.ones(shapes[leaf]) for leaf in names}
        traced = jax.make_jaxpr(reducer.reduce, axis_env=[(AXIS, 4)])
        return str(traced(x, reducer.init(x)))

    assert program("bac") == program("cab") == program("abc")


def nested(f, in_axes):
    """Over a mesh [data, model]."""
    inner = jax.vmap(f, in_axes, axis_name="model")
    return jax.jit(jax.vmap(inner, in_axes, axis_name="data"))


@report("DeepSpeed#781", "DeepSpeed#818", "DeepSpeed#819")
def test_parts_of_a_model_are_averaged_over_the_data_axis_alone():
    reducer = js.sparse(
        js.top_k(0.25), js.all_gather(), axis_name="data", codec=js.codec.float32()
    )
    tx = js.error_feedback(reducer)
    x = gradients(3, 8).reshape(4, 2, 24)  # [data, model, n]
    mean, state = nested(lambda g: tx.update(g, tx.init(g)), 0)(x)
    alone = js.error_feedback(sparse(js.top_k(0.25)))
    for part in range(2):
        expected, held = one_step(alone, x[:, part])
        np.testing.assert_array_equal(mean[:, part], jnp.stack([expected] * 4))
        np.testing.assert_array_equal(
            state.residual.value[:, part], held.residual.value
        )


@report("DeepSpeed#994", "templar#574")
def test_one_part_of_a_model_that_overflows_makes_all_parts_skip():
    inner = js.error_feedback(js.dense(axis_name="data"))
    tx = js.skip_nonfinite(inner, axis_name=("data", "model"))
    x = gradients(4, 8).reshape(4, 2, 24)
    step = nested(lambda g: tx.update(g, tx.init(g)), 0)
    updates, state = step(x.at[1, 1, 3].set(jnp.inf))
    assert not updates.any() and (state.skipped == 1).all()
    updates, state = step(x)
    assert updates.any() and not state.skipped.any()


@report("DeepSpeed#5046")
def test_the_optimizers_state_is_sharded_inside_a_host():
    adam = optax.chain(
        js.error_feedback(js.sparse(js.top_k(0.5), js.all_gather(), axis_name="hosts")),
        optax.adam(0.1),
    )
    tx = js.hierarchical(adam, axis_name="devices", num_workers=4)
    whole = jax.eval_shape(adam.init, jnp.zeros(24))
    part = jax.eval_shape(tx.init, jnp.zeros(24))
    assert [m.size for m in jax.tree.leaves(optax.tree.get(whole, "nu"))] == [24]
    assert [m.size for m in jax.tree.leaves(optax.tree.get(part, "nu"))] == [6]


@report("bagua#485", "bagua#654", "bagua#459")
@pytest.mark.parametrize("name", ["random_k", "low_rank"])
def test_the_same_seed_gives_the_same_bits_in_another_program(name):
    tx, other = (js.error_feedback(METHODS[name]()) for _ in range(2))
    x = gradients(5).reshape(4, 4, 6)
    mean, state = one_step(tx, x)
    padded = {"w": x}  # compiled anew
    again, same = one_step(other, padded)
    np.testing.assert_array_equal(mean, again["w"])
    np.testing.assert_array_equal(state.residual.value, same.residual.value["w"])
