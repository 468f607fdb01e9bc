"""The pages: their Python runs, their links exist, every public name is told."""

import functools
import re
from pathlib import Path

import jax
import pytest

import jaxsparse as js
from jaxsparse.exchange.server import capacities, down_capacity

ROOT = Path(__file__).parent.parent
METHODS = sorted((ROOT / "docs" / "methods").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "design.md", *METHODS]
# What is written into other folders (.venv, runs, caches) is not ours.
OURS = ("", "docs/**/", "configs/", "scripts/", "study/**/", "tests/", "train/**/")
TEXTS = sorted({path for folder in OURS for path in ROOT.glob(f"{folder}*.md")})


def name(path):
    return str(path.relative_to(ROOT))


def programs(path):
    """Line and text of the Python blocks; ```python fragment marks incomplete ones."""
    text = path.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text[: block.start(1)].count("\n"), block[1]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_of_a_page_runs(path):
    namespace = {"__name__": path.stem}
    for line, source in programs(path):
        # Empty lines before it: an error then tells the line of the page.
        exec(compile("\n" * line + source, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", METHODS, ids=name)
def test_page_of_a_method_is_whole(path):
    text = path.read_text()
    if path.name == "README.md":
        pages = {p.name for p in METHODS} - {"README.md"}
        assert pages == set(re.findall(r"\]\((\w+\.md)\)", text))
        return
    assert list(programs(path))
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    parts = ["Bytes", "Use", "Knobs", "When", "Source"]
    assert [h for h in headings if not h.startswith("Differences")] == parts


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_relative_links_exist(path):
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text()):
        if not re.match(r"\w+:", target):
            assert (path.parent / target).exists(), target


def test_every_public_name_is_on_a_page():
    told = "\n".join(path.read_text() for path in PAGES)
    exports = (ROOT / "jaxsparse" / "__init__.py").read_text()
    public = re.findall(r"^from \.\S* import (\w+) as \1$", exports, re.MULTILINE)
    assert len(public) > 40
    assert [n for n in public if not re.search(rf"(`|js\.){n}\b", told)] == []


@functools.cache
def payloads():
    """Bytes up and down of the index's case, by the method's name there."""

    def sparse(selection, exchange=None):
        exchange = js.all_gather() if exchange is None else exchange
        return js.sparse(selection, exchange, axis_name="w", num_workers=8)

    top_k = js.top_k(1e-3)
    rungs = capacities(125, down_capacity(1000, 1_000_000, 8, 1.0, None))
    least, most = {"ladder": 0}, {"ladder": len(rungs) - 1}
    latent = {"phases": 2, "gate": 1}
    cases = {
        "dense": (js.dense(axis_name="w"), {}),
        "all_gather": (sparse(top_k), {}),
        "server, u = 8 k": (sparse(top_k, js.server()), most),
        "server, u = k": (sparse(top_k, js.server()), least),
        "g_top_k": (sparse(top_k, js.g_top_k()), {}),
        "shared_support": (sparse(top_k, js.shared_support()), {}),
        "low_rank, rank 2": (js.low_rank(2, axis_name="w"), {}),
        "sign_mean": (js.sign_mean(axis_name="w"), {}),
        "lgc_server": (js.lgc_server(1e-3, axis_name="w"), latent),
        "lgc_ring": (js.lgc_ring(1e-3, axis_name="w"), latent),
        "top_k": (sparse(top_k), {}),
        "sampled_top_k": (sparse(js.sampled_top_k(1e-3)), {}),
        "threshold": (sparse(js.threshold(0.1, max_density=1e-3)), {}),
        "random_k": (sparse(js.random_k(1e-3)), {}),
        "random_block": (sparse(js.random_block(1e-3)), {}),
    }
    model = jax.ShapeDtypeStruct((1000, 1000), "float32")

    def payload(reducer, branches):
        state = jax.eval_shape(reducer.init, model)
        step = jax.make_jaxpr(reducer.reduce, axis_env=[("w", 8)])(model, state)
        return js.payload_bytes(js.traffic(step), 8, **branches)

    return {method: payload(*case) for method, case in cases.items()}


def test_bytes_of_the_index():
    text = (ROOT / "docs" / "methods" / "README.md").read_text()
    told = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[3][:1].isdigit():
            up, down = (int(cell.replace(",", "")) for cell in cells[3:5])
            told[cells[0].replace("`", "")] = up, down
    assert told == payloads()


def test_state_of_the_index():
    model = jax.ShapeDtypeStruct((1000, 1000), "float32")
    dense = js.dense(axis_name="w")

    def held(tx):
        leaves = jax.tree.leaves(jax.eval_shape(tx.init, model))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert held(js.stateless(dense)) == 0
    assert held(js.error_feedback(dense)) == 4 * 1_000_000
    assert held(js.momentum_correction(dense)) == 8 * 1_000_000
    assert held(js.phases([(None, dense)])) == 8
    assert held(js.skip_nonfinite(js.stateless(dense), axis_name="w")) == 8
    assert held(js.follow_learning_rate(js.stateless(dense), 0.1)) == 8
