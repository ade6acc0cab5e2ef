"""`rekindle cache` sends the right requests, and shows tables and errors."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from rekindle.cli import cache_views as views
from rekindle.cli import main as cli
from rekindle.cli.cache_client import CacheClient, RequestRefused, entry_path
from rekindle.errors import RekindleError
from rekindle.kvcache.disk import check
from rekindle.kvcache.disk.check import Finding, FolderReport

Answer = Callable[[httpx.Request], httpx.Response]

ONE, TWO = "aaaa1111" + "0" * 24, "aaaa2222" + "0" * 24


def entry(key: str = ONE, **more: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "cache_key": key,
        "model": "tiny",
        "segments": [{"type": "system", "hash": "a1b2"}],
        "token_count": 1730,
        "stored_tokens": 1728,
        "tier": "ram",
        "size_bytes": 12_400_000,
        "hit_count": 3,
        "pinned": False,
        "ttl": 1800,
        "created_at": now - 7300,
        "last_used": now - 200,
        "expires_at": now + 750,
        "names": [{"kind": "session_id", "name": "chat-123"}],
        "preview": "What is the moon made of?",
        **more,
    }


class Server:
    """Answers from a table, and records the requests."""

    def __init__(self, answers: dict[str, Any]) -> None:
        listing = {"entries": [entry(ONE), entry(TWO)], "count": 2}
        self.answers = {"GET /v1/cache": listing, **answers}
        self.received: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.received.append(request)
        answer = self.answers.get(f"{request.method} {request.url.path}")
        if answer is None:
            return httpx.Response(404, json={"error": {"message": "No such cache key."}})
        return httpx.Response(200, json=answer)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], None]:
    """Replaces the network by a fixed answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("REKINDLE_API_KEY", raising=False)
    real = httpx.Client

    def install(answer: Answer) -> None:
        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(
            httpx, "Client", lambda **options: real(**{**options, "transport": transport})
        )

    return install


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["cache", *arguments], env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.stdout


def text(view: RenderableType) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_entries_are_listed_in_readable_form() -> None:
    pinned = entry(TWO, model="other", pinned=True, expires_at=None)
    shown = text(views.entries_table([entry(), pinned]))
    first, second = shown.splitlines()[1:]
    for part in (
        "aaaa11110000",
        "tiny",
        "chat-123",
        "ram",
        "1,730",
        "12.4 MB",
        "3 min ago",
        "the moon made of?",
    ):
        assert part in first
    assert "in 12 min" in first
    assert "pinned, never" in second
    assert ONE not in shown


def test_a_column_with_the_same_value_everywhere_is_left_out() -> None:
    header, *_ = text(views.entries_table([entry(names=[]), entry(TWO, names=[])])).splitlines()
    assert header.split() == ["key", "tier", "tokens", "size", "hits", "last", "used", "expires",
                              "last", "message"]  # fmt: skip


def test_no_figure_is_cut_off_in_a_narrow_terminal() -> None:
    """Names and messages give way instead."""
    names = [{"kind": "session_id", "name": "a-session-with-quite-a-long-name-of-an-agent"}]
    console = Console(width=70, color_system=None)
    with console.capture() as captured:
        console.print(views.entries_table([entry(names=names), entry(TWO, size_bytes=1)]))
    shown = captured.get()
    for part in ("aaaa11110000", "1,730", "12.4 MB", "1 byte", "3 min ago", "in 12 min"):
        assert part in shown


def test_entries_without_state_are_counted_and_listed_on_demand() -> None:
    empty = entry(TWO, tier=None, size_bytes=0)
    shown = text(views.entries_table([entry(), empty]))
    assert "aaaa22220000" not in shown
    assert shown.splitlines()[-1] == "1 entry has no stored state; --all shows it."
    shown = text(views.entries_table([empty, empty]))
    assert shown.strip() == "2 entries have no stored state; --all shows them."
    assert "aaaa22220000" in text(views.entries_table([entry(), empty], show_empty=True))
    assert "no entries yet" in text(views.entries_table([]))


def test_an_admin_sees_whose_entries_they_are() -> None:
    """Other callers get no tenants from the server."""
    both = [entry(tenant="f00d"), entry(TWO, tenant="beef")]
    shown = text(views.entries_table(both))
    assert "tenant" in shown
    assert "f00d" in shown
    assert "beef" in shown
    assert "f00d" in text(views.entry_table(both[0]))
    assert "tenant" not in text(views.entries_table([entry(), entry(TWO)]))


