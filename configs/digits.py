"""Handwritten digits, 8 x 8 pixels: the default run, nothing to download.

    scripts/train                                   # dense, topk and dgc in turn
    scripts/train --config=configs/digits.py:topk   # one method

On two CPU cores: 40 seconds for the three, most of it compiling. Test accuracy, mean of
the seeds 0, 1, 2: dense 98.4 %, topk 98.3 %, dgc 98.5 %. At 1 % density a step sends
129 times fewer bytes than the dense gradient has.
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
