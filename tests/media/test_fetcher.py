"""The fetcher against a hostile server. A canary server on loopback must never be reached."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from ipaddress import ip_address
from unittest.mock import patch

import httpcore
import pytest

from rekindle.errors import BadMedia, MediaRefused, TooManyRequests
from rekindle.media import fetcher as fetcher_module
from rekindle.media.addresses import Address, AllowList
from rekindle.media.fetcher import MAX_TENANT_LOOKUPS, Fetcher, FetchLimits, SystemResolver
from tests.media.attacker import PEM, Attacker, Canary, attacking

MAX_BYTES = 1 << 20
PATIENT = FetchLimits(total_s=60, read_s=60)  # for tests that are not about time
PUBLIC = "93.184.216.34"


class Names:
    """A name server that gives a list of answers for a name, and repeats the last one."""

    def __init__(self, **answers: list[str]) -> None:
        self.answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, _tenant: bytes) -> list[Address]:
        self.asked.append(host)
        answers = self.answers.get(host, [])
        answer = answers.pop(0) if len(answers) > 1 else answers[0] if answers else ""
        return [ip_address(each) for each in answer.split()]


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    with attacking() as server:
        server.files["/red.png"] = (b"a picture", "image/png")
        yield server


@pytest.fixture
def canary() -> Iterator[Canary]:
    canary = Canary()
    yield canary
    assert not canary.was_hit
    canary.close()


def fetch(
    url: str,
    names: Names | None = None,
    *,
    allowed: tuple[str, ...] = ("attacker.test",),
    limits: FetchLimits = PATIENT,
    ssl_context: ssl.SSLContext | None = None,
) -> bytes:
    resolve = names or Names(attacker_test=["127.0.0.1"])
    fetcher = Fetcher(AllowList(allowed), limits=limits, resolve=resolve, ssl_context=ssl_context)
    return asyncio.run(fetcher.fetch(url, MAX_BYTES))


def test_a_file_is_fetched_from_an_allowed_host(attacker: Attacker) -> None:
    attacker.requests.clear()
    assert fetch(attacker.url("/red.png")) == b"a picture"
    [(path, headers)] = attacker.requests
    assert path == "/red.png"
    assert headers["Host"] == f"attacker.test:{attacker.port}"
    assert headers["Accept-Encoding"] == "identity"
    assert not {"Authorization", "Cookie", "Referer"} & headers.keys()


def test_proxies_of_the_environment_are_not_used(
    attacker: Attacker, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{canary.port}")
    assert fetch(attacker.url("/red.png")) == b"a picture"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::ffff:7f00:1]",
        "[::ffff:127.0.0.1]", "[::1]", "[::]", "0.0.0.0", "0", "localhost", "LOCALHOST.",
        "user@127.0.0.1", "attacker.test@127.0.0.1", "127.0.0.1\\@attacker.test",
        "attacker.test\\@127.0.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "inside.test",
        "169.254.169.254",
    ],
)  # fmt: skip
def test_no_spelling_of_loopback_is_connected_to(host: str, canary: Canary) -> None:
    names = Names(localhost=["127.0.0.1"], inside_test=["127.0.0.1"], attacker_test=["127.0.0.1"])
    with pytest.raises(MediaRefused):
        fetch(f"http://{host}:{canary.port}/", names)
    assert set(names.asked) <= {"localhost", "inside.test"}


def test_unknown_and_internal_names_get_the_same_error() -> None:
    with pytest.raises(MediaRefused) as unknown:
        fetch("http://unknown.test/")
    with pytest.raises(MediaRefused) as inside:
        fetch("http://inside.test/", Names(inside_test=["10.0.0.1"]))
    assert str(unknown.value) == str(inside.value).replace("inside", "unknown")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:7f00:1]"])
def test_a_redirect_to_loopback_is_not_followed(
    host: str, attacker: Attacker, canary: Canary
) -> None:
    names = Names(attacker_test=["127.0.0.1"], localhost=["127.0.0.1"])
    with pytest.raises(MediaRefused):
        fetch(attacker.url(f"/redirect?http://{host}:{canary.port}/"), names)


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://attacker.test/", "data:,x"])
def test_a_redirect_to_another_scheme_is_not_followed(location: str, attacker: Attacker) -> None:
    with pytest.raises(MediaRefused, match="only fetched from http:// and https:// URLs"):
        fetch(attacker.url(f"/redirect?{location}"))


def test_a_redirect_to_an_allowed_address_is_followed(attacker: Attacker) -> None:
    assert fetch(attacker.url("/redirect?/red.png")) == b"a picture"


def test_the_number_of_redirects_is_limited(attacker: Attacker) -> None:
    attacker.requests.clear()
    with pytest.raises(BadMedia, match="More than 3 redirects"):
        fetch(attacker.url("/loop"))
    assert len(attacker.requests) == 4


def test_a_host_with_one_internal_address_is_rejected(canary: Canary) -> None:
    names = Names(mixed_test=[f"{PUBLIC} 127.0.0.1"])
    with patch.object(httpcore.AnyIOBackend, "connect_tcp") as connect, pytest.raises(MediaRefused):
        fetch(f"http://mixed.test:{canary.port}/", names)
    connect.assert_not_called()


def test_the_connection_goes_to_the_address_that_was_checked(
    canary: Canary,
) -> None:
    names = Names(changing_test=[PUBLIC, "127.0.0.1"])
    refused = httpcore.ConnectError("no traffic in tests")
    with (
        patch.object(httpcore.AnyIOBackend, "connect_tcp", side_effect=refused) as connect,
        pytest.raises(BadMedia, match="cannot be reached"),
    ):
        fetch(f"http://changing.test:{canary.port}/", names)
    assert [call.args[:2] for call in connect.call_args_list] == [(PUBLIC, canary.port)]
    assert names.asked == ["changing.test"]


def test_a_connection_diverted_to_an_internal_address_is_closed(attacker: Attacker) -> None:
    real = httpcore.AnyIOBackend.connect_tcp

    async def divert(
        self: httpcore.AnyIOBackend, _host: str, port: int, timeout: float | None
    ) -> httpcore.AsyncNetworkStream:
        return await real(self, "127.0.0.1", port, timeout)

    attacker.requests.clear()
    with (
        patch.object(httpcore.AnyIOBackend, "connect_tcp", divert),
        pytest.raises(MediaRefused, match="led to an address that is not public"),
    ):
        fetch(attacker.url("/red.png", "public.test"), Names(public_test=[PUBLIC]))
    assert attacker.requests == []


def test_addresses_of_the_systems_resolver_are_checked(canary: Canary) -> None:
    fetcher = Fetcher(AllowList())
    with pytest.raises(MediaRefused):
        asyncio.run(fetcher.fetch(f"http://localhost:{canary.port}/", MAX_BYTES))


@pytest.mark.parametrize("host", ["own.test", PUBLIC])
def test_a_public_address_of_this_machine_is_not_connected_to(host: str) -> None:
    """The canary would be a service on the machine's public interface that trusts local clients."""
    names, own = Names(own_test=[PUBLIC]), frozenset({ip_address(PUBLIC)})
    fetcher = Fetcher(AllowList(), limits=PATIENT, resolve=names, own_addresses=lambda: own)
    with (
        patch.object(httpcore.AnyIOBackend, "connect_tcp", side_effect=AssertionError("connected")),
        pytest.raises(MediaRefused, match="no public address of another machine"),
    ):
        asyncio.run(fetcher.fetch(f"http://{host}/", MAX_BYTES))


