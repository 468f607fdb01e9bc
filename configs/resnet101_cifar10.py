"""CIFAR-10 and ResNet-101, by learned compression; all else as with ResNet-50.

    scripts/train --config=configs/resnet101_cifar10.py --config.data.source_dir=FOLDER
    scripts/train --config=configs/resnet101_cifar10.py:generated,lgc_server,lgc_ring

The first was not run here. The literature has 93.75 %
(github.com/kuangliu/pytorch-cifar, 350 epochs), and 93.57 % with learned compression
(Abrahamyan et al., 2022).

The second trains on generated images. With `lgc_server` and --config.steps=24 the loss
fell from 2.30 to 1.12 in 8 steps, 0.31 in 16 and 0.24 in all 24: ten minutes of a CPU
core, 10.4 GB.
`lgc_ring` was not run.
"""

from ml_collections import ConfigDict

from configs import resnet50_cifar10


def get_config(methods: str = "") -> ConfigDict:
    config = resnet50_cifar10.get_config(methods)
    config.setup = config.setup.replace("resnet50", "resnet101")
    config.model.depth = 101
    return config
