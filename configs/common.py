"""Every default there is. A setup changes what it must, the command line the rest.

`--config.KEY=VALUE` overrides any key, nested ones as `--config.data.name=VALUE`.
"""

from ml_collections import ConfigDict

from configs import methods


def get_config(names: str, default_names: str) -> ConfigDict:
    """The defaults of every setup.

    Args:
      names: the methods to run, comma-separated, as given after the colon of
        ``--config=FILE:METHOD``; empty for the setup's own choice.
      default_names: the setup's own choice.
    """
    config = ConfigDict()
    config.setup = ""  # the setup's name, and its folder's under runs/
    config.seed = 0  # of initial parameters, of the workers' shards, of their order

    # Workers. Each is a device of its own; on a CPU, devices are made as needed.
    config.num_workers = 8
    config.batch_size = 16  # examples of one worker's batch

    # How long, and what happens on the way. All in steps.
    config.steps = 400
    config.eval_every = 25
    config.eval_batch_size = 128  # examples of one worker's batch
    config.checkpoint_every = 200
    config.checkpoints_kept = 2

    config.data = ConfigDict()
    config.data.name = ""
    config.data.data_dir = "data"  # prepared sets, shared by all runs
    config.data.source_dir = ""  # published source files, if they lie on the disk
    config.data.max_value = 255  # of a pixel

    config.model = ConfigDict()
    config.model.name = ""

    # The learning rate rises linearly to `peak`, then falls to 0 along a cosine.
    config.learning_rate = ConfigDict()
    config.learning_rate.peak = 0.1
    config.learning_rate.warmup_steps = config.get_ref("steps") // 12
    config.weight_decay = 0.0  # added after the exchange, the same on all workers

    # A step in which any worker has an infinite or undefined gradient is left out.
    config.skip_nonfinite = True

    # Fraction of the gradient's entries that the sparse methods send, in (0, 1].
    config.density = 0.01
    config.run = tuple((names or default_names).split(","))
    config.methods = methods.get_methods(config.run, config)
    return config
