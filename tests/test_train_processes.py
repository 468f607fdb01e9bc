import shutil
import signal
import socket
import time

import numpy as np
import pytest
import training

from train import parallel
from train.history import read


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("data")
    training.splits_in(data_dir)
    return data_dir


def launch_two(config, workdir, data_dir, *, more=((), ())):
    """Two processes of one run; ``more`` are flags of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    return [
        training.launch(
            training.command(
                config, workdir, data_dir, *flags, f"--process_id={i}", *more[i]
            )
        )
        for i in range(2)
    ]


def goes_on_alone(config, workdir, data_dir, *, after):
    """One process takes two steps more of the run that several have left."""
    splits, stop = training.splits_in(data_dir), after + 2
    with pytest.raises(training.Stopped, match=f"after step {stop}"):
        training.run(config, workdir / "topk", splits, stop_after=stop)


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
    goes_on_alone(config, tmp_path, data_dir, after=stopped)


def test_processes_that_differ_end_and_say_in_what(tmp_path, data_dir):
    more = (), ("--config.seed=3", "--config.num_workers=4", "--fresh")
    config = training.config_of("topk")
    processes = launch_two(config, tmp_path, data_dir, more=more)
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    for output in outputs:
        assert "error: The processes differ in their set-up:" in output
        for line in (
            "--fresh: False in process 0, True in process 1",
            "config.seed: 0 in process 0, 3 in process 1",
            "config.num_workers: 2 in process 0, 4 in process 1",
        ):
            assert f"\n  {line}\n" in output
        assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []  # found before anything is made


def test_processes_with_folders_of_their_own_end_and_say_so(tmp_path, data_dir):
    other = tmp_path / "other"
    more = (), (f"--workdir={other}",)
    processes = launch_two(training.config_of("topk"), tmp_path, data_dir, more=more)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    for output, folder in zip(outputs, (tmp_path, other), strict=True):
        assert f"error: Process 0 writes into {folder / 'topk'}, which is not the" in (
            output
        )
        assert "that process 1 sees there" in output and "Traceback" not in output


def test_devices_wait_for_a_paused_program_unless_the_user_says_otherwise():
    warn, end = parallel.PATIENCE
    assert parallel.patient("").split() == [
        f"{name}={parallel.PATIENCE[name]}" for name in (warn, end)
    ]
    mine = f"--xla_dump_to=/here {end}=9"
    assert parallel.patient(mine) == f"{mine} {warn}={parallel.PATIENCE[warn]}"
    assert min(parallel.PATIENCE.values()) > 100


def steps_saved(workdir):
    return [int(p.name) for p in workdir.glob("topk/checkpoints/*") if p.name.isdigit()]


def wait_for_step(process, workdir, step):
    for _ in range(900):
        if max(steps_saved(workdir), default=0) >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise TimeoutError(f"no checkpoint of step {step} in {workdir}")


def test_a_pause_does_no_harm_and_a_killed_process_is_told(tmp_path, data_dir):
    config = training.config_of("topk", steps=4000, eval_every=4000, checkpoint_every=5)
    more = [["--config.lost_after_s=30"]] * 2
    reached = 0
    # Process 0 has JAX's coordination service; without it JAX aborts by itself.
    for killed, left in ((1, 0), (0, 1)):
        processes = launch_two(config, tmp_path, data_dir, more=more)
        wait_for_step(processes[0], tmp_path, reached + 5)
        if killed == 1:
            processes[1].send_signal(signal.SIGSTOP)
            time.sleep(10)
            processes[1].send_signal(signal.SIGCONT)
            wait_for_step(processes[0], tmp_path, max(steps_saved(tmp_path)) + 10)
        processes[killed].kill()
        output, _ = processes[left].communicate(timeout=60)
        processes[killed].communicate()
        assert processes[left].returncode == 1, output
        assert f"error: process {left} of 2 ends: " in output
        assert "another process of this run was lost" in output
        reached = max(steps_saved(tmp_path))

    goes_on_alone(config, tmp_path, data_dir, after=reached)
