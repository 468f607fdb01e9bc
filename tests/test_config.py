import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from train import build
from train import flags as train_flags
from train.checks import check
from train.errors import SetupError

# ml_collections loads config files in a way that Python is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

ROOT = Path(__file__).parents[1]
SETUPS = sorted((ROOT / "configs").glob("[!_]*.py"))
SETUPS = [p for p in SETUPS if p.stem not in ("common", "methods")]


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["main", *args], values)
    return values


def config_flag(name):
    return f"--config={ROOT / 'configs' / name}"


def test_default_is_digits_with_three_methods():
    config = parse().config
    assert config.setup == "digits"
    assert config.run == ("dense", "topk", "dgc")


def test_a_priority_that_is_not_known_names_its_method():
    wrong = "--config.methods.ema.selection.priority.name=foo"
    config = parse(config_flag("digits.py:ema"), wrong).config
    message = r"config.methods.ema: selection.priority.name='foo'.*ema, frequency"
    with pytest.raises(SetupError, match=message):
        build.optimizer(config, "ema")


def test_a_number_of_workers_that_a_method_cannot_take_is_told_before_training():
    config = parse(config_flag("digits.py:dense,g_top_k"), "--config.num_workers=3")
    with pytest.raises(SetupError, match=r"config.methods.g_top_k: .*power of two"):
        build.optimizer(config.config, "g_top_k")


@pytest.mark.parametrize("method", ["topk", "dgc", "lgc_server"])
def test_what_is_owed_follows_the_rate_that_is_set(method):
    follow = "--config.learning_rate.follow"
    config = parse(config_flag(f"digits.py:{method}"), follow).config
    state = build.optimizer(config, method).init({"a": jnp.zeros((40, 50))})
    [rate] = [
        x for x in jax.tree.leaves(state, is_leaf=is_following) if is_following(x)
    ]
    assert rate.rate == 1  # of nothing that is owed yet


def is_following(node):
    return type(node).__name__ == "FollowLearningRateState"


@pytest.mark.parametrize("path", SETUPS, ids=lambda p: p.stem)
def test_every_setup_loads_and_builds(path):
    config = runpy.run_path(str(path))["get_config"]()
    assert config.setup == path.stem
    build.task(config)
    for method in config.run:
        build.optimizer(config, method)


@pytest.mark.parametrize(
    "method",
    "dense topk sampled_topk topk_sign threshold random_k random_block dgc power_sgd "
    "ef_sign_sgd server limit ema ema_limit frequency penalty leader g_top_k "
    "lgc_server lgc_ring lgc_server_paper lgc_ring_paper".split(),
)
def test_every_method_builds(method):
    config = parse(config_flag("digits.py:" + method)).config
    assert list(config.methods) == [method]
    build.optimizer(config, method)


def test_several_methods_in_the_order_given():
    assert parse(config_flag("digits.py:topk,dense")).config.run == ("topk", "dense")


def test_flags_come_in_any_order():
    config = parse("--config.steps=3", "--config", config_flag("digits.py:topk")[9:])
    assert (config.config.steps, config.config.run) == (3, ("topk",))


def test_an_override_reaches_what_refers_to_it():
    config = parse("--config.density=0.5", "--config.steps=240").config
    assert config.methods.topk.selection.density == 0.5
    assert config.methods.dgc.density == 0.5
    assert config.learning_rate.warmup_steps == 20


