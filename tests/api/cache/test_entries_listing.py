"""GET /v1/cache: entries of all models, page by page."""

from __future__ import annotations

import httpx
import pytest

from tests.api.cache.entries import entry, holding
from tests.api.cache.test_entries_routes import front_of
from tests.api.scripted import Front, error


def keys(answer: httpx.Response) -> list[str]:
    return [each["cache_key"] for each in answer.json()["entries"]]


def test_entries_of_all_models_are_listed_the_last_used_first() -> None:
    front = front_of(
        holding(entry("old", last_used=1.0), entry("new", last_used=3.0)),
        holding(entry("between", last_used=2.0)),
    )
    listed = front.get("/v1/cache").json()
    assert listed["count"] == 3
    assert [(each["cache_key"], each["model"]) for each in listed["entries"]] == [
        ("new", "m0"),
        ("between", "m1"),
        ("old", "m0"),
    ]


def test_an_empty_cache_is_an_empty_list() -> None:
    assert front_of(holding()).get("/v1/cache").json() == {
        "entries": [],
        "count": 0,
        "has_more": False,
        "next": None,
    }


def many() -> Front:
    """Twenty entries in two models; the lower its number, the later it was used."""
    entries = [entry(f"{number:02}", last_used=100.0 - number) for number in range(20)]
    return front_of(
        holding(*(entries[number] for number in range(20) if number % 5)),
        holding(*entries[::5]),
    )


@pytest.mark.parametrize("limit", [1, 3, 7, 19, 20, 21])
def test_pages_together_are_all_entries_in_order(limit: int) -> None:
    front, found, after = many(), list[str](), ""
    while True:
        answer = front.get(f"/v1/cache?limit={limit}{after}")
        page = answer.json()
        assert page["count"] == len(page["entries"]) <= limit
        found += keys(answer)
        if not page["has_more"]:
            break
        assert page["count"] == limit
        after = f"&after={page['next']}"
    assert page["next"] is None
    assert found == [f"{number:02}" for number in range(20)]


def test_without_a_limit_a_page_has_a_hundred() -> None:
    front = front_of(holding(*(entry(str(n), last_used=n) for n in range(101))))
    page = front.get("/v1/cache").json()
    assert (page["count"], page["has_more"]) == (100, True)
    assert keys(front.get(f"/v1/cache?after={page['next']}")) == ["0"]


@pytest.mark.parametrize("after", ["", "x", "1", "1.2.3", "1.", "1.-2", "9" * 30 + ".1", "1.2\n"])
def test_a_cursor_that_is_none_of_ours_is_refused(after: str) -> None:
    answer = many().request("GET", "/v1/cache", params={"after": after})
    assert answer.status_code == 400
    assert error(answer)["param"] == "after"


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "ten", "1.5"])
def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    answer = many().get(f"/v1/cache?limit={limit}")
    assert answer.status_code == 400
    assert error(answer)["param"] == "limit"


def test_the_interface_says_how_to_page() -> None:
    listing = many().get("/openapi.json").json()["paths"]["/v1/cache"]["get"]
    parameters = {each["name"]: each for each in listing["parameters"]}
    assert parameters["limit"]["schema"]["maximum"] == 1000
    assert "`next` of the previous page" in parameters["after"]["description"]
