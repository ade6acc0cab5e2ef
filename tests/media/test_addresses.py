"""Which URLs and addresses the server may fetch from."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from rekindle.errors import BadMedia, MediaRefused
from rekindle.media.addresses import (
    AllowList,
    interface_addresses,
    is_public,
    parse_listed,
    parse_web_url,
)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450::1"],
)
def test_internet_addresses_are_public(address: str) -> None:
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
def test_special_ipv4_addresses_are_not_public(address: str) -> None:
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
def test_special_and_translated_ipv6_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


def test_only_what_the_operator_lists_is_allowed() -> None:
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


def test_listed_hosts_are_case_insensitive() -> None:
    assert parse_listed("CDN.Example.") == "cdn.example"
    assert str(parse_listed("[FD00::1]")) == "fd00::1/128"


@pytest.mark.parametrize(
    "written", ["*", "", "10.0.0.0/99", "10.0.0.1/8", "2130706433", "a b", "a:80"]
)
def test_an_invalid_list_item_is_rejected(written: str) -> None:
    with pytest.raises(ValueError, match="takes a host name, an address or a network"):
        parse_listed(written)


@pytest.mark.parametrize(
    ("written", "host", "port", "target"),
    [
        ("http://example.com/a.png", "example.com", 80, "/a.png"),
        ("HTTPS://Example.COM", "example.com", 443, "/"),
        ("https://example.com:8443/a?b=c#d", "example.com", 8443, "/a?b=c"),
        ("http://example.com.?q", "example.com", 80, "/?q"),
        ("http://93.184.216.34/", "93.184.216.34", 80, "/"),
        ("http://[2606:4700:0::1111]:81/", "2606:4700::1111", 81, "/"),
        ("http://my_host-1.example/é/ä%20b?x=%C3%A9", "my_host-1.example", 80,
         "/%C3%A9/%C3%A4%20b?x=%C3%A9"),
    ],
)  # fmt: skip
def test_a_url_is_parsed(written: str, host: str, port: int, target: str) -> None:
    url = parse_web_url(written)
    assert (url.host, url.port, url.target) == (host, port, target)


@pytest.mark.parametrize(
    "written",
    [
        "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://127.1/",
        "http://0177.0.0.1/", "http://127.0.0.01/", "http://1.2.3.4.5/", "http://256.1.1.1/",
        "http://localhost.0x7f/", "http://[::ffff:7f00:1/", "http://[::1%25lo]/",
        "http://[fe80::1%eth0]/", "http://[v1.x]/", "http://user@example.com/",
        "http://user:secret@example.com/", "http://example.com@127.0.0.1/",
        "http://127.0.0.1\\@example.com/", "http:\\\\127.0.0.1/", "http://example.com\\.evil/",
        "http:///127.0.0.1/", "http:/127.0.0.1/", "http:127.0.0.1", "//127.0.0.1/", "127.0.0.1",
        "http://", "http://:80/", "http://a..b/", "http://.a/", "http://example.com:0/",
        "http://example.com:65536/", "http://example.com:+80/", "http://example.com:/",
        "http://exa mple.com/", "http://example.com/a b", "http://example.com/\r\nX: y",
        "http://example.com/\x00", " http://example.com/", "http://example.com/\n",
        "http://example%2ecom/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http://ⓛocalhost/",
        "ftp://example.com/", "gopher://example.com/", "javascript:alert(1)", "file:///etc/passwd",
        "", "http://" + "a" * 64 + ".com/", "http://[::1]:80:80/", "http://[::1]x/",
    ],
)  # fmt: skip
def test_an_oddly_spelled_url_is_rejected(written: str) -> None:
    with pytest.raises(MediaRefused):
        parse_web_url(written)


def test_the_length_of_a_url_is_limited() -> None:
    with pytest.raises(BadMedia, match="at most 8192 characters"):
        parse_web_url("http://example.com/" + "a" * 8192)


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/b.png", "http://example.com:81/b.png"),
        ("b.png", "http://example.com:81/a/b.png"),
        ("//other.example/b", "http://other.example/b"),
        ("https://other.example", "https://other.example/"),
    ],
)
def test_a_redirect_may_be_relative(location: str, leads_to: str) -> None:
    assert str(parse_web_url("http://example.com:81/a/x").joined(location)) == leads_to


@pytest.mark.parametrize(
    "location", ["ftp://a/", "file:///etc/passwd", "http://a@b/", "\\\\b", "http://[x"]
)
def test_a_redirect_is_parsed_as_strictly(location: str) -> None:
    with pytest.raises(BadMedia):
        parse_web_url("http://example.com/").joined(location)


def test_a_public_address_of_this_machine_has_to_be_listed() -> None:
    own, other = ip_address("93.184.216.34"), ip_address("93.184.216.35")
    assert AllowList().allows("x", other, {own})
    assert not AllowList().allows("x", own, {own})
    assert AllowList(["93.184.216.34"]).allows("x", own, {own})
    assert AllowList(["me.test"]).allows("me.test", own, {own})


def test_the_addresses_of_this_machine_are_those_that_a_socket_can_be_bound_to() -> None:
    found = interface_addresses()
    assert ip_address("127.0.0.1") in found
    for address in found:
        if not address.is_link_local:  # which needs the name of its interface
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            with socket.socket(family) as sock:
                sock.bind((str(address), 0))
