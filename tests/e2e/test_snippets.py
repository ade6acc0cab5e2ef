"""Every shell and Python snippet of README and docs runs, or says why no test runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rekindle.config import load_config
from tests.support.rounds import LONG
from tests.support.server import ROOT
from tests.support.snippets import Reader, Snippet, is_running, pid_file, snippets_of

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SNIPPETS = {page: snippets_of(page) for page in PAGES}
SETTINGS_FILE = "# rekindle.yaml\n"


def wanted(snippets: list[Snippet]) -> list[Snippet]:
    return [each for each in snippets if each.is_runnable and (LONG or each.long is None)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if wanted(SNIPPETS[page])], ids=lambda page: str(page.name)
)
def test_the_snippets_of_a_page_run_as_written(page: Path, tmp_path: Path) -> None:
    """They run in order and share a server, as they do for a reader."""
    with Reader(tmp_path) as reader:
        for snippet in wanted(SNIPPETS[page]):
            reader.run(snippet)


def test_every_snippet_names_its_language() -> None:
    """A snippet without a language would not be run. `text` is for what is not code."""
    unnamed = [each for found in SNIPPETS.values() for each in found if not each.language]
    assert list(map(str, unnamed)) == []


@pytest.mark.parametrize(
    "snippet",
    [each for found in SNIPPETS.values() for each in found if each.code.startswith(SETTINGS_FILE)],
    ids=str,
)
def test_a_settings_file_on_a_page_is_accepted(snippet: Snippet, tmp_path: Path) -> None:
    assert snippet.language == "yaml"
    file = tmp_path / "rekindle.yaml"
    file.write_text(snippet.code)
    assert load_config({}, {}, file).given


# -- the reader itself -----------------------------------------------------------------------------


def found(tmp_path: Path, text: str) -> list[Snippet]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return snippets_of(page)


PAGE = """\
```sh
echo 1
```

<!-- not run: needs a GPU -->
```bash
nvcc
```

<!-- long: loads two models -->

```python
1
```

<!-- continues -->
```python
2
```

- item

  ```sh
  echo 3
  ```

```
text
```
"""


def test_a_snippet_has_the_language_line_and_marker_of_its_fence(tmp_path: Path) -> None:
    snippets = found(tmp_path, PAGE)
    assert [each.language for each in snippets] == ["sh", "bash", "python", "python", "sh", ""]
    assert [each.line for each in snippets] == [1, 6, 12, 17, 23, 27]
    assert [each.is_runnable for each in snippets] == [True, False, True, True, True, False]
    assert snippets[1].not_run == "needs a GPU"
    assert snippets[2].long == "loads two models"
    assert [each.continues for each in snippets] == [False, False, False, True, False, False]
    assert snippets[4].code == "echo 3\n"


@pytest.mark.parametrize("marker", ["not run", "long", "continues: why"])
def test_a_marker_without_its_reason_is_an_error(marker: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("page.md:2: write `<!-- ")):
        found(tmp_path, f"<!-- {marker} -->\n```sh\nls\n```\n")


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("sh", "false\ntrue\n"),
        ("sh", "cat nothing | sort\n"),
        ("sh", "curl -s http://127.0.0.1:8080/v1/cache/validate -d '{}'\n"),
        ("sh", "rekindle serve --model ./nothing.gguf\n"),
        ("python", "import nothing_of_this_name\n"),
    ],
)
def test_a_snippet_that_fails_fails_the_test(language: str, code: str, tmp_path: Path) -> None:
    [snippet] = found(tmp_path, f"```{language}\n{code}```\n")
    with (
        Reader(tmp_path / "folder") as reader,
        pytest.raises(AssertionError, match=r"page\.md:1 ended with"),
    ):
        reader.run(snippet)


SERVERS = """\
```sh
rekindle serve --force-cache
curl -s localhost:8080/health
```
```python
import httpx
health = httpx.get("http://127.0.0.1:8080/health").json()
```
<!-- continues -->
```python
assert health == {"status": "ok"}
```
```sh
rekindle serve --api-key secret  # in place of the first server
test $(curl -s -o /dev/null -w '%{http_code}' localhost:8080/v1/models || true) = 401
```
"""


def test_a_command_that_asks_a_server_finds_the_one_of_the_page(tmp_path: Path) -> None:
    [snippet] = found(tmp_path, "```sh\nrekindle cache stats --json | grep total_entries\n```\n")
    with Reader(tmp_path / "folder") as reader:
        reader.run(snippet)


def test_a_page_has_one_server_which_its_snippets_start_replace_and_leave(tmp_path: Path) -> None:
    pids = set()
    with Reader(tmp_path / "folder") as reader:
        for snippet in found(tmp_path, SERVERS):
            reader.run(snippet)
            pids.add(int(pid_file(reader.folder).read_text()))
    assert len(pids) == 2
    assert not any(map(is_running, pids))
