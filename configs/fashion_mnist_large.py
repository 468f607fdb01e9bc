"""Fashion-MNIST and a net of 3.2 million parameters: for slow links.

    apt-get install dataset-fashion-mnist
    scripts/train --config=configs/fashion_mnist_large.py:topk
    scripts/study network        the same on four test hosts, time to an accuracy

Nearly all parameters lie in one hidden layer, so that a gradient takes little time and
its 12.8 MB much on a slow link.
"""

from ml_collections import ConfigDict

from configs import fashion_mnist


def get_config(methods: str = "") -> ConfigDict:
    config = fashion_mnist.get_config(methods)
    config.setup = "fashion_mnist_large"
    config.model.update(name="convnet", channels=(8, 16), hidden=1024)
    config.num_workers = 4
    config.batch_size = 32
    config.steps = 120
    config.eval_every = 20
    config.eval_batch_size = 500
    return config