def test_an_address_of_this_machine_that_no_interface_shows_is_noticed(attacker: Attacker) -> None:
    """As with routes that make a whole network local."""
    attacker.requests.clear()
    fetcher = Fetcher(AllowList(), limits=PATIENT, own_addresses=frozenset)
    with (
        patch("rekindle.media.addresses.is_public", return_value=True),
        pytest.raises(MediaRefused, match="this server's own machine"),
    ):
        asyncio.run(fetcher.fetch(f"http://127.0.0.1:{attacker.port}/red.png", MAX_BYTES))
    assert attacker.requests == []


def test_the_systems_resolver_finds_names() -> None:
    resolver = SystemResolver()
    assert ip_address("127.0.0.1") in asyncio.run(resolver("localhost", b""))
    assert asyncio.run(resolver("no-such-name.invalid", b"")) == []


def test_names_that_never_resolve_hold_no_lookups_of_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher_module, "LOOKUP_S", 0.05)
    answering = threading.Event()

    def look_up(host: str) -> list[str]:
        if host == "hanging.test":
            answering.wait()
        return [PUBLIC]

    async def scene() -> None:
        resolver = SystemResolver(look_up)
        hanging = [resolver("hanging.test", b"a") for _ in range(MAX_TENANT_LOOKUPS)]
        for error in await asyncio.gather(*hanging, return_exceptions=True):
            assert isinstance(error, BadMedia)
            assert "not resolved within" in str(error)
        with pytest.raises(TooManyRequests):  # until the system has given up on its names
            await resolver("quick.test", b"a")
        monkeypatch.setattr(fetcher_module, "LOOKUP_S", 60.0)
        assert await resolver("quick.test", b"b") == [ip_address(PUBLIC)]
        answering.set()
        while resolver._running:
            await asyncio.sleep(0.001)
        assert await resolver("quick.test", b"a") == [ip_address(PUBLIC)]

    try:
        asyncio.run(asyncio.wait_for(scene(), 30))
    finally:
        answering.set()


