"""CamVid and PSPNet: the class of every pixel, by learned compression.

    scripts/train --config=configs/pspnet_camvid.py --config.data.source_dir=FOLDER
    scripts/train --config=configs/pspnet_camvid.py:generated,lgc_server,lgc_ring

The first wants the CamVid of SegNet's authors in FOLDER (`train/camvid.py`). It was not
run here. Batch, rate and weight decay are those of PSPNet's authors; 200 epochs are our
choice. Expect less than the literature's mean IoU, 69.1 % (Zhao et al., "ICNet", 2018,
quoted from memory): that has twice the resolution, a backbone trained on ImageNet
before, and statistics of batch normalisation over all workers; here everyone has those
of 4 images.

The second trains on generated images of 48 x 64 pixels that stand in for CamVid, and
says nothing about CamVid. With `lgc_server` the loss went from 2.41 over 5.58 (step 8)
to 2.63 (16), 2.31 (24) and 2.03 (48), mean IoU from 1.6 % to 16 %: 400 seconds of a CPU
core and 7.0 GB. With `lgc_ring` and --config.steps=24: 3.36, 2.43, 2.34.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(methods: str = "") -> ConfigDict:
    methods, generated = common.wants_stand_in(methods)
    config = common.get_config(methods, default_names="dense,lgc_server,lgc_ring")
    config.setup = "pspnet_camvid"
    config.task = "segmentation"
    config.data.name = "camvid"
    config.data.augment = True
    config.data.void = 11
    config.model.update(name="pspnet", depth=50, num_classes=11)
    config.num_workers, config.batch_size, config.eval_batch_size = 4, 4, 4
    config.steps = 4400  # 200 epochs of 22 steps of 4 x 4 images
    config.eval_every = 220
    config.checkpoint_every = 440
    config.learning_rate.peak = 0.01
    config.weight_decay = 1e-4
    config.density = 0.001
    if generated:
        config.data.size = (48, 64)
        common.stand_in(config, "generated_camvid", batch_size=2, eval_batch_size=2)
    return config
