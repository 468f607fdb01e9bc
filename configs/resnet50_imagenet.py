"""ImageNet and ResNet-50, by learned compression.

    scripts/train --config=configs/resnet50_imagenet.py --config.data.data_dir=FOLDER
    scripts/train --config=configs/resnet50_imagenet.py:generated,lgc_server,lgc_ring

The first wants TFDS's imagenet2012 as array_record files in FOLDER; TensorFlow is
needed to write them, once, and not to read them. It was not run here. The literature
has 76.13 % (torchvision's first weights: 90 epochs of 256 images a step from a rate of
0.1, a tenth of it every 30 epochs; here a cosine). Images are read, cropped and
mirrored as they are wanted: the set is larger than the memory.

The second is for generated images of 40 classes that stand in for ImageNet, and says
nothing about ImageNet. It was not run here either.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(methods: str = "") -> ConfigDict:
    methods, generated = common.wants_stand_in(methods)
    config = common.get_config(methods, default_names="dense,lgc_server,lgc_ring")
    config.setup = "resnet50_imagenet"
    config.data.name = "imagenet2012"  # TFDS's name of it
    config.data.test_split = "validation"  # the test split has no labels
    config.data.size = (224, 224)
    config.data.augment = True
    config.model.update(name="resnet", depth=50, num_classes=1000)
    config.batch_size = 32
    config.steps = 450_360  # 90 epochs of 5004 steps of 8 x 32 images
    config.eval_every = 5004
    config.checkpoint_every = 5004
    config.weight_decay = 1e-4
    config.density = 0.001
    if generated:
        config.data.size = (64, 64)
        common.stand_in(config, "generated_imagenet", batch_size=8, eval_batch_size=20)
    return config