def test_a_request_that_is_cancelled_frees_its_lookup_when_the_system_answers() -> None:
    answering = threading.Event()

    def look_up(_host: str) -> list[str]:
        answering.wait()
        return [PUBLIC]

    async def scene() -> None:
        resolver = SystemResolver(look_up)
        asking = asyncio.create_task(resolver("hanging.test", b"a"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answering.set()
        while resolver._running:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scene(), 30))


@pytest.mark.parametrize(
    ("path", "limits", "sentence"),
    [
        ("/slow", FetchLimits(read_s=0.3), "sent nothing for 0.3 seconds"),
        (
            "/drip",
            FetchLimits(total_s=0.3, read_s=20),
            "did not send the file within 0.3 seconds",
        ),
    ],
)
def test_a_slow_body_times_out(
    path: str, limits: FetchLimits, sentence: str, attacker: Attacker
) -> None:
    with pytest.raises(BadMedia, match=sentence):
        fetch(attacker.url(path), limits=limits)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/endless", "at most 1 MiB"),
        ("/lying-length", "at most 1 MiB"),
        ("/cut-short", "valid HTTP response|closed the connection"),
        ("/huge-header", "did not send a valid HTTP response"),
        ("/no-http", "did not send a valid HTTP response"),
        ("/compressed", "sent the file compressed"),
        ("/missing", "answered with status 404"),
    ],
)
def test_an_invalid_response_is_reported_clearly(
    path: str, sentence: str, attacker: Attacker
) -> None:
    with pytest.raises(BadMedia, match=sentence):
        fetch(attacker.url(path))


def test_a_refused_connection_is_reported_clearly(canary: Canary) -> None:
    with pytest.raises(BadMedia, match="cannot be reached"):
        fetch("http://attacker.test:1/")


def test_tls_verifies_the_name_although_the_connection_uses_the_address() -> None:
    context = ssl.create_default_context(cafile=PEM)
    names = Names(attacker_test=["127.0.0.1"], other_test=["127.0.0.1"])
    allowed = ("attacker.test", "other.test")
    with attacking(tls=True) as server:
        server.files["/red.png"] = (b"a picture", "image/png")
        url = server.url("/red.png", scheme="https")
        assert fetch(url, names, allowed=allowed, ssl_context=context) == b"a picture"
        for host, trusted in (("other.test", context), ("attacker.test", None)):
            other = server.url("/red.png", host, "https")
            with pytest.raises(BadMedia, match="cannot be reached"):
                fetch(other, names, allowed=allowed, ssl_context=trusted)
        assert len(server.requests) == 1
