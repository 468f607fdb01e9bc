import threading
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import training

from train import agreement
from train.errors import SetupError


class Service:
    """JAX's service, as far as it is used, in one process."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()
        self.read = []

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        assert isinstance(timeout_in_ms, int)
        self.read.append(key)
        with self._changed:
            known = lambda: key in self._values  # noqa: E731
            if not self._changed.wait_for(known, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue()")
            return self._values[key]


def compared(monkeypatch, *parts, processes=None, timeout_s=10):
    """What each of some processes is told; None where nothing differs."""
    service, processes = Service(), processes or len(parts)
    monkeypatch.setattr(agreement, "_rounds", iter([7] * len(parts)))

    def one(process):
        try:
            agreement.compare(
                parts[process], "set-up", service, process, processes, timeout_s
            )
        except SetupError as error:
            return str(error)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(one, range(len(parts)))), service


def test_equals_read_digests_alone(monkeypatch):
    told, service = compared(monkeypatch, *[{"jax": "1", "config.seed": "0"}] * 3)
    assert told == [None] * 3
    assert {key.split("/")[2] for key in service.read} == {"digest"}


def test_all_are_told_which_process_differs_in_what(monkeypatch):
    usual = {"jax": "0.10.1", "config.seed": "0", "parameter w": "float32[3]"}
    told, _ = compared(
        monkeypatch,
        usual,
        {**usual, "jax": "0.10.2"},
        usual,
        {**usual, "config.seed": "3", "parameter b": "float32[]"},
    )
    assert len(set(told)) == 1
    assert told[0].splitlines()[:-1] == [
        "The processes differ in their set-up:",
        "  jax: 0.10.1 in process 0, 0.10.2 in process 1",
        "  config.seed: 0 in process 0, 3 in process 3",
        "  parameter b: none in process 0, float32[] in process 3",
    ]


def test_many_differences_are_counted(monkeypatch):
    parts = [{f"parameter {i}": str(bits) for i in range(20)} for bits in (0, 1)]
    told, _ = compared(monkeypatch, *parts)
    assert len(told[0].splitlines()) == 1 + agreement.SHOWN + 2
    assert f"  and {20 - agreement.SHOWN} more\n" in told[0]


def test_a_process_that_says_nothing_is_named(monkeypatch):
    told, _ = compared(monkeypatch, {}, {}, processes=3, timeout_s=0.1)
    for words in told:
        assert words.startswith("Process 2 of 3 has not told its set-up within 0.1 s")


def test_a_program_is_its_versions_source_and_settings():
    config = training.config_of("topk", density=0.5)
    found = agreement.program(config, fresh=False)
    assert found["jax"] == jax.__version__
    assert found["numpy"] == np.__version__
    assert found["config.methods.topk.selection.density"] == "0.5"
    assert found["config.run"] == "['topk']"
    assert {"python", "jaxlib", "optax", "flax", "jaxsparse", "source"} <= found.keys()
    # Hosts may keep the data where they like, and nothing else.
    config.data.data_dir = "/elsewhere"
    assert agreement.program(config, fresh=False) == found
    config.checkpoint_every = 7
    assert agreement.differences(found, agreement.program(config, fresh=True), 1) == [
        "--fresh: False in process 0, True in process 1",
        "config.check_replicas_every: 100 in process 0, 7 in process 1",
        "config.checkpoint_every: 100 in process 0, 7 in process 1",
    ]


def test_a_state_is_its_paths_shapes_types_and_bits():
    params = nn.Dense(5).init(jax.random.key(0), jnp.ones(3))["params"]
    first = agreement.state({"Dense_0": params}, jax.random.key(1))
    assert list(first) == [
        "parameter Dense_0/bias",
        "parameter Dense_0/kernel",
        "state ",
    ]
    assert first["parameter Dense_0/kernel"].startswith("float32[3, 5], bits ")
    least = params["kernel"].at[2, 4].multiply(1 + 2**-23)
    other = agreement.state({"Dense_0": {**params, "kernel": least}}, jax.random.key(1))
    [line] = agreement.differences(first, other, 1)
    assert line.startswith("parameter Dense_0/kernel: float32[3, 5], bits ")
    assert agreement.state((), jax.random.key(2)) != {"state ": first["state "]}
    turned = np.asarray(params["kernel"]).T  # the same bytes in memory
    assert agreement._words(turned) == agreement._words(turned.copy())