def test_a_method_is_overridden_alone():
    config = parse("--config.methods.topk.codec=float32").config
    assert config.methods.topk.codec == "float32"
    assert config.methods.dgc.codec == "bfloat16"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config.stepz=5"], ["'stepz'", "Did you mean 'steps'", "batch_size"]),
        (["--config.stepz", "5"], ["'stepz'", "'steps'"]),
        (["--config.data.nam=x"], ["'nam'", "'name'", "source_dir"]),
        (["--config.methods.topk.codek=x"], ["'codek'", "'codec'"]),
        (["--config.steps.x=5"], ["steps.x", "'x'"]),
        ([config_flag("digits.py:dcg")], ["'dcg'", "'dgc'", "topk"]),
        ([config_flag("digits.py:topk,")], ["''", "topk"]),
        ([config_flag("digit.py")], ["digit.py", "digits.py", "cifar10.py"]),
    ],
)
def test_a_typo_is_answered_by_what_there_is(args, words):
    with pytest.raises(SetupError) as error:
        parse(*args)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.steps=many", "config.steps=many"),
        ("--stepz=1", "'stepz'"),
        ("--config.=1", "KEY=VALUE"),
        ("--config.[=1", "KEY=VALUE"),
    ],
)
def test_a_wrong_flag_is_refused(flag, words):
    with pytest.raises(SetupError, match=words):
        parse(flag)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--config.density=2.0", ["density", "2.0", "config.methods.topk"]),
        ("--config.methods.topk.codec=bf16", ["codec", "'bf16'", "bfloat16"]),
        ("--config.methods.topk.selection.name=top", ["selection", "'top'", "top_k"]),
        ("--config.methods.topk.transform=none", ["transform", "'none'", "power_sgd"]),
        ("--config.methods.topk.scope=layer", ["scope", "layer"]),
    ],
)
def test_a_wrong_value_names_its_key(override, words):
    config = parse(config_flag("digits.py:topk"), override).config
    with pytest.raises(SetupError) as error:
        build.optimizer(config, "topk")
    for word in words:
        assert word in str(error.value)


def test_a_wrong_model_names_the_known_ones():
    config = parse("--config.model.name=vgg").config
    with pytest.raises(SetupError, match="config.model.name='vgg'.*convnet, lenet"):
        build.task(config)


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        *(
            (key, value, "at least 1")
            for key in (
                "num_workers",
                "batch_size",
                "steps",
                "eval_every",
                "eval_batch_size",
                "checkpoint_every",
                "checkpoints_kept",
            )
            for value in (0, -1)
        ),
        ("lost_after_s", 0, "at least 1"),
        ("check_replicas_every", -1, "at least 0"),
        ("max_consecutive_skips", -1, "at least 0"),
        ("seed", -1, "[0, 2**32)"),
        ("seed", 2**32, "[0, 2**32)"),
        ("data.max_value", 0, "greater than 0"),
        ("data.size", (32,), "height and a width"),
        ("data.size", (32, 0), "at least 1"),
        ("data.size", (32, (1, 2)), "at least 1"),
        ("learning_rate.peak", 0.0, "greater than 0"),
        ("learning_rate.peak", float("nan"), "finite"),
        ("learning_rate.peak", float("inf"), "finite"),
        ("learning_rate.warmup_steps", -1, "[0, config.steps)"),
        ("learning_rate.warmup_steps", 400, "[0, config.steps)"),
        ("weight_decay", -0.1, "at least 0"),
        ("weight_decay", float("nan"), "finite"),
        ("run", (), "at least one method"),
        ("run", ("dense", "topk_"), "dense, dgc, topk"),
    ],
)
def test_a_value_no_run_can_be_made_of_is_refused(key, value, must):
    config = parse().config
    config.update_from_flattened_dict({key: value})
    with pytest.raises(SetupError) as error:
        check(config)
    for words in (f"config.{key}=", repr(value), must):
        assert words in str(error.value)


@pytest.mark.parametrize("path", SETUPS, ids=lambda p: p.stem)
@pytest.mark.parametrize("steps", [1, 11, 400])
def test_the_defaults_pass_whatever_the_steps(path, steps):
    config = runpy.run_path(str(path))["get_config"]()
    config.steps = steps
    check(config)


@pytest.mark.parametrize(
    "override", ["hidden=0", "hidden=-1", "channels=(0,)", "num_classes=0"]
)
def test_a_model_that_cannot_be_made_shows_its_settings(override):
    config = parse(f"--config.model.{override}").config
    batch = {"image": jnp.zeros((1, 8, 8, 1), jnp.uint8)}
    with pytest.raises(SetupError, match="config.model.*" + re.escape(override)):
        jax.eval_shape(build.task(config).init, jax.random.key(0), batch)


@pytest.mark.parametrize("name", ["common.py:topk", "methods.py"])
def test_what_setups_are_made_from_is_no_setup(name):
    with pytest.raises(
        SetupError, match="is no setup. Setups here: cifar10.py, digits"
    ):
        parse(config_flag(name))
