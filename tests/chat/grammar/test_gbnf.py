"""GBNF is parsed as in llama.cpp. Invalid GBNF is refused with the reason and the line."""

from __future__ import annotations

import pytest

from rekindle.chat.grammar.gbnf import (
    ANY,
    MAX_DEPTH,
    Characters,
    GbnfChoice,
    GbnfReference,
    GbnfSequence,
    InvalidGbnf,
    Node,
    Repeat,
    parse,
)


def characters(*ranges: str, negated: bool = False) -> Characters:
    return Characters(tuple((ord(each[0]), ord(each[-1])) for each in ranges), negated)


def text(word: str) -> GbnfSequence:
    return GbnfSequence(tuple(map(characters, word)))


@pytest.mark.parametrize(
    ("body", "node"),
    [
        ('"ab"', text("ab")),
        ('""', GbnfSequence(())),
        ("", GbnfSequence(())),
        (".", ANY),
        ("[a-z_]", characters("a-z", "_")),
        ("[^a-z]", characters("a-z", negated=True)),
        (r"[\]\\\-^]", characters("]", "\\", "-", "^")),
        ("[-+]", characters("-", "+")),
        ("[+-]", characters("+", "-")),
        (r"[\x41-\u005A]", characters("A-Z")),
        (r'"\x41\u00e9\U0001F600\n\r\t\"\\"', text('Aé😀\n\r\t"\\')),
        ('"a" | "b"', GbnfChoice((text("a"), text("b")))),
        ('"a" |', GbnfChoice((text("a"), GbnfSequence(())))),
        ("root*", Repeat(GbnfReference("root"), 0, None)),
        (".+", Repeat(ANY, 1, None)),
        (".?", Repeat(ANY, 0, 1)),
        (".{3}", Repeat(ANY, 3, 3)),
        (".{2,}", Repeat(ANY, 2, None)),
        (".{ 2 , 5 }", Repeat(ANY, 2, 5)),
        (".{,5}", Repeat(ANY, 0, 5)),
        (".*?", Repeat(Repeat(ANY, 0, None), 0, 1)),
        ('("a" .)+', Repeat(GbnfSequence((text("a"), ANY)), 1, None)),
    ],
)
def test_a_rule_is_read(body: str, node: Node) -> None:
    assert parse(f"root ::= {body}") == {"root": node}


def test_rules_continue_across_line_breaks_and_comments_are_ignored() -> None:
    rules = parse(
        """
        # the whole
        root ::= item-1   # "no string"
               | "#"      # nor a comment in one
        item-1
          ::= "a"
              .
        """
    )
    assert rules == {
        "root": GbnfChoice((GbnfReference("item-1"), text("#"))),
        "item-1": GbnfSequence((text("a"), ANY)),
    }


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("", "there is no rule called 'root'"),
        ('start ::= "a"', "there is no rule called 'root'"),
        (
            'root ::= "a"\n"b"\nnext ::= ) "c"',
            "line 3: a rule begins with `name ::=`, not with ')'",
        ),
        ("root ::= nowhere", "line 1: the rule 'nowhere' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('root ::= "a', "line 1: cannot read '\"a'"),
        ("root ::= [a", "line 1: cannot read '[a'"),
        ("root ::= []", "line 1: a class of characters is empty"),
        ("root ::= [z-a]", "line 1: the range z-a ends before it begins"),
        ("root ::= ( .", "line 1: a `)` is missing"),
        ("root ::= .{}", "line 1: cannot read the repetition '{}'"),
        ("root ::= .{5,2}", "line 1: the repetition '{5,2}' ends before it begins"),
        ("root ::= .{99999999999}", "line 1: cannot read the repetition '{99999999999}'"),
        (r'root ::= "\q"', r"line 1: unknown escape '\\q'"),
        (r'root ::= "\x4"', r"line 1: unknown escape '\\x'"),
        (r'root ::= "\ud800"', r"line 1: \ud800 is not a character"),
        (r'root ::= "\UFFFFFFFF"', r"line 1: \UFFFFFFFF is not a character"),
        ("root ::= <think>", "line 1: cannot read '<think>'"),
        ("root ::= !<[7]>", "line 1: cannot read '!<[7]>'"),
        ("root ::= " + "(" * (MAX_DEPTH + 1), "line 1: parentheses may be nested at most 64 deep"),
    ],
)
def test_invalid_gbnf_is_refused_with_the_reason(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidGbnf) as refused:
        parse(grammar)
    assert str(refused.value) == problem
