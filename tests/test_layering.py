"""The order of the layers (docs/design.md, section 1), read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY, TRAIN = ROOT / "jaxsparse", ROOT / "train"

# A file imports from lines above its own, or from its own folder. A new file needs a
# place here: the highest that will do.
ORDER = [
    "base",
    "arguments",
    "tree scaling",
    "bits priority labels",
    "largest",
    "codec selection",
    "scope",
    "exchange/ phases",
    "reducers/ cost/",
    "lgc/",
    "memory nonfinite hierarchical",
    "metrics learning_rate",
    "aliases",
]
# These stand beside the others: what they may know, and nothing else may know them.
ASIDE = {
    "state": {"base", "arguments", "tree"},
    "reshard": {"base", "arguments", "tree", "exchange/"},
    "traffic": {"base", "arguments", "program", "compiled", "jaxpr"},
    "compiled": {"hlo", "program"},
    "jaxpr": {"base", "program"},
    "hlo": set(),
    "program": set(),
}
# What a layer must not know though it stands above it.
UNKNOWN = {
    "bits": {"arguments", "base", "tree"},
    "codec": {"base", "tree", "priority"},
    "selection": {"tree"},
    "scope": {"tree", "selection"},
    "exchange/": {"selection", "priority", "scope"},
    "memory": {"reducers/", "selection", "codec", "scope"},
    "phases": {"reducers/", "selection", "codec", "scope", "exchange/"},
    "nonfinite": {"reducers/", "selection", "codec", "scope"},
    "learning_rate": {"exchange/", "reducers/", "selection", "codec", "scope"},
    "hierarchical": {"reducers/", "selection", "codec", "scope", "memory"},
}
COLLECTIVES = {
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
}


def parsed(path):
    return ast.parse(path.read_text())


def files(folder):
    found = sorted(folder.rglob("*.py"))
    assert len(found) > 5
    return found


def layer(path):
    """``tree`` for ``tree.py``, ``exchange/`` for all files in that folder."""
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return parts[0] if len(parts) == 1 else parts[0] + "/"


def imported_layers(path):
    """The layers of the library that a file imports from, and other modules."""
    inside, outside = set(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = ["jaxsparse", *path.relative_to(LIBRARY).parts]
            start = here[: -node.level] if node.level else []
            start = start + (node.module.split(".") if node.module else [])
            modules = [[*start, alias.name] for alias in node.names]
        else:
            continue
        for module in modules:
            if module[0] != "jaxsparse":
                outside.add(module[0])
            elif len(module) > 1:
                folder = (LIBRARY / module[1]).is_dir()
                inside.add(module[1] + "/" * folder)
            else:
                inside.add("__init__")
    return inside, outside


MODULES = [path for path in files(LIBRARY) if layer(path) != "__init__"]
every_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda p: str(p.relative_to(LIBRARY))
)


@every_module
def test_imports_go_one_way(path):
    rank = {name: i for i, line in enumerate(ORDER) for name in line.split()}
    own, (known, _) = layer(path), imported_layers(path)
    assert own in rank or own in ASIDE, f"give {own} a place in the order"
    if own in ASIDE:
        assert known <= ASIDE[own]
        return
    for other in known - {own}:
        assert other in rank, f"{own} must not import {other}"
        assert rank[other] < rank[own], f"{own} stands below {other}"
    assert not known & UNKNOWN.get(own, set())


@every_module
def test_the_library_needs_jax_numpy_and_optax_only(path):
    _, outside = imported_layers(path)
    standard = {"collections", "dataclasses", "fractions", "functools", "itertools"}
    standard |= {"__future__", "math", "numbers", "re", "typing"}
    # The autoencoder of learned compression is written in Flax: the extra `lgc`.
    flax = {"flax"} if path == LIBRARY / "lgc" / "autoencoder.py" else set()
    assert outside <= standard | flax | {"jax", "numpy", "optax"}


def test_the_imports_are_seen_whatever_their_form():
    known = {layer(path): imported_layers(path)[0] for path in MODULES}
    assert "bits" in known["codec"]
    assert "tree" in known["memory"] and "base" in known["memory"]
    assert {"tree", "scope", "exchange/"} <= known["reducers/"]
    assert "exchange/" in known["aliases"] and "reducers/" in known["aliases"]


def collectives_of(path):
    """Names of JAX's collectives used in a file."""
    used = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("lax"):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("jax.lax", "jax"):
            used |= {alias.name for alias in node.names}
    return used & COLLECTIVES


@every_module
def test_collectives_are_at_home_in_exchange_only(path):
    assert layer(path) == "exchange/" or not collectives_of(path)


def test_exchange_is_where_collectives_are():
    home = [p for p in MODULES if layer(p) == "exchange/"]
    assert {"psum", "all_gather"} <= set().union(*map(collectives_of, home))


@pytest.mark.parametrize("path", files(LIBRARY), ids=lambda p: p.stem)
def test_the_library_knows_nothing_of_the_training(path):
    _, outside = imported_layers(path)
    assert not outside & {"train", "configs", "ml_collections", "orbax"}


def names_used(path):
    """Every attribute, name and imported name in a file; comments do not count."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name.split(".")[-1]


def users_in_train(*names):
    return {p.stem for p in files(TRAIN) if set(names) & set(names_used(p))}


def test_only_parallel_knows_pmap():
    assert users_in_train("pmap", "shard_map", "vmap") == {"parallel"}


def test_only_build_reads_the_settings_of_a_method():
    def reads(node):
        return isinstance(node, ast.Attribute) and node.attr == "methods"

    readers = {p.stem for p in files(TRAIN) if any(map(reads, ast.walk(parsed(p))))}
    # `checks` looks at their names alone.
    assert readers == {"build", "checks"}


@pytest.mark.parametrize(
    "path",
    files(LIBRARY) + files(TRAIN),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400
