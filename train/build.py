"""From a config to objects: the only file that reads one method's settings.

Tables instead of names looked up in modules: what can be chosen is what stands here,
and a wrong name is answered by the list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import optax
from ml_collections import ConfigDict

import jaxsparse as js
from train import data
from train.errors import SetupError
from train.models.convnet import ConvNet
from train.models.lenet import LeNet
from train.models.pspnet import PSPNet
from train.models.resnet import ResNet
from train.parallel import AXIS
from train.splits import LazySplit, Split
from train.tasks import Task, classification, segmentation

MODELS = {"convnet": ConvNet, "lenet": LeNet, "resnet": ResNet, "pspnet": PSPNet}

TASKS = {
    "classification": lambda model, data: classification(
        model, max_value=data.max_value
    ),
    "segmentation": lambda model, data: segmentation(
        model, max_value=data.max_value, void=data.void
    ),
}

SELECTIONS = {
    "top_k": js.top_k,
    "sampled_top_k": js.sampled_top_k,
    "threshold": js.threshold,
    "random_k": js.random_k,
    "random_block": js.random_block,
}

PRIORITIES = {"ema": js.ema, "frequency": js.frequency, "penalty": js.penalty}

EXCHANGES = {
    "all_gather": js.all_gather,
    "server": js.server,
    "shared_support": js.shared_support,
    "g_top_k": js.g_top_k,
}

LGC_FORMS = {"server": js.lgc_server, "ring": js.lgc_ring}

CODES = {
    "convolutional": js.lgc.convolutional,
    "linear": js.lgc.linear,
    "mean": js.lgc.mean,
    "identity": js.lgc.identity,
}

CODECS = {
    "float32": js.codec.float32,
    "bfloat16": js.codec.bfloat16,
    "float16": js.codec.float16,
    "int8": js.codec.int8,
    "sign_mean": js.codec.sign_mean,
}


def task(config: ConfigDict) -> Task:
    """The model and what it is trained for."""
    settings = config.model.to_dict()
    model = _choose("config.model.name", MODELS, settings.pop("name"))
    make = _choose("config.task", TASKS, config.task)

    def init(key, batch):
        # Flax looks at a model's sizes when its parameters are made, and not before.
        with _names_model(config):
            return built.init(key, batch)

    with _names_model(config):
        _check_sizes(settings)
        built = make(model(**settings), config.data)
    return built._replace(init=init)


def splits(config: ConfigDict) -> dict[str, Split | LazySplit]:
    """The data, prepared first where needed."""
    return data.load(
        config.data.name,
        data_dir=config.data.data_dir,
        source_dir=config.data.source_dir,
        test_split=config.data.test_split,
        size=config.data.size,
        augment=config.data.augment,
    )


def _check_sizes(settings: dict) -> None:
    """Some versions of Flax make models of no size without a word."""
    for key, value in settings.items():
        for size in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(size, int) and size < 1:
                raise ValueError(f"{key}={value} must be at least 1")


def optimizer(config: ConfigDict, method: str) -> optax.GradientTransformation:
    """The whole chain: what crosses the network, then plain SGD."""
    settings = config.methods[method].to_dict()
    momentum = settings.pop("sgd_momentum")
    key = f"config.methods.{method}.transform"
    transform = _choose(key, TRANSFORMS, settings.pop("transform"))
    with _names_method(method):
        exchange = transform(config.num_workers, **settings)
        if config.learning_rate.follow:
            exchange = js.follow_learning_rate(exchange, learning_rate(config))
        # Some refuse a number of workers only when their state is made.
        jax.eval_shape(exchange.init, {})

    def init(params):
        with _names_method(method):  # patterns that no parameter's path matches
            return exchange.init(params)

    tx = optax.chain(
        optax.GradientTransformationExtraArgs(init, exchange.update),
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(learning_rate(config), momentum=momentum or None),
    )
    if config.skip_nonfinite:
        tx = js.skip_nonfinite(tx, axis_name=AXIS)
    return tx


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Linear warm-up, then a cosine down to 0."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate.peak,
        warmup_steps=config.learning_rate.warmup_steps,
        decay_steps=config.steps,
    )


@contextlib.contextmanager
def _names_method(method: str) -> Iterator[None]:
    """Whatever a method makes of wrong settings becomes an error that names it."""
    try:
        yield
    except (SetupError, TypeError, ValueError) as error:
        raise SetupError(f"config.methods.{method}: {error}") from error


@contextlib.contextmanager
def _names_model(config: ConfigDict) -> Iterator[None]:
    """Whatever a model makes of wrong settings becomes an error that shows them."""
    try:
        yield
    except Exception as error:
        settings = ", ".join(f"{k}={v!r}" for k, v in config.model.items())
        raise SetupError(
            f"config.model: no model can be made of {settings} "
            f"({type(error).__name__}: {error}). Sizes must be positive; set one with "
            "--config.model.KEY=VALUE."
        ) from error


def _dense(num_workers, **settings):
    del num_workers  # known from the axis
    return js.stateless(js.dense(axis_name=AXIS, **settings))


def _sparse(num_workers, *, selection, exchange, codec, scope, decay):
    if "priority" in selection:
        selection["priority"] = _named(
            "selection.priority", PRIORITIES, selection["priority"]
        )
    reducer = js.sparse(
        _named("selection", SELECTIONS, selection),
        _named("exchange", EXCHANGES, exchange),
        axis_name=AXIS,
        num_workers=num_workers,
        codec=_choose("codec", CODECS, codec)(),
        scope=scope,
    )
    return js.error_feedback(reducer, decay=decay)


def _dgc(num_workers, *, clip_norm, codec, **settings):
    return js.dgc(
        axis_name=AXIS,
        num_workers=num_workers,
        clip_norm=clip_norm or None,
        codec=_choose("codec", CODECS, codec)(),
        **settings,
    )


def _power_sgd(num_workers, **settings):
    del num_workers  # known from the axis
    return js.power_sgd(axis_name=AXIS, **settings)


def _ef_sign_sgd(num_workers, **settings):
    del num_workers  # known from the axis
    return js.ef_sign_sgd(axis_name=AXIS, **settings)


def _lgc(
    num_workers,
    *,
    form,
    momentum,
    dense_until,
    training_until,
    density,
    scope,
    dense_layers,
    top_k_layers,
    code,
    codec,
    gate,
    **settings,
):
    codec = _choose("codec", CODECS, codec)()
    settings = {key: value for key, value in settings.items() if value != -1}
    common = {"axis_name": AXIS, "num_workers": num_workers}
    common |= {"codec": codec, "scope": scope}
    encoded = _choose("form", LGC_FORMS, form)(
        density,
        stages=(dense_until, training_until),
        code=_named("code", CODES, code) if code["name"] else None,
        gate=gate or None,
        **common,
        **settings,
    )
    if not dense_layers and not top_k_layers:
        return js.momentum_correction(encoded, momentum)
    dense = js.dense(axis_name=AXIS)
    top_k = js.sparse(js.top_k(density), js.all_gather(), **common)
    # The same phases as those of the encoded layers, so that one number tells both.
    stages = [(None, top_k)]
    if training_until > dense_until:
        stages = [(training_until, top_k), *stages]
    if dense_until:
        stages = [(dense_until, dense), *stages]
    return optax.partition(
        {
            "dense": optax.chain(js.stateless(dense), optax.trace(momentum)),
            "top_k": js.momentum_correction(js.phases(stages), momentum),
            "encoded": js.momentum_correction(encoded, momentum),
        },
        js.lgc.layers(dense=dense_layers, top_k=top_k_layers),
    )


TRANSFORMS = {
    "dense": _dense,
    "sparse": _sparse,
    "dgc": _dgc,
    "power_sgd": _power_sgd,
    "ef_sign_sgd": _ef_sign_sgd,
    "lgc": _lgc,
}


def _named(key: str, table: dict, settings: dict):
    """What ``settings["name"]`` makes of the other settings."""
    settings = dict(settings)
    return _choose(f"{key}.name", table, settings.pop("name"))(**settings)


def _choose(key: str, table: dict, name: str):
    if name not in table:
        raise SetupError(
            f"{key}={name!r} is not known; choose from {', '.join(table)}."
        )
    return table[name]
