"""Test hosts on one machine, each behind a link of limited rate.

scripts/testbed -n 4 --rate 200mbit -- CMD     CMD on four hosts at once
scripts/testbed -n 2 --rate 1gbit -- scripts/train \
  --coordinator={coordinator} --num_processes={hosts} --process_id={host}

A host is a network namespace with one interface, a switch another namespace with a
bridge; a token bucket at both ends of a link limits what leaves the host and what comes
to it. Every host finds its own address under the machine's name, as JAX's collectives
on CPUs look it up. In CMD, {host}, {hosts} and {coordinator} are replaced.

What is made is removed by a second process that outlives this one, however it ends. It
needs root and Linux's network namespaces (Debian: iproute2).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PORT = 12345
GRACE = 10  # seconds that the other hosts have when one has failed
LOWEST, HIGHEST = 64e3, 100e9  # bits per second of a link
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class TestbedError(Exception):
    """There can be no test bed here; the message says why."""


class Host(NamedTuple):
    """One host of a test bed."""

    name: str  # of its namespace
    address: str


def rate_bits(rate: str) -> float:
    """Bits per second of ``200mbit``.

    >>> rate_bits("200mbit")
    200000000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not LOWEST <= bits <= HIGHEST:
        raise TestbedError(
            f"--rate={rate} must be a rate such as 200mbit, from 64kbit to 100gbit."
        )
    return bits


def ip(*words: str) -> None:
    """Runs iproute2's ``ip``."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def check() -> None:
    """Raises `TestbedError` where no namespaces can be made."""
    lacking = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if lacking:
        raise TestbedError(
            f"{' and '.join(lacking)} not found: install iproute2 "
            "(Debian: apt-get install iproute2)."
        )
    if os.geteuid():
        raise TestbedError("network namespaces are made by root: run it with sudo.")


def make(prefix: str, count: int, rate: str | None) -> list[Host]:
    """Makes the switch, the hosts and their links."""
    switch = f"{prefix}-switch"
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    hosts = [Host(f"{prefix}-{i}", f"10.99.0.{i + 1}") for i in range(count)]
    for i, (name, address) in enumerate(hosts):
        names = Path("/etc/netns", name, "hosts")
        names.parent.mkdir(parents=True)
        everyone = "".join(f"{h.address} host{j}\n" for j, h in enumerate(hosts))
        own = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
        names.write_text(own + everyone)
        ip("netns", "add", name)
        port = f"port{i}"
        link = ["link", "add", "eth0", "netns", name, "type", "veth"]
        ip(*link, "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "switch", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        if rate:
            # A burst is what passes at full speed: 4 ms worth, or a packet of 16 kB.
            burst = str(max(16_384, round(rate_bits(rate) / 8 * 0.004)))
            bucket = ["root", "tbf", "rate", rate, "burst", burst, "latency", "200ms"]
            for where, end in ((name, "eth0"), (switch, port)):
                within("tc", "qdisc", "add", "dev", end, *bucket, name=where)
    return hosts


def within(*command: str, name: str) -> str:
    """Runs a command in a namespace; its output."""
    done = subprocess.run(
        ["ip", "netns", "exec", name, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TestbedError(f"{' '.join(command)} in {name}: {done.stderr.strip()}")
    return done.stdout


def stop(names: Sequence[str]) -> None:
    """Stops what runs in these namespaces."""
    for how, wait in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 0.5)):
        for pid in (int(pid) for name in names for pid in pids_of(name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        end = time.monotonic() + wait
        while any(pids_of(name) for name in names) and time.monotonic() < end:
            time.sleep(0.05)


def remove(prefix: str) -> None:
    """Stops what runs in the namespaces of this prefix, and removes them."""
    listed = subprocess.run(
        ["ip", "netns"], capture_output=True, text=True, check=False
    )
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    mine = [name for name in names if name.startswith(f"{prefix}-")]
    stop(mine)
    for name in mine:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    for folder in Path("/etc/netns").glob(f"{prefix}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def pids_of(name: str) -> list[str]:
    """Processes in a namespace."""
    command = ["ip", "netns", "pids", name]
    return subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.split()


@contextlib.contextmanager
def testbed(count: int, rate: str | None) -> Iterator[list[Host]]:
    """A test bed; removed at the end, and also if this process is killed."""
    prefix = f"testbed{os.getpid()}"
    held, write = os.pipe()  # its end is seen when all who can write to it are gone
    remover = os.fork()
    if remover == 0:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.close(write)
        os.read(held, 1)
        remove(prefix)
        os._exit(0)
    os.close(held)
    try:
        yield make(prefix, count, rate)
    finally:
        os.close(write)
        os.waitpid(remover, 0)


def counters(hosts: Sequence[Host]) -> list[dict[str, int]]:
    """Bytes that have left and reached every host."""
    folder = "/sys/class/net/eth0/statistics"
    found = []
    for host in hosts:
        files = [f"{folder}/{way}_bytes" for way in ("tx", "rx")]
        sent, received = within("cat", *files, name=host.name).split()
        found.append({"sent": int(sent), "received": int(received)})
    return found


def run(hosts: Sequence[Host], command: Sequence[str]) -> list[int]:
    """Runs a command on all hosts; output lines tell their host. The exit statuses."""
    values = {"{hosts}": str(len(hosts)), "{coordinator}": f"{hosts[0].address}:{PORT}"}
    started, readers = [], []
    for i, host in enumerate(hosts):
        words = []
        for word in command:
            for name, value in {**values, "{host}": str(i)}.items():
                word = word.replace(name, value)
            words.append(word)
        process = subprocess.Popen(
            ["ip", "netns", "exec", host.name, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        reader = threading.Thread(target=relay, args=(i, process.stdout), daemon=True)
        reader.start()
        started.append(process)
        readers.append(reader)
    deadline = None
    while any(process.poll() is None for process in started):
        time.sleep(0.05)
        failed = [i for i, process in enumerate(started) if process.poll()]
        if failed and deadline is None:
            print(f"host {failed[0]} failed; the others have {GRACE} s", flush=True)
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            break
    stop([host.name for host in hosts])  # what hangs, or was left in the background
    statuses = [process.wait() for process in started]
    for reader in readers:  # all that was said is told
        reader.join()
    return [128 - status if status < 0 else status for status in statuses]


def relay(number: int, lines: Any) -> None:
    """Prints a host's lines behind its number, and reads on if nobody listens."""
    for line in lines:
        with contextlib.suppress(BrokenPipeError):
            print(f"[{number}] {line}", end="", flush=True)


