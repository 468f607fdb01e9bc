"""The methods by name, each as its difference from the one it stands on.

`train/build.py` turns `transform` into the transformation of that name and hands it the
other keys. `sgd_momentum` is that of the optimizer behind it, on the aggregated gradient.
"""

import difflib

from ml_collections import ConfigDict, FieldReference


def all_methods(density: FieldReference) -> dict[str, ConfigDict]:
    """Every method there is.

    Args:
      density: fraction of the entries sent. A reference, so that overriding
        `config.density` reaches every method.
    """
    dense = ConfigDict({"transform": "dense", "sgd_momentum": 0.9})

    # Top-k with error feedback: the largest entries go, the rest waits.
    topk = ConfigDict(
        {
            "transform": "sparse",
            "sgd_momentum": 0.9,
            "decay": 1.0,  # of what waits, per step; 1 forgets nothing
            "scope": "global",  # one budget for the whole model, or "leaf": one per layer
            "codec": "bfloat16",
            "selection": {"name": "top_k", "density": density},
        }
    )

    # The largest entries by a threshold estimated on a sample.
    sampled_topk = topk.copy_and_resolve_references()
    sampled_topk.selection = {"name": "sampled_top_k", "density": density}

    # Entries drawn at random, the same on all workers: no index is sent.
    random_k = topk.copy_and_resolve_references()
    random_k.selection = {"name": "random_k", "density": density, "seed": 0}

    random_block = topk.copy_and_resolve_references()
    random_block.selection = {"name": "random_block", "density": density, "seed": 0}

    # Every entry above a fixed magnitude, up to a capacity.
    threshold = topk.copy_and_resolve_references()
    threshold.selection = {"name": "threshold", "value": 0.01, "max_density": density}

    # Top-k with one sign for each entry and one magnitude for all.
    topk_sign = topk.copy_and_resolve_references()
    topk_sign.selection = {"name": "top_k", "density": density}
    topk_sign.codec = "sign_mean"

    # Deep Gradient Compression: momentum lives before the exchange, density warms up.
    dgc = ConfigDict(
        {
            "transform": "dgc",
            "sgd_momentum": 0.0,  # it is before the exchange:
            "momentum": 0.9,
            "density": density,
            "sample": 0.1,  # fraction of the entries that the threshold is estimated on
            "scope": "global",  # or "leaf"
            "codec": "bfloat16",
            "nesterov": False,
            "masking": True,
            "clip_norm": 0.0,  # per worker, before its momentum; 0 for none
            "warmup_densities": (0.25, 0.0625, 0.015625, 0.004),
            "warmup_steps": 100,
        }
    )

    # Low rank: two thin factors instead of each matrix.
    power_sgd = ConfigDict({"transform": "power_sgd", "sgd_momentum": 0.9, "rank": 1})

    # One bit an entry.
    ef_sign_sgd = ConfigDict({"transform": "ef_sign_sgd", "sgd_momentum": 0.9})

    return {
        "dense": dense,
        "topk": topk,
        "sampled_topk": sampled_topk,
        "topk_sign": topk_sign,
        "random_k": random_k,
        "random_block": random_block,
        "threshold": threshold,
        "dgc": dgc,
        "power_sgd": power_sgd,
        "ef_sign_sgd": ef_sign_sgd,
    }


def get_methods(names: tuple[str, ...], density: FieldReference) -> ConfigDict:
    """The named methods, or an error that lists the known ones."""
    known = all_methods(density)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"--config=FILE:METHOD has no method {name!r}.{hint} "
                f"Known methods: {', '.join(known)}."
            )
    return ConfigDict({name: known[name] for name in names})
