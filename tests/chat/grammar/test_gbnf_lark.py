"""A translated GBNF grammar accepts exactly its language."""

from __future__ import annotations

import json
import re

import pytest

from rekindle.chat.grammar.gbnf import gbnf_to_lark
from rekindle.chat.grammar.lark import Grammar
from tests.chat.grammar.writer import Writer

WRITER = Writer()

LIST = r"""
# A list of things, one a line.
root ::= ("- " item)+
item ::= [^\n]{1,30} "\n"
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( member ("," ws member)* )? "}" ws
member ::= string ":" ws value
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) ){0,8} "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,8}) ("." [0-9]{1,8})? ([eE] [-+]? [0-9]{1,2})? ws
ws     ::= | " " | "\n" [ \t]{0,4}   # a little white space
"""
SUMS = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] ws term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
MOVE = r"""
root ::= "1. " move " " move "\n"
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
TAGS = r'root ::= "<" name ">" root "</" name ">" | [a-z ]*' "\n" 'name ::= "b" | "em"'


def grammar(gbnf: str) -> Grammar:
    return Grammar(f'%llguidance {{"no_forcing": true}}\n{gbnf_to_lark(gbnf)}\n', "grammar")


@pytest.mark.parametrize(
    ("gbnf", "taken", "refused"),
    [
        (LIST, ["- a b\n", "- é\n- 1-2\n"], ["", "- \n", "- a", "a\n"]),
        (
            JSON,
            ["{}", '{"a": [1, -2.5e+3, true], "b": {"c": "\\u00e9\\n", "d": null}}', "{\n  }"],
            ["", "[]", "{a}", '{"a":}', '{"a": 01}', '{"a": "\n"}', "{}}"],
        ),
        (SUMS, ["1=2\n", "a + 2 *(b_1-3)=x\n\ny=1\n"], ["1=2", "1+=2\n", "(1=2\n", "=\n"]),
        (MOVE, ["1. e4 e5\n", "1. Nf3 O-O-O+\n", "1. exd8=Q# Rad1\n"], ["1. e9 e5\n", "1. e4\n"]),
        (TAGS, ["", "some words", "<b>a <em>b</em></b>".replace("a ", "")], ["<i></i>", "<b>"]),
        # What comes first must not swallow what has to follow it.
        (r'root ::= [a-z]+ "end"', ["xend", "enxend", "endend"], ["end", "endx"]),
        (
            'root ::= x\nx ::= [a-z]+ "end" | "(" x ")"',
            ["(xend)", "enxend", "endend"],
            ["(end)"],
        ),
        (r'root ::= "ab" "c" | "a" "bd"', ["abc", "abd"], ["ab"]),
        (r'root ::= "ab" "c" | "a" "bd" | "(" root ")"', ["abc", "abd", "(abd)"], ["(ab)"]),
        (r'root ::= root "a" | "b"', ["b", "baa"], ["", "a"]),
        (r'root ::= "a"? | "b"{2,3} .', ["", "a", "bbx", "bbb\n"], ["b", "bb"]),
        (r'root ::= [^"a-c] "\"/" [\\/]', ['d"/\\', '\n"//'], ['a"//']),
        (r'root ::= Item-1 | "_"' "\n" r'Item-1 ::= "é" "\U0001F600"', ["é😀", "_"], ["é"]),
    ],
    ids=["list", "json", "sums", "chess", "tags", "greedy", "nested greedy", "strings",
         "nested strings", "left recursion", "repetition", "classes", "names"],
)  # fmt: skip
def test_a_grammar_accepts_its_language(gbnf: str, taken: list[str], refused: list[str]) -> None:
    made = grammar(gbnf)
    assert [text for text in taken if not WRITER.takes(made, text)] == []
    assert [text for text in refused if WRITER.takes(made, text)] == []


@pytest.mark.parametrize("seed", range(5))
def test_every_constrained_reply_is_in_the_language_of_its_grammar(seed: int) -> None:
    assert isinstance(json.loads(WRITER.write(grammar(JSON), seed)), dict)
    assert re.fullmatch(r"(- [^\n]{1,30}\n)+", WRITER.write(grammar(LIST), seed))


def test_a_grammar_without_recursion_is_one_regular_expression() -> None:
    assert gbnf_to_lark(MOVE).startswith("start: /")
    assert "\n" not in gbnf_to_lark(MOVE)


def test_rules_that_double_are_not_written_out() -> None:
    doubling = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40))
    lark = gbnf_to_lark(f'root ::= r0\n{doubling}\nr40 ::= "a"')
    assert len(lark) < 4_000
