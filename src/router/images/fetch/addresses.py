"""Which addresses may be connected to, and the checked connection."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore2

from router.images.fetch.bounded_stream import BoundedStream

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a host."""

# What `is_global` of the standard library lets through, or did in some version: the special-purpose registries of IANA
# as a whole, and a service of a cloud at a public address.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's metadata and DNS
            "192.0.0.0/24",  # protocol assignments, Oracle's metadata among them
            "192.31.196.0/24",  # AS112: the nearest server answers
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # relays of 6to4
            "192.175.48.0/24",  # AS112
            "2001::/23",  # protocol assignments: Teredo, ORCHID, AMT, AS112
            "2001:db8::/32",
            "2002::/16",  # 6to4, whose relays reach any IPv4 address
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_UNICAST = ipaddress.ip_network("2000::/3")  # of IPv6: nothing else has been given to hosts
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # before the IPv4 address in the last 64 bits


class NotAllowedError(Exception):
    """The host's address is forbidden."""


def is_public(address: IPAddress) -> bool:
    """Whether an address is public, also an embedded IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.ipv4_mapped is not None or address in _NAT64:
            return is_public(inside)
        if address not in _UNICAST or (int(address) >> 32 & 0xFFFFFFFF in _ISATAP and not is_public(inside)):
            return False
    if any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Resolves once, checks all addresses, connects to those only."""

    def __init__(self, may_be_private: Callable[[str, int], bool], resolve: Resolve) -> None:
        """Take which hosts may be private."""
        self._may_be_private = may_be_private
        self._resolve = resolve
        self._connect = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> BoundedStream:
        """Raises NotAllowedError, OSError, httpcore2.ConnectError."""
        addresses = await self._resolve(host, port)
        if not self._may_be_private(host, port):
            for address in addresses:
                # A link-local address has its interface behind a percent sign.
                if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                    raise NotAllowedError
        failure: Exception = httpcore2.ConnectError("the host has no address")
        for address in addresses:
            try:
                stream = await self._connect.connect_tcp(address, port, timeout, local_address, socket_options)
                return BoundedStream(stream)
            except httpcore2.ConnectError as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise NotAllowedError

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
