"""Which addresses are public."""

from __future__ import annotations

import ipaddress

import pytest

from router.images.fetch.addresses import CheckedBackend, NotAllowedError, is_public


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2001:200::1",
        "2620:4f:8001::1",
        "192.0.1.1",
        "2606:4700::5efe:808:808",
    ],
)
def test_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1",
        "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
        "2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:0:808:808::", "2002:808:808::1",
        "168.63.129.16", "192.0.0.8", "192.0.0.9", "192.0.0.192", "192.31.196.1", "192.52.193.1", "192.88.99.1",
        "192.175.48.1", "198.51.100.1", "203.0.113.1", "100.100.100.200", "::ffff:168.63.129.16", "64:ff9b::a83f:8110",
        "::7f00:1", "::ffff:0:7f00:1", "100::1", "100:0:0:1::1", "1000::1", "4000::1", "5f00::1", "2001:2::1",
        "2001:20::1", "2001:1ff::1", "3fff::1", "3fff:fff::1", "2620:4f:8000::1", "2606:4700::5efe:7f00:1",
        "2606:4700::200:5efe:a00:1", "ff0e::1",
    ],
)  # fmt: skip
def test_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


async def test_one_private_address_of_several_is_enough_and_nothing_is_connected_to() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "127.0.0.1"]

    with pytest.raises(NotAllowedError):
        await CheckedBackend(lambda host, port: False, resolve).connect_tcp("x", 80)
