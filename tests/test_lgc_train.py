"""Learned compression in the trainer: layers, bytes, checkpoints in every stage."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training

import jaxsparse as js
from configs.methods import LAYERS
from train import build
from train.errors import SetupError
from train.history import read
from train.ledger import Ledger
from train.models.pspnet import PSPNet
from train.models.resnet import ResNet
from train.parallel import AXIS, Workers

WORKERS = 2
# Dense, training, latents; the gate closes for a look at every third step.
STAGES = {"dense_until": 1, "training_until": 2, "recheck": 3, "gate": 2.0}
TAKEN = [(0, 0), (1, 0), (2, 1), (2, 0), (2, 1), (2, 1)]  # phase and gate of each step
CODES = {
    "lgc_server_paper": {"name": "linear", "block": 4, "latent": 2},
    "lgc_ring": {
        "name": "convolutional",
        "widths": (4, 4),
        "channels": 2,
        "slope": 1.0,
    },
}


def config_of(method, **overrides):
    given = {f"methods.{method}.{key}": value for key, value in STAGES.items()}
    config = training.config_of(method, density=0.1, **{**given, **overrides})
    config.methods[method].code = CODES[method]
    return config


def path_of(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


@functools.cache
def parameters(model):
    images = jnp.zeros((1, 32, 32, 3))
    return jax.eval_shape(
        lambda key: model.init(key, images, train=False)["params"], jax.random.key(0)
    )


RESNET = ResNet(50, 10, "cifar")


def labelled(model, params):
    """The paths of a model's parameters by label, as the paper's preset has them."""
    config = training.config_of("lgc_ring_paper")
    config.model.name = model
    settings = config.methods.lgc_ring_paper
    labels = js.lgc.layers(dense=settings.dense_layers, top_k=settings.top_k_layers)
    found = jax.tree_util.tree_leaves_with_path(labels(params))
    return {
        label: [path_of(keys) for keys, own in found if own == label]
        for label in ("dense", "top_k", "encoded")
    }


def of_small(model):
    config = training.config_of("dense")
    config.model.name = model
    if model == "lenet":
        del config.model.channels, config.model.hidden
    batch = {"image": jnp.zeros((1, 28, 28, 1), jnp.uint8)}
    return jax.eval_shape(build.task(config).init, jax.random.key(0), batch)[0]


@pytest.mark.parametrize(
    ("model", "params", "first", "last"),
    [
        ("convnet", lambda: of_small("convnet"), ["Conv_0"], ["Dense_1"]),
        ("lenet", lambda: of_small("lenet"), ["Conv_0"], ["Dense_2"]),
        (
            "resnet",
            lambda: parameters(RESNET),
            ["backbone/stem", "backbone/stem_norm"],
            ["head"],
        ),
        (
            "pspnet",
            lambda: parameters(PSPNet(50, 21)),
            ["backbone/stem", "backbone/stem_norm"],
            ["auxiliary_head", "head"],
        ),
    ],
)
def test_the_first_layer_is_dense_and_the_last_gets_top_k(model, params, first, last):
    params = params()
    found = labelled(model, params)
    layer = lambda path: path.rpartition("/")[0]  # noqa: E731
    assert sorted({layer(path) for path in found["dense"]}) == first
    assert sorted({layer(path) for path in found["top_k"]}) == last
    # Whole layers: none is in two parts.
    assert not {layer(path) for path in found["encoded"]} & {*first, *last}


def test_what_dense_batch_normalisation_would_cost():
    """The figures of docs/methods/lgc.md: the paper's preset of the server's form."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters(RESNET))
    sizes = {path_of(keys): x.size for keys, x in leaves}
    parts = {
        label: sum(sizes[path] for path in paths)
        for label, paths in labelled("resnet", parameters(RESNET)).items()
    }
    norms = [path for path in sizes if re.search("norm|Norm", path)]
    assert sum(sizes[path] for path in norms) == 53_120
    dense_norms = 4 * sum(sizes[path] for path in norms if "stem" not in path)

    n, k = parts["encoded"], -(-parts["encoded"] // 1000)
    float32 = js.codec.float32()
    given = dict.fromkeys(("latent", "innovation_codec", "codec"), float32)
    code = js.lgc.convolutional((64, 128, 256, 64), innovation=True)
    given |= {"order": js.lgc.signed(), "innovation": 0.01}
    last = js.codec.message_words(parts["top_k"], -(-parts["top_k"] // 1000), float32)
    said = js.lgc.cost.server(8, k, n, code, **given).mean
    said += 4 * parts["dense"] + 4 * last
    assert round(dense_norms / 1000) == 212 and round(dense_norms / said) == 10
    everything = 4 * sum(parts.values())
    ratios = everything / said, everything / (said + dense_norms)
    assert [round(ratio) for ratio in ratios] == [4450, 404]


def test_layers_follow_the_model_and_the_command_line():
    config = training.config_of("lgc_server,lgc_server_paper")
    improved, paper = (config.methods[name] for name in config.run)
    assert config.model.name == "convnet"
    assert improved.dense_layers == improved.top_k_layers == ()
    assert paper.to_dict().items() >= LAYERS["convnet"].items()
    config.model.name = "resnet"
    assert improved.to_dict().items() >= LAYERS["resnet"].items()
    assert paper.to_dict().items() >= LAYERS["resnet"].items()
    config.update_from_flattened_dict({"methods.lgc_server.dense_layers": ("stem",)})
    assert improved.dense_layers == ("stem",) and paper.dense_layers != ("stem",)
    config.model.name = "another"
    assert paper.dense_layers == paper.top_k_layers == ()


def test_a_pattern_without_a_layer_names_the_method():
    config = training.config_of("lgc_ring", **{"methods.lgc_ring.top_k_layers": ("x",)})
    tx = build.optimizer(config, "lgc_ring")
    with pytest.raises(
        SetupError, match=r"methods.lgc_ring: .*top_k.*'x'.*Conv_0/bias"
    ):
        tx.init({"Conv_0": {"bias": jnp.zeros(1)}})


def ledger_of(config):
    tx = build.optimizer(config, config.run[0])
    batch = {"image": jnp.zeros((1, 8, 8, 1), jnp.uint8)}
    params = jax.eval_shape(build.task(config).init, jax.random.key(0), batch)[0]
    return params, Ledger(tx, params, axis_name=AXIS, num_workers=config.num_workers)


def test_bytes_of_a_partition_by_phase_and_gate():
    """The sum of the parts' formulas, and the word that all steps agree by."""
    config = config_of("lgc_server_paper")
    params, ledger = ledger_of(config)
    size = lambda name: sum(x.size for x in jax.tree.leaves(params[name]))  # noqa: E731
    dense, last, n = size("Conv_0"), size("Dense_1"), size("Dense_0")
    float32 = js.codec.float32()
    top_k = 4 * js.codec.message_words(last, -(-last // 10), float32)
    costs = js.lgc.cost.server(
        WORKERS,
        -(-n // 10),
        n,
        js.lgc.linear(4, 2),
        order=js.lgc.signed(),
        latent=float32,
        innovation=0.01,
        innovation_codec=float32,
        codec=float32,
    )
    header = 4  # of what chooses for itself; the leader's part has its own
    word = 4  # whether all gradients are finite
    up = lambda *taken: ledger.per_step(taken[0], gate=taken[1])[0]  # noqa: E731
    assert up(0, 0) == 4 * (dense + last + n) + word
    own = 4 * js.codec.message_words(n, -(-n // 10), float32)
    assert up(1, 0) == 4 * dense + header + top_k + own + word
    rest = 4 * dense + header + top_k + word
    assert up(2, 1) == rest + costs.leader
    plain = costs.others + WORKERS * (costs.plain_mean - costs.others)
    assert up(2, 0) == rest + plain


@pytest.fixture(scope="module", params=CODES)
def whole(request, tmp_path_factory):
    """A run through all stages that has saved its state after every step.

    The runs that go on from it take its programs: nothing is traced or compiled again.
    """
    config = config_of(request.param, eval_every=1, checkpoint_every=1)
    config.checkpoints_kept = 10
    folder = tmp_path_factory.mktemp(request.param)
    splits = training.splits_in(folder / "data")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Workers, "map_train"), (Workers, "map_eval")):
            patch.setattr(owner, name, made_once(getattr(owner, name)))
        patch.setattr(js, "local_leaves", made_once(js.local_leaves))
        training.run(config, folder / "whole", splits)
        yield config, folder / "whole", splits
    jax.config.update("jax_disable_most_optimizations", False)


def made_once(make):
    made = []

    def first(*args, **kwargs):
        if not made:
            made.append(make(*args, **kwargs))
        return made[0]

    return first


def test_bytes_follow_the_stages_and_the_gate(whole):
    config, folder, _ = whole
    _, ledger = ledger_of(config)
    sent = np.diff([row["payload_up_bytes"] for row in read(folder)])
    assert sent.tolist() == [ledger.per_step(p, gate=g)[0] for p, g in TAKEN]


@pytest.mark.parametrize(
    "step", [1, 2, 3, 4], ids=["dense", "training", "open", "shut"]
)
def test_a_run_resumes_in_any_stage_with_the_same_bits(whole, tmp_path, step):
    config, folder, splits = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    _, text = training.run(config, tmp_path, splits)
    assert f"goes on after step {step}" in text
    training.assert_same_run(folder, tmp_path, 6)
