"""The lab of several hosts, and the allreduce benchmark in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocomm.bench import _lab, allreduce
from ocomm.bench.__main__ import main
from ocomm.bench._lab import Lab, LabError, why_not
from tests.cluster.jobs import LIMIT_S, has_mpi

ROOT = Path(__file__).resolve().parents[2]
needs_lab = pytest.mark.skipif(bool(why_not()), reason=f"no lab: {why_not()}")
needs_tun = pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="there is no /dev/net/tun")
needs_mpi = pytest.mark.skipif(not has_mpi(), reason="there is no mpirun")

SERVE = """
import socket, sys
with socket.create_server(("", 9000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
"""
SEND = """
import socket, sys, time
data = bytes(int(sys.argv[2]))
start = time.perf_counter()
with socket.create_connection((sys.argv[1], 9000), timeout=5) as connection:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)  # the end of the other side: all has arrived
print(time.perf_counter() - start)
"""


def children_anywhere(marker: str) -> list[int]:
    """Processes of this machine whose command line has ``marker``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def wait_until_gone(marker: str) -> None:
    deadline = time.monotonic() + 10
    while (left := children_anywhere(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@needs_lab
def test_a_host_has_a_name_an_address_and_one_cable():
    with Lab(3, "100mbit") as lab:
        done = lab.run(lab.on(1, ["sh", "-c", "hostname; ip -br -4 addr; getent hosts host2; pwd"]), 10)
    name, _, cable, other, folder = done.stdout.splitlines()
    assert name == "host1"
    assert cable.split()[::2] == [cable.split()[0], "10.77.0.2/24"]
    assert cable.startswith("eth0@")
    assert other.split() == ["10.77.0.3", "host2"]
    assert folder == os.getcwd()


@needs_lab
def test_nothing_of_it_shows_outside():
    def outside() -> list[str]:
        shown = ""
        for what in (["-br", "link"], ["-br", "addr"], ["netns", "list"]):
            shown += subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if line.startswith(("host", "port", "br0")) or "10.77.0." in line]

    before = outside()
    with Lab(2, "1gbit"):
        assert outside() == before
    assert outside() == before


@needs_lab
@pytest.mark.parametrize("rate, seconds", [("40mbit", 0.5), pytest.param("10mbit", 2.0, marks=pytest.mark.long)])
def test_a_cable_carries_95_percent_of_its_rate(rate: str, seconds: float):
    nbytes, most = 2_500_000, 1.5 * seconds / _lab.PAYLOAD_FRACTION
    for _ in range(3):  # other programs make it slower, and never faster
        with Lab(2, "1gbit") as lab:
            lab.set_rate(rate)
            server = subprocess.Popen(lab.on(0, [sys.executable, "-c", SERVE]), stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            with server:
                assert server.stdout.readline() == "listening\n"
                took = float(lab.run(lab.on(1, [sys.executable, "-c", SEND, "host0", str(nbytes)]), 20).stdout)
                sent = lab.sent_bytes()
        assert took > 0.95 * seconds
        assert nbytes < sent[1] < 1.05 * nbytes
        assert sent[0] < 0.05 * nbytes
        if took < most:
            break
    assert took < most


CONNECT = """
import socket, time
start = time.perf_counter()
try:
    socket.create_connection(("host1", 9), timeout=20)
except ConnectionRefusedError:
    print(time.perf_counter() - start)
"""


@needs_lab
@needs_tun
def test_a_packet_takes_the_delay_one_way_and_the_rate_stays():
    nbytes = 500_000
    with Lab(2, "20mbit", delay_ms=40) as lab:
        # An answer takes the delay twice; the first one waits for addresses to be resolved as well.
        round_trips = [float(lab.run(lab.on(0, [sys.executable, "-c", CONNECT]), 30).stdout) for _ in range(2)]
        server = subprocess.Popen(lab.on(0, [sys.executable, "-c", SERVE]), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        with server:
            assert server.stdout.readline() == "listening\n"
            took = float(lab.run(lab.on(1, [sys.executable, "-c", SEND, "host0", str(nbytes)]), 60).stdout)
        sent, spent = lab.sent_bytes(), lab.relay_seconds()
    assert min(round_trips) > 0.08
    assert took > 8 * nbytes / 20e6 + 0.08
    assert nbytes < sent[1] < 1.06 * nbytes
    assert spent > 0


@needs_lab
def test_a_pulled_cable_carries_nothing_until_it_is_back():
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('host1', 9), timeout=0.5)"]
    with Lab(2) as lab:
        lab.set_cable(1, False)
        assert "timed out" in lab.run(lab.on(0, reach), 10).stderr
        lab.set_cable(1, True)
        deadline = time.monotonic() + 10
        while "refused" not in (said := lab.run(lab.on(0, reach), 10).stderr) and time.monotonic() < deadline:
            pass
    assert "refused" in said


# Counts what arrives until nothing has come for some seconds, and sends each time that it is told how much to whom.
DATAGRAMS = """
import socket, sys
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 9000))
own.settimeout(float(sys.argv[1]))
for line in sys.stdin:
    count, host = line.split()
    if host == "none":
        arrived = 0
        try:
            while own.recv(99):
                arrived += 1
        except TimeoutError:
            print(arrived, flush=True)
    for _ in range(int(count)):
        own.sendto(b"a datagram", (host, 9000))
    print("done", flush=True)
"""


@contextlib.contextmanager
def exchange(lab: Lab, counts: tuple[int, int], quiet_s: float) -> Iterator[Callable[[], list[int]]]:
    """A function by which both hosts send each other so many datagrams; it returns how many have come to each."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", DATAGRAMS, str(quiet_s)]
    hosts = [subprocess.Popen(lab.on(host, command), **pipes) for host in range(2)]

    def tell(host: int, line: str) -> list[str]:
        process, found = hosts[host], []
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        while (said := process.stdout.readline().strip()) not in ("", "done"):
            found.append(said)
        return found

    def go() -> list[int]:
        for host in range(2):
            tell(host, f"{counts[host]} host{1 - host}")
        return [int(tell(host, "0 none")[0]) for host in range(2)]

    with hosts[0], hosts[1]:  # the end of their input is their end
        yield go


@needs_lab
def test_a_cable_can_be_cut_in_one_direction_and_is_whole_again_afterwards():
    def comes_to_be(wanted: list[int]) -> bool:
        # The first datagrams wait for addresses to be resolved, and may come too late.
        deadline = time.monotonic() + 10
        while (arrived := go()) != wanted and time.monotonic() < deadline:
            pass
        return arrived == wanted

    with Lab(2, "100mbit") as lab, exchange(lab, (5, 7), 0.1) as go:
        assert comes_to_be([7, 5])
        lab.set_cable(1, False, "out")
        assert comes_to_be([0, 5])
        lab.set_cable(1, True)
        assert comes_to_be([7, 5])
        lab.set_cable(1, False, "in")
        assert comes_to_be([7, 0])
        lab.set_cable(1, True)
        assert comes_to_be([7, 5])


@pytest.mark.long
@needs_lab
@needs_tun
def test_a_bad_cable_loses_some_packets_of_both_directions():
    with Lab(2, loss=0.1) as lab, exchange(lab, (20, 20), 0.5) as go:
        sent, arrived, deadline = 0, [0, 0], time.monotonic() + 20
        while not all(0 < each < sent for each in arrived) and time.monotonic() < deadline:
            arrived = [before + now for before, now in zip(arrived, go(), strict=True)]
            sent += 20
    assert all(0 < each < sent for each in arrived)


@needs_lab
def test_a_command_that_does_not_end_is_killed_with_its_children():
    marker = f"import time; time.sleep(99)  # {os.getpid()} timeout"
    with Lab(1) as lab:
        with pytest.raises(LabError, match="not over after 1 s"):
            lab.run(lab.on(0, ["sh", "-c", f'"{sys.executable}" -c "{marker}" & wait']), 1)
        wait_until_gone(marker)


@needs_lab
def test_leaving_it_by_an_exception_ends_what_runs_in_it():
    marker = f"import time; time.sleep(99)  # {os.getpid()} exception"
    with pytest.raises(ZeroDivisionError), Lab(1) as lab:
        child = subprocess.Popen(lab.on(0, [sys.executable, "-c", marker]))
        while not children_anywhere(marker):
            time.sleep(0.01)
        raise ZeroDivisionError
    assert child.wait(10) != 0
    wait_until_gone(marker)


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_process_that_holds_it(number: signal.Signals):
    marker = f"import time; time.sleep(99)  # {os.getpid()} {number}"
    program = (
        "import subprocess, sys; from ocomm.bench._lab import Lab\n"
        f"with Lab(2, '1gbit') as lab:\n    subprocess.run(lab.on(1, [sys.executable, '-c', {marker!r}]))"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    with holder:
        while not any("nsenter" not in Path(f"/proc/{p}/cmdline").read_text() for p in children_anywhere(marker)):
            time.sleep(0.02)
        holder.send_signal(number)
    wait_until_gone(marker)


@needs_lab
@needs_mpi
def test_mpirun_starts_each_rank_on_its_own_host(tmp_path: Path):
    program = "import os, socket; print(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'], socket.gethostname())"
    with Lab(3, "1gbit") as lab:
        done = lab.run(lab.mpirun(3, [sys.executable, "-c", program]), 30)
    assert sorted(done.stdout.splitlines()) == ["0 host0", "0 host1", "0 host2"], done.stderr


@pytest.mark.long
@needs_lab
@needs_mpi
@pytest.mark.parametrize("launcher", ["mpirun", "ocommrun"])
def test_hosts_that_have_no_address_of_ipv4_train_together(launcher: str):
    program = """
import numpy as np, ocomm
ocomm.init()
print("sum", ocomm.allreduce(np.full(10**6, ocomm.rank() + 1.0), op=ocomm.Sum)[0], ocomm.cross_size(), flush=True)
"""
    with Lab(2, is_ipv6=True) as lab:
        ranks = [sys.executable, "-c", program]
        command = lab.mpirun(2, ranks)
        if launcher == "ocommrun":
            flags = ["-np", "2", "--min-np", "2", "-H", "host0:1,host1:1", "--mpi-args", " ".join(lab.mpi_options())]
            command = lab.on(None, [sys.executable, "-m", "ocomm.launch", *flags, *ranks])
        done = lab.run(command, LIMIT_S)
    assert done.returncode == 0 and done.stdout.count("sum 3.0 2") == 2, done.stdout + done.stderr


@pytest.mark.long  # a benchmark
@needs_lab
@needs_mpi
def test_the_allreduce_benchmark_checks_counts_and_writes_its_rows(tmp_path: Path):
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ocomm.bench", "allreduce", "--hosts", "3", "--rate", "500mbit", "1gbit"),
            *("--elements", "1000003", "--operations", "packed", "compressed", "dense"),
            *("--seconds", "0.2", "--rounds", "2", "3", "--json", str(result)),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tables = json.loads(result.read_text())["tables"]
    assert [(table["rate"], table["hosts"], table["ranks"]) for table in tables] == [("500mbit", 3, 3), ("1gbit", 3, 3)]
    for table in tables:
        packed, compressed, dense = table["rows"]
        assert [row["operation"] for row in table["rows"]] == ["packed", "compressed", "dense"]
        assert packed["bytes_sent"] == compressed["bytes_sent"]
        assert 28 < dense["bytes_sent"] / compressed["bytes_sent"] < 32
        assert dense["times_bound"] > 0.9  # the others fit into what the shaper lets through at once
        for row in table["rows"]:
            assert 1.0 < row["interface_ratio"] < 1.1


def test_without_its_tools_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_lab.shutil, "which", lambda name, path=None: None if name in ("ip", "tc") else name)
    assert why_not.__wrapped__() == "there is no ip or tc (Debian: apt install iproute2 util-linux)"


def test_a_benchmark_of_one_rank_says_how_to_start_it():
    done = subprocess.run(
        [sys.executable, "-m", "ocomm.bench", "allreduce"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert "give --hosts 4" in done.stderr


def test_where_there_can_be_no_lab_the_benchmark_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(_lab, "why_not", lambda: "no permission")
    assert main(["allreduce", "--hosts", "2"]) == allreduce.SKIPPED
    assert capsys.readouterr().err == "allreduce: skipped, no lab: no permission\n"