def test_keys_with_the_same_beginning_are_shown_in_full() -> None:
    same = "f" * 20
    shown = text(views.entries_table([entry(same + "1"), entry(same + "2")]))
    assert same + "1" in shown
    assert same + "2" in shown


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [(0, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (7300, "2 h ago"), (86400, "1 day ago"),
     (3 * 86400, "3 days ago"), (-5, "0 s ago")],
)  # fmt: skip
def test_ages_are_shown_in_the_largest_unit(
    monkeypatch: pytest.MonkeyPatch, age_s: float, expected: str
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    assert views.ago(1_000_000.0 - age_s) == expected


def test_an_expired_entry_is_shown_as_expired() -> None:
    assert views.expiry(entry(expires_at=time.time() - 1)) == "expired"


def test_all_details_of_an_entry_are_shown() -> None:
    shown = text(views.entry_table(entry()))
    for part in (ONE, "session_id chat-123", "system a1b2", "1,728", "2 h ago", "What is the moon"):
        assert part in shown


def test_figures_are_shown_with_units() -> None:
    stats = {"total_entries": 5, "by_tier": {"ram": 4, "disk": 1}, "ram_bytes": 1_020_000_000,
             "hit_rate": 0.86, "disk_state": "ok"}  # fmt: skip
    shown = text(views.stats_table(stats))
    for part in ("entries by tier", "ram: 4, disk: 1", "1.0 GB", "86%", "ok"):
        assert part in shown


def test_text_from_clients_cannot_control_the_terminal() -> None:
    names = [{"kind": "session_id", "name": "[red]x[/] \x1b[2J \x07"}]
    shown = text(views.entries_table([entry(names=names)]))
    assert "[red]x[/]" in shown
    assert "\x1b" not in shown


def test_an_explanation_shows_both_sides_of_the_first_difference() -> None:
    result = {
        "status": "partial_hit", "reusable_tokens": 1200, "invalidated_at": "turn 2",
        "reason": "turn_changed",
        "diverged_at": {"message": 3, "role": "user", "stored": "tea, please", "sent": "coffee"},
    }  # fmt: skip
    shown = text(views.explanation(result))
    for part in ("partial_hit: 1,200 tokens", "turn_changed", "messages[3] (user)", "turn 2"):
        assert part in shown
    assert "stored: tea, please" in shown
    assert "sent:   coffee" in shown


def test_an_explanation_without_a_difference_is_one_line() -> None:
    result = {"status": "miss", "reusable_tokens": 0, "invalidated_at": None, "reason": "expired"}
    assert text(views.explanation(result)).strip() == "miss: 0 tokens can be reused (expired)"


def client(answer: Answer) -> CacheClient:
    return CacheClient("http://x/v1/", "secret", httpx.MockTransport(answer))


def test_the_client_sends_its_key_and_json() -> None:
    server = Server({f"POST /v1/cache/{ONE}/pin": entry()})
    client(server).send("POST", f"/cache/{ONE}/pin", json={})
    [request] = server.received
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["content-type"] == "application/json"


def test_all_pages_are_read() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        number = int(request.url.params.get("after", "0"))
        has_more = number < 3
        page = {"entries": [entry(f"key{number}")], "count": 1, "has_more": has_more}
        return httpx.Response(200, json={**page, "next": str(number + 1) if has_more else None})

    client = CacheClient("http://here/v1", None, httpx.MockTransport(answer))
    listing = client.listing()
    assert [each["cache_key"] for each in listing["entries"]] == ["key0", "key1", "key2", "key3"]
    assert listing["count"] == 4


def test_a_key_is_escaped_in_the_path() -> None:
    server = Server({})
    with pytest.raises(RequestRefused):
        client(server).send("DELETE", entry_path("../chat?x#y"))
    assert server.received[0].url.raw_path == b"/v1/cache/..%2Fchat%3Fx%23y"


def test_a_unique_prefix_finds_its_entry() -> None:
    found = client(Server({}))
    assert found.find("aaaa1")["cache_key"] == ONE
    assert found.find(TWO)["cache_key"] == TWO


def test_a_full_key_wins_over_a_longer_key_with_that_prefix() -> None:
    entries = [entry("abc"), entry("abcdef")]
    assert client(Server({"GET /v1/cache": {"entries": entries}})).find("abc") == entries[0]


def test_an_ambiguous_prefix_lists_the_matching_keys() -> None:
    with pytest.raises(RekindleError) as refused:
        client(Server({})).find("aaaa")
    assert ONE in str(refused.value)
    assert TWO in str(refused.value)
    with pytest.raises(RekindleError, match="no entry has the name 'bbbb'"):
        client(Server({})).find("bbbb")


def test_a_name_finds_its_entry() -> None:
    names = {"project": "analyst", "message_id": "msg_1", "session_id": "chat"}
    names["kv_cache_session_id"] = "5"
    named = entry(TWO, names=[{"kind": kind, "name": name} for kind, name in names.items()])
    server = Server({"GET /v1/cache": {"entries": [entry(ONE), named]}})
    for name in names.values():
        assert client(server).find(name) == named


def test_a_project_of_the_operator_is_found_though_no_list_shows_it() -> None:
    shared = entry(TWO, names=[{"kind": "project", "name": "analyst"}])
    listing = {"entries": [entry(ONE)]}
    server = Server({"GET /v1/cache": listing, "GET /v1/cache/analyst": shared})
    assert client(server).find("analyst") == shared
    figures = Server({"GET /v1/cache": listing, "GET /v1/cache/stats": {"total_entries": 1}})
    with pytest.raises(RekindleError, match="no entry has the name"):
        client(figures).find("stats")


@pytest.mark.parametrize("error", [{"message": "The queue is full"}, "The queue is full"])
def test_a_refusal_shows_the_message_of_the_server(error: object) -> None:
    """The second form is the one of Ollama's API."""

    def refuse(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": error})

    with pytest.raises(RequestRefused, match=r"^The queue is full$"):
        client(refuse).send("GET", "/cache/stats")


@pytest.mark.parametrize(
    ("key", "message"), [(None, "needs an API key"), ("k", "does not know this API key")]
)
def test_a_missing_key_and_a_wrong_key_are_told_apart(key: str | None, message: str) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(401, json={"error": "no"}))
    with pytest.raises(RequestRefused, match=message):
        CacheClient("http://x/v1", key, transport).send("GET", "/cache/stats")


@pytest.mark.parametrize("url", ["localhost:8080", "foo", "ftp://x/v1", ""])
def test_what_is_not_the_url_of_a_server_is_named(url: str) -> None:
    with pytest.raises(RekindleError, match="is not the URL of a server"):
        CacheClient(url, None).send("GET", "/cache/stats")


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>hello</html>"),
        httpx.Response(404, json={"detail": "x"}),
        httpx.Response(200, json=[]),
    ],
)
def test_a_server_that_is_not_rekindle_is_recognised(answer: httpx.Response) -> None:
    with pytest.raises(RekindleError, match="not a Rekindle server"):
        client(lambda _request: answer).send("GET", "/cache/stats")


