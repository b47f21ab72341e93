"""Which addresses clients may have the router connect to, and the connection to one that has been checked."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpcore2

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a host."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")


class NotAllowedError(Exception):
    """The host has an address that may not be connected to."""


def is_public(address: IPAddress) -> bool:
    """Whether an address is one host's on the internet, also the IPv4 address that an IPv6 address stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64_LOCAL:
            return False
        inside: list[IPAddress | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if not all(is_public(one) for one in inside if one is not None):
            return False
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def resolve(host: str, port: int) -> list[str]:
    """By the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Resolves a host once, checks every address, and connects to one of those: never to another answer of DNS."""

    def __init__(self, may_be_private: Callable[[str, int], bool], resolve: Resolve = resolve) -> None:
        """may_be_private: whether a host and port may have addresses that are not public."""
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
    ) -> httpcore2.AsyncNetworkStream:
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
                return await self._connect.connect_tcp(address, port, timeout, local_address, socket_options)
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
