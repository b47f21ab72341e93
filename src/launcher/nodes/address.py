"""Where the nodes of a group find each other: addresses, and the network interface behind one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 256


def resolve(host: str) -> str | None:
    """`host` as an IP address; None if it has none (yet: a name service may learn it later)."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def is_own(address: str) -> bool:
    """Whether this node has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def source_address(of_leader: str) -> str | None:
    """The address of this node from which packets to `of_leader` start; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in of_leader else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((of_leader, 9))
        return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The network interface whose first address this is."""
    if ":" in address:
        return _interface_of_v6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack(f"{_IFREQ_BYTES}s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _interface_of_v6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found, *_, name = line.split()
            if found == wanted:
                return name
    return None