def test_the_error_for_a_missing_server_says_how_to_start_it(
    serve: Callable[[Answer], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=request)

    serve(nobody)
    monkeypatch.setattr(sys, "argv", ["rekindle", "cache", "ls"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert "`rekindle serve`" in message
    assert len(message.strip().splitlines()) == 1


def test_json_output_is_the_answer_of_the_server(serve: Callable[[Answer], None]) -> None:
    server = Server({"GET /v1/cache/stats": {"total_entries": 5}})
    serve(server)
    assert json.loads(run("stats", "--json")) == {"total_entries": 5}
    assert json.loads(run("ls", "--json")) == server.answers["GET /v1/cache"]


def test_commands_accept_prefixes_of_keys(serve: Callable[[Answer], None]) -> None:
    server = Server(
        {
            f"GET /v1/cache/{ONE}": entry(),
            f"POST /v1/cache/{ONE}/pin": entry(pinned=True),
            f"POST /v1/cache/{ONE}/unpin": entry(),
            f"DELETE /v1/cache/{ONE}": {"status": "evicted", "cache_key": ONE},
            f"DELETE /v1/cache/{TWO}": {"status": "evicted", "cache_key": TWO},
            "POST /v1/cache/gc": {"status": "ok", "removed": 2, "freed_bytes": 5_000_000},
        }
    )
    serve(server)
    assert ONE in run("show", "aaaa1")
    assert f"{ONE} is pinned" in run("pin", "aaaa1")
    assert "no longer" in run("unpin", "aaaa1")
    assert run("rm", "aaaa1", "aaaa2", "aaaa1").count("is deleted") == 2
    assert "removed 2 entries, freed 5.0 MB" in run("gc")


def test_nothing_is_removed_when_one_key_is_unknown(serve: Callable[[Answer], None]) -> None:
    server = Server({})
    serve(server)
    result = CliRunner().invoke(cli.app, ["cache", "rm", "aaaa1", "bbbb"])
    assert isinstance(result.exception, RekindleError)
    assert {request.method for request in server.received} == {"GET"}


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("written", "flags", "sent"),
    [
        (MESSAGES, (), {"model": "tiny"}),
        ({"messages": MESSAGES}, (), {"model": "tiny"}),
        (
            {"messages": MESSAGES, "tools": [], "model": "other", "stream": True},
            (),
            {"model": "other", "tools": []},
        ),
        ({"messages": MESSAGES, "model": "other"}, ("--model", "third"), {"model": "third"}),
    ],
)
def test_explain_takes_messages_or_a_whole_request(
    serve: Callable[[Answer], None],
    written: Any,
    flags: tuple[str, ...],
    sent: dict[str, Any],
) -> None:
    result = {"status": "hit", "reusable_tokens": 9, "invalidated_at": None, "reason": "full_match"}
    server = Server({"POST /v1/cache/validate": result})
    serve(server)
    Path("body.json").write_text(json.dumps(written))
    shown = run("explain", "--key", "aaaa1", "--messages", "body.json", *flags)
    assert "hit: 9 tokens" in shown
    asked = json.loads(server.received[-1].content)
    assert asked == {"cache_key": ONE, "messages": MESSAGES, **sent}


@pytest.mark.parametrize("written", ["{", '"text"', '{"prompt": "x"}', None])
def test_a_file_without_messages_is_refused_in_one_sentence(
    serve: Callable[[Answer], None], written: str | None
) -> None:
    serve(Server({}))
    if written is not None:
        Path("body.json").write_text(written)
    arguments = ["cache", "explain", "--key", "aaaa1", "--messages", "body.json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert "body.json" in str(result.exception)


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_the_exit_status_of_a_check_says_whether_it_found_damage_or_skipped_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: bool, repair: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[Path, bool]] = []
    found = (Finding("bad_file", "abcd", "A block's file is bad: [x]."),) if bad else ()

    def verify(
        folder: Path, *, repair: bool, secret: bytes | None, progress: Any
    ) -> list[FolderReport]:
        asked.append((folder, repair))
        progress(1, 2)
        return [FolderReport(folder / "m", blocks=7, findings=found),
                FolderReport(folder / "n", in_use=True)]  # fmt: skip

    monkeypatch.setattr(check, "check", verify)
    flags = ["--repair"] if repair else []
    result = CliRunner().invoke(cli.app, ["cache", "check", "--cache-dir", "kv", *flags])
    assert result.exit_code == (1 if bad else 2)
    assert asked == [(Path("kv"), repair)]
    assert "7 good blocks" in result.stdout
    assert "a server is using it. Stop the server first" in result.stdout
    assert ("A block's file is bad: [x]. abcd" in result.stdout) == bad
    assert ("--repair" in result.stdout) == (bad and not repair)


def test_a_folder_with_another_secret_names_settings_that_the_command_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed = FolderReport(Path("kv") / "m", is_sealed=True)
    monkeypatch.setattr(check, "check", lambda *_, **__: [sealed])
    result = CliRunner().invoke(cli.app, ["cache", "check", "--cache-dir", "kv"])
    said = " ".join(result.stdout.split())
    assert "`cache_secret_file` in the settings file" in said
    assert "REKINDLE_CACHE_SECRET_FILE" in said
    assert "--cache-secret-file" not in said


def test_a_missing_folder_has_no_damage(tmp_path: Path) -> None:
    run("check", "--cache-dir", str(tmp_path / "none"))
