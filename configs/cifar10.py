"""CIFAR-10: 50 000 small photographs of 32 x 32 pixels, and a small convolutional net.

    scripts/train --config=configs/cifar10.py:dgc --config.data.source_dir=FOLDER

FOLDER holds cifar-10-binary.tar.gz; without it the error says where it is.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(methods: str = "") -> ConfigDict:
    config = common.get_config(methods, default_names="dense,topk,dgc")
    config.setup = "cifar10"
    config.data.name = "cifar10"
    config.model.update(name="convnet", channels=(32, 64), hidden=64, num_classes=10)
    config.steps = 2000
    config.eval_every = 200
    return config
