"""The console is one page that loads nothing from elsewhere and holds no data."""

from __future__ import annotations

import gzip
import hashlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rekindle.front import console
from rekindle.version import __version__
from tests.api.scripted import Front, ScriptedRuntime

SOURCES = Path(__file__).parents[2] / "console"
BUNDLE = Path(console.__file__).parent / "console"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_COMPRESSED_BYTES = 300_000


class Page(HTMLParser):
    """What a page loads, and whether it has inline code or style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag in ("script", "link", "img"):
            self.loaded.append(found.get("src") or found.get("href") or "inline")
        self.inline += [name for name in found if name.startswith("on") or name == "style"]


def test_a_browser_gets_the_console() -> None:
    answer = Front().get("/", headers=HTML)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(answer.text)
    assert page.loaded
    assert not page.inline
    for path in page.loaded:
        assert path.startswith("/console/")
        assert Front().get(path).status_code == 200


def test_the_policy_allows_no_inline_code_and_no_other_server() -> None:
    policy = Front().get("/", headers=HTML).headers["content-security-policy"]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == parts["style-src"] == parts["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", sorted(console.FILES))
def test_a_file_of_the_console_has_its_type_and_is_not_sent_twice(name: str) -> None:
    front = Front()
    answer = front.get(f"/console/{name}")
    assert answer.headers["content-type"] == console.FILES[name]
    again = front.get(f"/console/{name}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["index.html", "sources.sha256", "..%2fapp.py", "../app.py", "x", ""]
)
def test_only_the_files_of_the_page_are_served(name: str) -> None:
    assert Front().get(f"/console/{name}").status_code == 404


def test_the_page_needs_no_key_and_its_data_does() -> None:
    front = Front(api_key=("secret",))
    assert front.get("/", headers=HTML).status_code == 200
    assert front.get("/console/console.js").status_code == 200
    for path in ("/v1/models", "/v1/cache/tree", "/v1/internal/live"):
        assert front.get(path).status_code == 401


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_program_without_a_key_learns_only_that_it_needs_one(key: str | None) -> None:
    front = Front(api_key=("secret",))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    told = front.get("/", headers={**headers, "accept": "application/json"}).json()
    assert told == {"name": "rekindle", "needs_key": True, "links": {"health": "/health"}}
    text = front.get("/", headers={**headers, "accept": "*/*"}).text
    assert "needs an API key" in text
    assert "tiny" not in text
    assert __version__ not in text


@pytest.mark.parametrize("accept", ["application/json", "application/json, text/plain, */*"])
def test_programs_that_ask_for_json_get_it(accept: str) -> None:
    told = Front().get("/", headers={"accept": accept}).json()
    assert told["version"] == __version__
    assert told["models"] == [{"id": "tiny", "max_model_len": 4096}]


@pytest.mark.parametrize("accept", ["*/*", ""])
def test_curl_gets_a_text(accept: str) -> None:
    loading = ScriptedRuntime(name="other")
    loading.supervisor.ready = None
    answer = Front(ScriptedRuntime(), loading).get("/", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert "model tiny: 4096 tokens\nmodel other: loading\n" in answer.text


def test_an_admin_sees_the_settings_without_secrets() -> None:
    front = Front(api_key=("hush-7",), admin_key=("root",), temperature=0.5)
    answer = front.get("/v1/internal/settings", headers={"authorization": "Bearer root"})
    shown = answer.json()["settings"]
    assert shown["temperature"] == {"value": 0.5, "from": "default"}
    assert shown["api_key"]["value"] == "(hidden)"
    assert "hush-7" not in answer.text
    tenant = front.get("/v1/internal/settings", headers={"authorization": "Bearer hush-7"})
    assert tenant.status_code == 403


def test_each_link_is_served() -> None:
    for link in console.LINKS.values():
        assert "is not served here" not in Front().get(link).text


def test_the_bundle_was_built_from_these_sources() -> None:
    """`make console` builds it again. The same hash is computed in console/build.mjs."""
    names = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    names += [f"src/{path.name}" for path in (SOURCES / "src").iterdir()]
    found = hashlib.sha256()
    for name in sorted(names):
        found.update(f"{name}\n".encode() + (SOURCES / name).read_bytes())
    assert (BUNDLE / "sources.sha256").read_text().strip() == found.hexdigest()


def test_the_bundle_is_small_and_names_what_is_in_it() -> None:
    sizes = [len(gzip.compress(path.read_bytes())) for path in BUNDLE.iterdir()]
    assert sum(sizes) < MAX_COMPRESSED_BYTES
    notices = (BUNDLE / "NOTICES.txt").read_text()
    for package in ("preact", "marked", "dompurify", "uplot"):
        assert f"\n{package} " in notices


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (SOURCES / "package-lock.json").read_text()
