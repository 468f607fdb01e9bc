"""Every default there is. A setup changes what it must, the command line the rest.

`--config.KEY=VALUE` overrides any key, nested ones as `--config.data.name=VALUE`.
"""

from ml_collections import ConfigDict

from configs import methods

STAND_IN = "generated"  # in the place of a method: run on generated data, in small


def get_config(names: str, default_names: str) -> ConfigDict:
    """The defaults of every setup.

    Args:
      names: the methods to run, comma-separated, as given after the colon of
        ``--config=FILE:METHOD``; empty for the setup's own choice.
      default_names: the setup's own choice.
    """
    config = ConfigDict()
    config.setup = ""  # the setup's name, and its folder's under runs/
    config.task = "classification"  # of images; or "segmentation", of their pixels
    config.seed = 0  # of initial parameters, of the workers' shards, of their order

    # Workers. Each is a device of its own; on a CPU, devices are made as needed.
    config.num_workers = 8
    config.batch_size = 16  # examples of one worker's batch
    config.lost_after_s = 100  # without a sign of life a process is given up; seconds

    # How long, and what happens on the way. All in steps.
    config.steps = 400
    config.eval_every = 25
    config.eval_batch_size = 128  # examples of one worker's batch
    config.checkpoint_every = 200
    config.checkpoints_kept = 2
    # Before each checkpoint: are the workers' copies of the state the same? 0: never.
    config.check_replicas_every = config.get_ref("checkpoint_every") * 1

    config.data = ConfigDict()
    config.data.name = ""
    config.data.data_dir = "data"  # prepared sets, shared by all runs
    config.data.source_dir = ""  # published source files, if they lie on the disk
    config.data.test_split = "test"  # what is tested on
    config.data.max_value = 255  # of a pixel
    config.data.size = ()  # height and width to bring images to; (): as they are
    config.data.augment = False  # training images shifted or cropped, and mirrored
    config.data.void = -1  # the label of pixels that do not count

    config.model = ConfigDict()
    config.model.name = ""

    # The learning rate rises linearly to `peak`, then falls to 0 along a cosine.
    config.learning_rate = ConfigDict()
    config.learning_rate.peak = 0.1
    config.learning_rate.warmup_steps = config.get_ref("steps") // 12
    # Whether what waits in a memory keeps the rate at which it was computed.
    config.learning_rate.follow = False
    config.weight_decay = 0.0  # added after the exchange, the same on all workers

    # A step in which any worker has an infinite or undefined gradient is left out.
    config.skip_nonfinite = True
    config.max_consecutive_skips = 50  # so many in a row end the run; 0: never

    # Fraction of the gradient's entries that the sparse methods send, in (0, 1].
    config.density = 0.01
    config.run = tuple((names or default_names).split(","))
    config.methods = methods.get_methods(config.run, config)
    return config


def wants_stand_in(names: str) -> tuple[str, bool]:
    """Takes the word ``generated`` out of the names after ``--config=FILE:``.

    Args:
      names: methods and perhaps that word, comma-separated.

    Returns:
      The methods, and whether the word was there.
    """
    words = names.split(",")
    methods = ",".join(word for word in words if word != STAND_IN)
    return methods, STAND_IN in words


def stand_in(config: ConfigDict, name: str, **settings) -> ConfigDict:
    """A setup's small run on generated data, which any machine can make.

    Args:
      config: the setup; its model has batch normalisation.
      name: of the generated set.
      **settings: what else differs; keys of the outermost level.
    """
    config.setup = f"generated_{config.setup}"
    config.data.name = name
    config.learning_rate.peak = 0.02
    # Running averages start from 0 and 1: with 0.9 so few steps would not get far away.
    config.model.norm_momentum = 0.5
    # Six steps are dense, ten train the code, the others send what it makes.
    config.update({"num_workers": 2, "steps": 48, "eval_every": 8, **settings})
    return config
