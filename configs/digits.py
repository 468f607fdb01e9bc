"""Handwritten digits, 8 x 8 pixels: the default run, nothing to download.

scripts/train                                   # dense, topk and dgc in turn
scripts/train --config=configs/digits.py:topk   # one method
"""

from ml_collections import ConfigDict

from configs import common


def get_config(methods: str = "") -> ConfigDict:
    config = common.get_config(methods, default_names="dense,topk,dgc")
    config.setup = "digits"
    config.data.name = "digits"
    config.data.max_value = 16
    config.model.update(name="convnet", channels=(16, 32), hidden=64, num_classes=10)
    return config