def main() -> int:
    """Parses the command line, runs the command, prints what went over the links."""
    parser = argparse.ArgumentParser(
        prog="scripts/testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--hosts", type=int, default=2, help="2 to 250")
    parser.add_argument("--rate", help="of each link, both ways; default: no limit")
    parser.add_argument("--report", type=Path, help="JSON file of bytes and seconds")
    parser.add_argument("command", nargs="+", metavar="CMD", help="behind --")
    arguments = parser.parse_args()
    # An end by a signal is an end by an exception: what is made is removed.
    # A shell starts what is in the background with SIGINT ignored: here it is not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        if not 2 <= arguments.hosts <= 250:
            raise TestbedError(f"--hosts={arguments.hosts} must lie in 2 to 250.")
        if arguments.rate:
            rate_bits(arguments.rate)
        if arguments.report and not arguments.report.parent.is_dir():
            raise TestbedError(f"--report={arguments.report}: there is no such folder.")
        check()
        with testbed(arguments.hosts, arguments.rate) as hosts:
            before, start = counters(hosts), time.perf_counter()
            statuses = run(hosts, arguments.command)
            seconds = time.perf_counter() - start
            moved = [
                {key: now[key] - then[key] for key in now}
                for now, then in zip(counters(hosts), before, strict=True)
            ]
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    for i, host in enumerate(moved):
        print(f"host {i}: sent {host['sent']:,} B, received {host['received']:,} B")
    if arguments.report:
        report = {"rate": arguments.rate, "seconds": seconds, "hosts": moved}
        report["statuses"] = statuses
        arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
