from __future__ import annotations

import pytest

from rekindle.media.addresses import parse_web_url
from rekindle.media.errors import BadMedia, MediaRefused


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
def test_a_url_is_taken_apart(written: str, host: str, port: int, target: str) -> None:
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
def test_whatever_is_spelled_oddly_is_refused(written: str) -> None:
    with pytest.raises(MediaRefused):
        parse_web_url(written)


def test_a_url_has_a_bounded_length() -> None:
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
def test_a_redirect_is_read_as_strictly(location: str) -> None:
    with pytest.raises(BadMedia):
        parse_web_url("http://example.com/").joined(location)
