"""First layer dense, last one top-k, the rest encoded: one chain, three parts."""

import contract_table as table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_table import AXIS, layered

import jaxsparse as js
from jaxsparse import lgc

WORKERS = 4
SHAPES = {"first": (3, 5), "middle": (11, 7), "middle_bias": (7,), "last": (7, 4)}


def params():
    return {"Conv_0": {"bias": 1, "kernel": 2}, "Conv_1": {"kernel": 3}, "head": 4}


@pytest.mark.parametrize(
    ("dense", "top_k", "labels"),
    [
        ([], [], ["encoded", "encoded", "encoded", "encoded"]),
        (["Conv_0"], ["head"], ["dense", "dense", "encoded", "top_k"]),
        (["^Conv_0/"], ["Conv"], ["dense", "dense", "top_k", "encoded"]),
        (["bias$"], [".*"], ["dense", "top_k", "top_k", "top_k"]),
    ],
)
def test_the_first_pattern_that_matches_labels_a_leaf(dense, top_k, labels):
    found = lgc.layers(dense=dense, top_k=top_k)(params())
    assert jax.tree.structure(found) == jax.tree.structure(params())
    assert jax.tree.leaves(found) == labels


@pytest.mark.parametrize("argument", ["dense", "top_k"])
def test_a_pattern_that_matches_no_leaf_is_named_and_the_leaves_are_listed(argument):
    labels = lgc.layers(**{argument: ["Conv", "haed"]})
    message = (
        rf"`layers\({argument}=...\)`: 'haed' matches no leaf.*Conv_0/bias, .*head"
    )
    with pytest.raises(ValueError, match=message):
        labels(params())
    assert labels({}) == {}  # as `optax.tree.map_params` asks for


@pytest.mark.parametrize("argument", ["dense", "top_k"])
def test_wrong_patterns_are_named(argument):
    with pytest.raises(TypeError, match=rf"layers\({argument}=...\).*write \['head'\]"):
        lgc.layers(**{argument: "head"})
    with pytest.raises(ValueError, match=rf"layers\({argument}=...\).*no regular"):
        lgc.layers(**{argument: ["("]})


def gradients(steps):
    drawn = [table.dyadic(seed, SHAPES, WORKERS) for seed in range(steps)]
    return jax.tree.map(lambda *xs: jnp.stack(xs, 1), *drawn)


def trained(tx, grads):
    """Means and metrics of every step; out axes None prove that they are shared."""

    def run(grads):
        def step(state, g):
            mean, state = tx.update(g, state)
            measured = js.metrics(state)
            own = measured.residual_norm, measured.captured
            shared = measured._replace(residual_norm=None, captured=None)
            return state, (mean, shared, own)

        start = tx.init(jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads))
        return jax.lax.scan(step, start, grads)[1]

    return table.on_workers(run, (None, None, 0))(grads)


def parts_of(form):
    """The transformations, the labels, and the names of the leaves of each."""
    labels = lgc.layers(dense=["^first"], top_k=["^last"])
    named = labels(dict.fromkeys(SHAPES, 0))
    names = {
        label: [k for k in SHAPES if named[k] == label]
        for label in ("dense", "top_k", "encoded")
    }
    return layered(WORKERS, form), labels, names


def test_a_partition_is_three_transformations_on_their_own_leaves():
    transformations, labels, names = parts_of("server")
    grads = gradients(6)
    mean, found, own = trained(optax.partition(transformations, labels), grads)
    parts = {
        label: trained(tx, {name: grads[name] for name in names[label]})
        for label, tx in transformations.items()
    }
    for part, _, _ in parts.values():
        for name in part:
            np.testing.assert_allclose(mean[name], part[name], rtol=1e-6, atol=1e-6)
    assert found.phase.tolist() == [0, 1, 2, 2, 2, 2]
    assert found.gate.tolist() == [0, 0, 1, 0, 1, 1]
    measured = {label: metrics for label, (_, metrics, _) in parts.items()}
    for name in ("selected", "aggregated", "overflow"):
        wanted = sum(getattr(m, name) for m in measured.values())
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-6)
    assert np.all(found.aggregated[1:] > measured["encoded"].aggregated[1:])
    for name in ("phase", "gate", "nmse", "measured", "fallbacks"):
        wanted = getattr(measured["encoded"], name)
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-5)
    norms = [np.asarray(norm) for _, _, (norm, _) in parts.values()]
    np.testing.assert_allclose(own[0], np.sqrt(sum(n**2 for n in norms)), rtol=1e-5)


def said_by(tx, shapes, **taken):
    model = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in shapes.items()}
    state = jax.eval_shape(tx.init, model)
    jaxpr = jax.make_jaxpr(tx.update, axis_env=[(AXIS, WORKERS)])(model, state)
    return js.payload_bytes(js.traffic(jaxpr), WORKERS, **taken)


@pytest.mark.parametrize("form", ["server", "ring"])
def test_bytes_add_up_over_the_parts(form):
    """In every phase and at either gate, by the formulas of the three."""
    transformations, labels, names = parts_of(form)
    tx = optax.partition(transformations, labels)
    size = lambda label: table.size([SHAPES[k] for k in names[label]])  # noqa: E731
    n = size("encoded")
    k, m = table.count(table.D, n), table.count(0.1, table.count(table.D, n))
    dense = 4 * size("dense")
    top_k = table.message([SHAPES[k] for k in names["top_k"]], table.D, 32)
    if form == "server":
        innovation = 4 * (table.index_words(m, n) + table.ceil_words(8 * m) + 1)
        support = 4 * (2 + table.index_words(k, n) + table.ceil_words(k))
        training = table.message([(n,)], table.D, 32) - 4  # without a header
        latent = 2 * -(-k // 4)  # of blocks of 4; int8 with a scale
        compressed = support + 4 * (table.ceil_words(8 * latent) + 1) + innovation
        plain = support + 4 * k + innovation
    else:
        share = -(-k // WORKERS)
        support = 4 * (1 + table.index_words(share, n) + table.ceil_words(share))
        training = plain = support + 4 * share * WORKERS
        compressed = support + 4 * table.small_latent(share * WORKERS)
    up = lambda **taken: said_by(tx, SHAPES, **taken)[0]  # noqa: E731
    assert up(phases=0) == 4 * table.size(SHAPES.values())
    assert up(phases=1) == dense + top_k + training
    assert up(phases=2, gate=1) == dense + top_k + compressed
    assert up(phases=2, gate=0) == dense + top_k + plain
    for taken in ({"phases": 1}, {"phases": 2, "gate": 0}, {"phases": 2, "gate": 1}):
        each = [
            said_by(part, {name: SHAPES[name] for name in names[label]}, **taken)
            for label, part in transformations.items()
        ]
        total = tuple(map(sum, zip(*each, strict=True)))
        assert said_by(tx, SHAPES, **taken) == total
