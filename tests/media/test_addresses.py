from __future__ import annotations

from ipaddress import ip_address

import pytest

from rekindle.media.addresses import AllowList, is_public, parse_listed


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254",
        "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1",
        "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
        "239.255.255.255", "240.0.0.1", "255.255.255.255",
    ],
)  # fmt: skip
def test_special_addresses_are_not(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:8.8.8.8",
        "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2001::1",
        "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1", "5f00::1", "fc00::1",
        "fd12:3456::1", "fe80::1", "fe80::1%eth0", "2606:4700::1111%eth0", "fec0::1", "ff02::1",
        "4000::1",
    ],
)  # fmt: skip
def test_special_and_translated_addresses_of_ipv6_are_not(address: str) -> None:
    assert not is_public(ip_address(address))


def test_what_the_operator_lists_is_allowed_and_nothing_beside_it() -> None:
    allowed = AllowList(["10.1.0.0/16", "192.168.7.7", "files.internal", "fd00::/8"])
    inside = ip_address("10.1.2.3")
    assert allowed.allows("anything", inside)
    assert allowed.allows("files.internal", ip_address("127.0.0.1"))
    assert allowed.allows("x", ip_address("192.168.7.7"))
    assert allowed.allows("x", ip_address("fd00::1"))
    assert not allowed.allows("x", ip_address("10.2.0.1"))
    assert not allowed.allows("sub.files.internal", ip_address("127.0.0.1"))
    assert not allowed.allows("x", ip_address("192.168.7.8"))
    assert not allowed.allows("x", ip_address("::ffff:10.1.2.3"))


def test_a_listed_host_is_read_without_regard_to_case() -> None:
    assert parse_listed("CDN.Example.") == "cdn.example"
    assert str(parse_listed("[FD00::1]")) == "fd00::1/128"


@pytest.mark.parametrize(
    "written", ["*", "", "10.0.0.0/99", "10.0.0.1/8", "2130706433", "a b", "a:80"]
)
def test_what_cannot_be_listed_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="takes a host name, an address or a network"):
        parse_listed(written)
