"""Machines of a network without machines: each is a network, PID and mount namespace of its own, joined by a switch.

Needs root and util-linux and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

_TOOLS = ("unshare", "nsenter", "ip", "tc")
_NEW_NETWORK = 0x40000000
_LIMIT_S = 30.0
# The first process of a PID namespace: it reaps the orphans, and ends with the test process, which holds its input.
_INIT = """
import os, select
print("ready", flush=True)
while not select.select([0], [], [], 0.2)[0]:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def why_not() -> str | None:
    """Why there can be no such machines here; None if there can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"not installed: {' '.join(missing)}"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True, text=True)
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Machine:
    """`pid`: of the process that holds its namespaces. `address`: in the network of the test."""

    number: int
    pid: int
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` on this machine."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "--", *words]

    def configure(self, *words: str) -> None:
        """Runs `words` in the network namespace alone: to `ip` a pid is one of the test's own."""
        command = ["nsenter", "-t", str(self.pid), "-n", "--", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        assert done.returncode == 0, (words, done.stderr)

    def call(self, work: Callable[[], T]) -> T:
        """`work` on a thread whose sockets belong to this machine."""
        result: list[Any] = []

        def enter() -> None:
            with open(f"/proc/{self.pid}/ns/net") as space:
                code = ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEW_NETWORK)
            assert code == 0, os.strerror(ctypes.get_errno())
            try:
                result.append(work())
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        outcome: T = result[0]
        return outcome

    def processes(self) -> list[psutil.Process]:
        """What runs on it, the holder left out."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if is_here and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def running(self, part: str) -> list[psutil.Process]:
        """Processes whose command line has `part`. Others may end meanwhile."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports on which something accepts TCP connections."""
        found = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A":
                    words, _, port = local.partition(":")
                    found.add((_address(words), int(port, 16)))
        return found


def _address(words: str) -> str:
    """Of /proc/net: words of four bytes, each with its lowest byte first."""
    ends = [bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8)]
    if len(ends) == 1:
        return str(ipaddress.IPv4Address(ends[0]))
    address = ipaddress.IPv6Address(b"".join(ends))
    return str(address.ipv4_mapped or address)


class Network:
    """Machines with addresses 10.77.0.1 and up behind a switch."""

    def __init__(self, switch: Machine, machines: Sequence[Machine]) -> None:
        self._switch, self.machines = switch, machines

    def cut(self, machine: Machine) -> None:
        self._switch.configure("ip", "link", "set", f"port{machine.number}", "down")

    def mend(self, machine: Machine) -> None:
        self._switch.configure("ip", "link", "set", f"port{machine.number}", "up")

    def slow_down(self, machine: Machine, rate: str) -> None:
        """What goes to `machine`, to so many bits a second: `10mbit`."""
        words = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        self._switch.configure("tc", "qdisc", "add", "dev", f"port{machine.number}", *words)

    def full_speed(self, machine: Machine) -> None:
        self._switch.configure("tc", "qdisc", "del", "dev", f"port{machine.number}", "root")


@contextlib.contextmanager
def network(size: int) -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_machine(-1))
        switch.configure("ip", "link", "add", "switch", "type", "bridge")
        switch.configure("ip", "link", "set", "switch", "up")
        machines = []
        for number in range(size):
            machine = stack.enter_context(_machine(number))
            port = f"port{number}"
            switch.configure(
                "ip", "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", str(machine.pid)
            )
            switch.configure("ip", "link", "set", port, "master", "switch", "up")
            machine.configure("ip", "address", "add", f"{machine.address}/24", "dev", "net0")
            machine.configure("ip", "link", "set", "net0", "up")
            machines.append(machine)
        yield Network(switch, machines)


@contextlib.contextmanager
def _machine(number: int) -> Iterator[Machine]:
    """At its end everything that runs on it is killed: its first process ends, and with it the PID namespace."""
    python = str(Path("/proc/self/exe").resolve())
    words = ["unshare", "-n", "-m", "-p", "-f", "--kill-child", "--mount-proc", python, "-S", "-c", _INIT]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as outer:
        assert outer.stdout is not None and outer.stdout.readline() == b"ready\n"
        (holder,) = psutil.Process(outer.pid).children()
        machine = Machine(number, holder.pid, f"10.77.0.{number + 1}")
        machine.configure("ip", "link", "set", "lo", "up")
        subprocess.run(machine.command("mount", "-t", "tmpfs", "tmpfs", "/dev/shm"), check=True, timeout=_LIMIT_S)
        try:
            yield machine
        finally:
            with contextlib.suppress(psutil.Error):
                holder.kill()


def wait_until(is_so: Callable[[], object], what: str, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)
