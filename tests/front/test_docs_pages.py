"""The HTML pages are self-contained, so they work without a network."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from tests.api.live import live
from tests.api.scripted import Front

PAGES = ("/docs",)


class Page(HTMLParser):
    """The tags, ids, links and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes |= set(found)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src") if name in found]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_loads_nothing(path: str) -> None:
    answer = Front().get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(answer.text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(link.startswith(("/", "#")) for link in page.links)
    assert not {name for name in page.attributes if name.startswith("on") or name == "style"}


@pytest.mark.parametrize("path", PAGES)
def test_the_content_security_policy_allows_only_the_inline_style(path: str) -> None:
    answer = Front().get(path)
    [style] = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", f"style-src 'sha256-{digest}'"} <= set(policy)
    assert not any("unsafe" in each or "http" in each for each in policy)


def test_the_reference_lists_every_operation_and_type() -> None:
    front = Front()
    document = front.get("/openapi.json").json()
    page = Page(front.get("/docs").text)
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in page.ids
    assert set(document["components"]["schemas"]) <= set(page.ids)
    targets = [link[1:] for link in page.links if link.startswith("#")]
    assert set(targets) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_a_head_request_gets_no_body() -> None:
    with live(Front()) as server, server.client() as client:
        for path in ("/", "/docs", "/health", "/v1/models"):
            answer: httpx.Response = client.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
        assert client.get("/health").json() == {"status": "ok"}  # the connection still works
