"""The test bed: rate, counters, names, and that nothing of it is left.

Where this machine allows no network namespaces, it must say so and do nothing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import testbed

ROOT = Path(__file__).parents[1]
TRANSFER = """
import socket, sys, time
host, size = int(sys.argv[1]), int(sys.argv[2])
if host == 0:
    with socket.create_server(("", 9999)) as server:
        reader = server.accept()[0].makefile("rb")
    print("received", len(reader.read()))
else:
    while True:
        try:
            with socket.create_connection(("host0", 9999)) as connection:
                connection.sendall(bytes(size))
            break
        except OSError:
            time.sleep(0.05)
"""


def allowed():
    try:
        testbed.check()
        testbed.ip("netns", "add", "testbed-probe")
        testbed.ip("netns", "del", "testbed-probe")
    except testbed.TestbedError:
        return False
    return True


ALLOWED = allowed()


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "bench.testbed", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*arguments):
    process = start(*arguments)
    output = process.communicate(timeout=60)[0]
    return process.returncode, output


def left_of(process):
    """Namespaces and name files of a test bed, as soon as there are none."""
    prefix = f"testbed{process.pid}-"
    end = time.monotonic() + 20
    while time.monotonic() < end:
        names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        left = [n for n in names.split() if n.startswith(prefix)]
        left += Path("/etc/netns").glob(f"{prefix}*")
        if not left:
            break
        time.sleep(0.1)
    return left


def says_that_it_cannot(status, output):
    assert status == 3 and output.startswith("testbed: ")


def test_bytes_and_time_are_those_of_the_link(tmp_path):
    size, report = 2_000_000, tmp_path / "report.json"
    command = [sys.executable, "-c", TRANSFER, "{host}", str(size)]
    limits = ["-n", "2", "--rate", "20mbit", "--report", str(report)]
    status, output = finished(*limits, "--", *command)
    if not ALLOWED:
        return says_that_it_cannot(status, output)
    assert status == 0, output
    assert f"[0] received {size}\n" in output
    found = json.loads(report.read_text())
    # Headers of 66 bytes for at least 1448 of data, and a few packets more.
    assert size < found["hosts"][1]["sent"] < 1.06 * size
    assert size < found["hosts"][0]["received"] < 1.06 * size
    assert found["seconds"] > 0.9 * 8 * size / 20e6


def test_a_host_that_fails_is_told_and_the_others_are_stopped():
    fails = "import sys, time; sys.exit(7) if {host} else time.sleep(100)"
    begun = time.monotonic()
    status, output = finished("-n", "2", "--", sys.executable, "-c", fails)
    if not ALLOWED:
        return says_that_it_cannot(status, output)
    assert status != 0 and "host 1 failed" in output
    assert time.monotonic() - begun < testbed.GRACE + 20


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how):
    with start("-n", "2", "--", "sh", "-c", "echo up; sleep 100") as process:
        if not ALLOWED:
            return says_that_it_cannot(process.wait(), process.stdout.read())
        assert process.stdout.readline().endswith("up\n")
        os.kill(process.pid, how)
        process.wait(timeout=20)
    assert left_of(process) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "1"],
        ["-n", "300"],
        ["--rate", "fast"],
        ["--rate", "0mbit"],
        ["--report", "/nonexistent/report.json"],
    ],
)
def test_wrong_arguments_are_told(arguments):
    status, output = finished(*arguments, "--", "true")
    assert status == 3 and arguments[0].lstrip("-")[0] in output
    assert arguments[1] in output


def test_a_command_that_does_not_want_to_stop_is_stopped():
    stubborn = "if [ {host} = 0 ]; then exit 1; fi; trap '' TERM; sleep 100"
    begun = time.monotonic()
    status, output = finished("-n", "2", "--", "sh", "-c", stubborn)
    if not ALLOWED:
        return says_that_it_cannot(status, output)
    assert status == 1 and time.monotonic() - begun < testbed.GRACE + 20


def test_all_that_a_slow_reader_reads_and_nobody_waits_for_one_that_is_gone():
    with start("-n", "2", "--", "sh", "-c", "seq 1 30000; echo last") as process:
        if not ALLOWED:
            return says_that_it_cannot(process.wait(), process.stdout.read())
        time.sleep(3)
        lines = process.stdout.read().splitlines()
        assert sum(line.endswith("] last") for line in lines) == 2
    with start("-n", "2", "--", "seq", "1", "300000") as process:
        process.stdout.readline()
        process.stdout.close()
        process.wait(timeout=30)


def test_an_unprivileged_user_is_told(monkeypatch):
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    with pytest.raises(testbed.TestbedError, match="root"):
        testbed.check()


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None)
    with pytest.raises(testbed.TestbedError, match="ip and tc .* iproute2"):
        testbed.check()
