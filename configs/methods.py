"""The methods by name, each as its difference from the one it stands on.

`train/build.py` turns `transform` into the transformation of that name and hands it the
other keys. `sgd_momentum` is that of the optimizer behind it, which works on the
aggregated gradient.
"""

import difflib
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference

from train.errors import SetupError

# Learned compression: the first layer stays dense, the last gets top-k only. Regular
# expressions on the paths of a model's parameters, each layer with its bias. Scales and
# biases of batch normalisation are encoded like the layers around them, the stem's
# apart: dense, ResNet-50's would be 212 kB a step, and all the rest is 21 kB (CIFAR-10,
# 8 workers, density 0.1 %). With `scope` "global" they get places by their size alone.
LAYERS = {
    "convnet": {"dense_layers": ("^Conv_0/",), "top_k_layers": ("^Dense_1/",)},
    "lenet": {"dense_layers": ("^Conv_0/",), "top_k_layers": ("^Dense_2/",)},
    "resnet": {"dense_layers": ("^backbone/stem",), "top_k_layers": ("^head/",)},
    "pspnet": {
        "dense_layers": ("^backbone/stem",),
        "top_k_layers": ("^head/", "^auxiliary_head/"),
    },
}
# Of so few parameters a layer is a large part: the improved presets encode them all.
SMALL = ("convnet", "lenet")


class _LookUp(NamedTuple):
    """What a `FieldReference` does when it is asked for its value."""

    fn: Any
    args: list[FieldReference]


def all_methods(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Every method there is.

    Args:
      config: the common part. Its values are taken by reference, so that overriding
        `config.density` or `config.steps` reaches every method.
    """
    density, steps = config.get_ref("density"), config.get_ref("steps")

    def layers(key: str, preset: str) -> FieldReference:
        """The model's patterns in `LAYERS`; looked up late, setups choose the model."""

        def patterns(_, model: str) -> tuple[str, ...]:
            whole = preset != "paper" and model in SMALL
            return () if whole else LAYERS.get(model, {}).get(key, ())

        return FieldReference((), op=_LookUp(patterns, [config.model.get_ref("name")]))

    def sparse(name: str, momentum=0.9, decay=1.0, **settings) -> dict[str, Any]:
        """Error feedback: some entries are sent, the others wait."""
        return {
            "transform": "sparse",
            "sgd_momentum": momentum,
            "decay": decay,  # of what waits, per step; 1 forgets nothing
            "scope": "global",  # one budget for the whole model; "leaf": one per layer
            "codec": "bfloat16",
            "exchange": {"name": "all_gather"},
            "selection": {"name": name, **settings},
        }

    def shared(exchange: str, priority=None, **settings) -> dict[str, Any]:
        """The largest entries, by another exchange, by scores that workers share."""
        method = sparse("top_k", density=density)
        method["exchange"] = {"name": exchange, **settings}
        if priority:
            method["selection"]["priority"] = priority
        return method

    def lgc(form: str, preset="improved", **settings) -> dict[str, Any]:
        """Learned compression; what is empty, 0 or -1 is the preset's."""
        return {
            "transform": "lgc",
            "form": form,
            "sgd_momentum": 0.0,
            "momentum": 0.9,
            "preset": preset,
            "density": density,
            "dense_until": steps // 8,  # then top-k, on which the code is trained
            "training_until": steps // 3,  # then latents
            # Regular expressions on paths of parameters: what is averaged densely, and
            # what is sent by top-k alone; the rest is encoded.
            "dense_layers": layers("dense_layers", preset),
            "top_k_layers": layers("top_k_layers", preset),
            "scope": "global",
            "code": {"name": ""},
            "codec": "float32" if preset == "paper" else "bfloat16",  # of plain values
            "gate": 0.0,  # error above which plain values are sent
            "recheck": 101,
            "seed": 0,
            **settings,
        }

    return {
        "dense": {"transform": "dense", "sgd_momentum": 0.9},
        # The largest entries.
        "topk": sparse("top_k", density=density),
        # The largest, by a threshold that is estimated on a sample.
        "sampled_topk": sparse("sampled_top_k", density=density, sample=0.1),
        # The largest, each as its sign, and one magnitude for all of them.
        "topk_sign": sparse("top_k", density=density) | {"codec": "sign_mean"},
        # Through a server whose role the workers share: only the union comes down.
        "server": shared("server"),
        # The same, at most so many times k entries of it.
        "limit": shared("server", limit=2.0),
        # The same, workers choosing alike: by what was aggregated lately.
        "ema": shared("server", {"name": "ema", "decay": 0.9, "weight": 64.0}),
        # Both: a third of the union at the accuracy of plain top-k (docs/results.md).
        "ema_limit": shared(
            "server", {"name": "ema", "decay": 0.9, "weight": 64.0}, limit=2.5
        ),
        "frequency": shared(
            "server", {"name": "frequency", "window": 32, "weight": 16.0}
        ),
        "penalty": shared(
            "server",
            {"name": "penalty", "decay": 0.9, "threshold": 0.1, "factor": 0.3},
        ),
        # One worker after the other chooses for all.
        "leader": shared("shared_support"),
        # Merged in a tree, the k largest at every fork; for 2, 4, 8, ... workers.
        "g_top_k": shared("g_top_k"),
        # All above a magnitude, up to a capacity.
        "threshold": sparse("threshold", value=0.01, max_density=density),
        # Drawn at random, the same on all workers: no index is sent. An entry waits for
        # 1 / density steps; momentum on top of what has gathered would overshoot.
        "random_k": sparse("random_k", density=density, seed=0, momentum=0.0),
        "random_block": sparse(
            "random_block", density=density, seed=0, momentum=0.0, decay=0.95
        ),
        # Deep Gradient Compression: momentum before the exchange, density warms up.
        "dgc": {
            "transform": "dgc",
            "sgd_momentum": 0.0,
            "momentum": 0.9,
            "nesterov": False,
            "masking": True,
            "clip_norm": 0.0,  # of a worker's gradient, before its momentum; 0: none
            "density": density,
            "warmup_densities": (0.25, 0.0625, 0.015625, 0.004),
            "warmup_steps": steps // 8,
            "sample": 0.1,  # fraction of the entries that the threshold is estimated on
            "scope": "global",
            "codec": "bfloat16",
        },
        # Two thin factors instead of each matrix.
        "power_sgd": {"transform": "power_sgd", "sgd_momentum": 0.9, "rank": 2},
        # An autoencoder trained in the run: a leader's latent, everyone's innovation.
        "lgc_server": lgc("server", innovation=-1.0, replay=0.0),
        # Everyone's latents on one support, averaged on the way.
        "lgc_ring": lgc("ring", support="contributed", latent_bits=-1),
        # The same as the paper has them, as far as that trains.
        "lgc_server_paper": lgc("server", preset="paper"),
        "lgc_ring_paper": lgc("ring", preset="paper"),
        # One bit an entry.
        "ef_sign_sgd": {"transform": "ef_sign_sgd", "sgd_momentum": 0.0},
    }


def get_methods(names: tuple[str, ...], config: ConfigDict) -> ConfigDict:
    """The named methods, or an error that lists the known ones."""
    known = all_methods(config)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SetupError(
                f"--config=FILE:METHOD has no method {name!r}.{hint} "
                f"Known methods: {', '.join(known)}."
            )
    return ConfigDict({name: known[name] for name in names})
