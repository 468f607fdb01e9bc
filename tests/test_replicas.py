import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training

from train.errors import RunError
from train.parallel import Workers
from train.replicas import Replicas, checksums

WORKERS = 4


def damaged(leaf, worker, index, bit):
    """A replicated array in which one device's copy has one bit turned."""
    copies = []
    for number, shard in enumerate(leaf.addressable_shards):
        copy = np.array(shard.data)
        if number == worker:
            copy.view(f"u{copy.itemsize}").reshape(-1)[index] ^= 1 << bit
        copies.append(jax.device_put(copy, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)


def state():
    return {
        "a": jnp.arange(12, dtype=jnp.float32).reshape(3, 4),
        "b": {"half": jnp.ones(5, jnp.bfloat16), "n": jnp.int32(3)},
        "key": jax.random.key(0),
        "own": jnp.zeros(2),
    }


@functools.cache
def checked():
    """The check, a state that all workers share, and what is their own."""
    workers = Workers(WORKERS)
    whole = state()
    is_local = {**jax.tree.map(lambda _: False, whole), "own": True}
    shared = {**whole, "own": None}
    local = {**jax.tree.map(lambda _: None, whole), "own": whole["own"]}
    return Replicas(workers, is_local, every=5), *workers.place(shared, local)


@pytest.mark.parametrize(
    ("name", "worker", "index", "bit"),
    [("a", 2, 11, 0), ("a", 0, 0, 31), ("b/half", 3, 4, 7), ("b/n", 1, 0, 30)],
)
def test_one_bit_of_one_copy_is_found_and_named(name, worker, index, bit):
    replicas, shared, local = checked()
    replicas.check(5, shared, local)
    leaf = shared["a"] if name == "a" else shared["b"][name[2:]]
    bad = damaged(leaf, worker, index, bit)
    broken = {"a": bad} if name == "a" else {"b": {**shared["b"], name[2:]: bad}}
    with pytest.raises(RunError) as error:
        replicas.check(5, {**shared, **broken}, local)
    others = ", ".join(str(w) for w in range(WORKERS) if w != worker)
    where = f"{name} of worker {worker} is not that of workers {others} (1 of 4 leaves"
    assert where in str(error.value)
    assert str(error.value).startswith("stopped at step 5: ")


def test_checksums_are_of_bits_in_their_places():
    x = jnp.array([0.0, 1.0, -2.0])
    sums = checksums([x, x[::-1], -x, x.astype(jnp.bool_), jnp.zeros((0, 2))])
    mixed = [int(w) + 0x9E3779B9 * i for i, w in enumerate(np.asarray(x).view("u4"))]
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = [w % 2**32 for w in mixed]
        mixed = [(w ^ w >> shift) * factor for w in mixed]
    assert sums[0] == sum(mixed) % 2**32
    assert len({int(s) for s in sums[:4]}) == 4  # -0.0 is not 0.0
    assert sums[4] == 0


def test_when_it_is_due():
    workers, is_local = Workers(2), {"a": False}
    due = lambda every: [  # noqa: E731
        step for step in range(1, 12) if Replicas(workers, is_local, every).due(step)
    ]
    assert due(5) == [5, 10]
    assert due(0) == []
    assert not Replicas(Workers(1), is_local, 5).due(5)


def test_a_run_stops_before_it_saves_a_state_that_differs(tmp_path, monkeypatch):
    step, after = Workers.map_train, iter(range(1, 100))

    def failing(self, *args):
        train = step(self, *args)

        def train_and_fail(shared, local, batch):
            shared, local, measured = train(shared, local, batch)
            if next(after) == 3:
                kernel = shared.params["Dense_1"]["kernel"]
                broken = {"kernel": damaged(kernel, 1, 0, 0)}
                dense = {**shared.params["Dense_1"], **broken}
                shared = shared._replace(params={**shared.params, "Dense_1": dense})
            return shared, local, measured

        return train_and_fail

    monkeypatch.setattr(Workers, "map_train", failing)
    config = training.config_of("topk", checkpoint_every=2)
    assert config.check_replicas_every == 2
    with pytest.raises(RunError, match="step 4.*params/Dense_1/kernel of worker 1 is"):
        training.run(config, tmp_path, training.splits_in(tmp_path / "data"))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]
