"""MNIST: 60 000 handwritten digits of 28 x 28 pixels, and LeNet.

    scripts/train --config=configs/mnist.py:dgc --config.data.source_dir=FOLDER

FOLDER holds the four published files; without them the error says where they are.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(methods: str = "") -> ConfigDict:
    config = common.get_config(methods, default_names="dense,topk,dgc")
    config.setup = "mnist"
    config.data.name = "mnist"
    config.model.update(name="lenet", num_classes=10)
    config.steps = 1200
    config.eval_every = 100
    return config
