"""The generated pages match the code: settings, HTTP API, Python API, metrics and errors."""

from __future__ import annotations

import pytest
from prometheus_client.exposition import generate_latest

from rekindle.config import SETTINGS, load_config
from rekindle.config.sources import DISK_VARIABLE, ENV_PREFIX, OTHER_VARIABLES
from rekindle.front.metrics import ModelMetrics
from rekindle.front.request_metrics import RequestMetrics
from tools.reference.errors import ERRORS, codes
from tools.reference.markdown import PLACE, TEMPLATES, fill
from tools.reference.pages import DOCS, PAGES
from tools.reference.settings import EXAMPLES, VARIABLE_TEXTS, example_value


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    """`make docs` writes the pages again after a change of what they describe."""
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(
    "name", [name for name, each in SETTINGS.items() if not isinstance(each.default, bool)]
)
def test_the_example_of_a_setting_is_accepted(name: str) -> None:
    if name in ("projects", "vlm"):
        return  # a section of the file with an example of its own, and a switch
    value = example_value(SETTINGS[name]).strip("'")  # quoted for a shell
    takes_many = isinstance(SETTINGS[name].default, tuple)
    config = load_config({name: [value] if takes_many else value}, {})
    assert getattr(config, name) != SETTINGS[name].default or name == "normaliser"


def test_every_setting_is_listed_with_its_file_key_flag_and_variable() -> None:
    page = (DOCS / "settings.md").read_text()
    for name, declared in SETTINGS.items():
        flag = [f"--{name.replace('_', '-')}"] if declared.setting.flag else []
        for spelled in (name, *flag, f"REKINDLE_{name.upper()}"):
            assert f"`{spelled}`" in page, spelled


def test_every_example_and_variable_belongs_to_a_setting_that_exists() -> None:
    assert EXAMPLES.keys() <= SETTINGS.keys()
    prefixed = {f"{ENV_PREFIX}{name.upper()}" for name in OTHER_VARIABLES}
    assert VARIABLE_TEXTS.keys() == {DISK_VARIABLE, *prefixed}


def test_every_exported_metric_is_listed() -> None:
    page = (DOCS / "metrics.md").read_text()
    exported = generate_latest(ModelMetrics([], RequestMetrics())).decode()
    names = [line.split()[2] for line in exported.splitlines() if line.startswith("# HELP")]
    assert names
    for name in names:
        assert f"| `{name}` |" in page


def test_every_error_code_is_explained_and_every_explained_code_exists() -> None:
    assert {code for code, _, _ in codes()} == ERRORS.keys()


def test_a_template_and_its_parts_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"metrics\.md and its parts disagree about metrics, more"):
        fill("metrics.md", more="")
    assert {path.name for path in TEMPLATES.iterdir()} == PAGES.keys()
    assert all(PLACE.search(path.read_text()) for path in TEMPLATES.iterdir())
