"""ImageNet and ResNet-101, by learned compression; all else as with ResNet-50.

    scripts/train --config=configs/resnet101_imagenet.py --config.data.data_dir=FOLDER
    scripts/train --config=configs/resnet101_imagenet.py:generated,lgc_server,lgc_ring

Neither was run here. The literature has 77.37 % (torchvision's first weights).
"""

from ml_collections import ConfigDict

from configs import resnet50_imagenet


def get_config(methods: str = "") -> ConfigDict:
    config = resnet50_imagenet.get_config(methods)
    config.setup = config.setup.replace("resnet50", "resnet101")
    config.model.depth = 101
    return config
