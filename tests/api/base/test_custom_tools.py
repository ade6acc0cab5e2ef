"""The input of a custom tool is extracted from arguments that arrive in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.base.custom_tools import CustomInput


def read(arguments: str, size: int) -> str:
    custom = CustomInput()
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    return "".join(map(custom.add, pieces)) + custom.end()


@given(st.text(), st.integers(1, 9), st.booleans())
def test_the_text_is_the_argument_however_it_is_cut(text: str, size: int, ascii: bool) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=ascii), size) == text


@given(st.text(), st.integers(1, 9))
def test_any_arguments_are_read_without_an_error(arguments: str, size: int) -> None:
    read(arguments, size)
    read('{"input": "' + arguments, size)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": "x"}', '{"other": "x"}'),
        ("plain " * 100, "plain " * 100),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "cut o', "cut o"),
        (r'{"input": "a\qb"}', r"a\qb"),
        (r'{"input": "a\ud800b"}', r"a\ud800b"),
        (r'{"input": "a\uDC00b\udfff"}', r"a\uDC00b\udfff"),
        ('{"input" : "a", "more": 1}', "a"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_nothing_that_a_model_wrote_is_lost(arguments: str, text: str, size: int) -> None:
    found = read(arguments, size)
    assert found == text
    found.encode()  # it can be sent


def test_text_comes_as_soon_as_it_is_known() -> None:
    custom = CustomInput()
    assert [custom.add(piece) for piece in ('{"input": "a', "b", "\\", 'n"', "}")] == [
        *("a", "b", "", "\n", "")
    ]
    assert custom.end() == ""
