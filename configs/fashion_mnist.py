"""Fashion-MNIST: 60 000 pictures of clothes of 28 x 28 pixels, and LeNet.

apt-get install dataset-fashion-mnist
scripts/train --config=configs/fashion_mnist.py
"""

from ml_collections import ConfigDict

from configs import mnist


def get_config(methods: str = "") -> ConfigDict:
    config = mnist.get_config(methods)
    config.setup = "fashion_mnist"
    config.data.name = "fashion_mnist"
    config.data.source_dir = "/usr/share/datasets/fashion-mnist"  # of Debian's package
    return config
