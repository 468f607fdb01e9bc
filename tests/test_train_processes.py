import shutil
import signal
import socket
import time

import numpy as np
import pytest
import training

from train.history import read


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    training.splits_in(data_dir)
    return data_dir


def launch_two(config, workdir, data_dir):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        training.launch(
            training.command(config, workdir, data_dir, *flags, f"--process_id={i}")
        )
        for i in range(2)
    ]


def without_gloo(output):
    return [x for x in output.splitlines() if x and not x.startswith("[Gloo]")]


def test_two_processes_train_like_one(tmp_path, data_dir):
    config = training.config_of("topk", num_workers=4)
    processes = launch_two(config, tmp_path / "two", data_dir)
    training.run(config, tmp_path / "one", training.splits_in(data_dir))
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs

    # Process 0 speaks for both.
    assert "topk 6/6" in outputs[0]
    assert without_gloo(outputs[1]) == []

    one = training.saved(tmp_path / "one", 6)
    two = training.saved(tmp_path / "two" / "topk", 6)
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(
            one[name], two[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    rows = [read(tmp_path / "one"), read(tmp_path / "two" / "topk")]
    for a, b in zip(*rows, strict=True):
        assert a["payload_up_bytes"] == b["payload_up_bytes"]
        assert a["accuracy"] == b["accuracy"]


def test_an_interrupt_of_one_process_stops_both_after_the_same_step(tmp_path, data_dir):
    config = training.config_of("topk", steps=4000, eval_every=4000, checkpoint_every=5)
    processes = launch_two(config, tmp_path, data_dir)
    training.wait_for_checkpoint(processes[0], tmp_path / "topk")
    processes[1].send_signal(signal.SIGINT)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [130, 130], outputs
    assert "topk: stopped after step" in outputs[0]

    # Both go on from the same step where the newest checkpoint is damaged.
    steps = sorted(int(p.name) for p in (tmp_path / "topk" / "checkpoints").iterdir())
    damaged = tmp_path / "topk" / "checkpoints" / str(steps[-1])
    (damaged / "run" / "metadata").write_text("{")
    config.steps = 4000
    processes = launch_two(config, tmp_path, data_dir)
    aside = damaged.with_name(f"{damaged.name}.unreadable")
    saved = tmp_path / "topk" / "checkpoints"
    while not any(
        p.name.isdigit() and int(p.name) > steps[-1] for p in saved.iterdir()
    ):
        assert processes[0].poll() is None, processes[0].stdout.read()
        time.sleep(0.1)
    processes[0].send_signal(signal.SIGINT)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [130, 130], outputs
    assert f"{damaged} cannot be read" in outputs[0]
    assert f"topk: goes on after step {steps[-2]} " in outputs[0]
    shutil.rmtree(aside)

    # One process goes on where two have stopped.
    stopped = max(int(p.name) for p in (tmp_path / "topk" / "checkpoints").iterdir())
    config.steps = 4000
    with pytest.raises(training.Stopped, match=f"after step {stopped + 2}"):
        training.run(
            config,
            tmp_path / "topk",
            training.splits_in(data_dir),
            stop_after=stopped + 2,
        )
