"""JSON schemas that replies have to follow: enforced completely, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isfinite, prod
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher

from rekindle.chat.grammar.lark import styled
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.nesting import levels

# ----------------------------------------------------------------------
# Limits on schemas: a grammar is compiled in one native call, which nothing can interrupt.

Schema = Mapping[str, Any]

MOST_VALUES = 20_000  # of JSON, in all schemas of a reply together
MOST_LEVELS = 100  # of JSON; llguidance reads 128
MOST_PATTERN_CHARACTERS = 1 << 17  # in all schemas together: half a second at worst
MOST_PROPERTIES = 1_000  # of one object: the cost of their order is quadratic
MOST_CASES = 1_000  # to multiply out where schemas are combined
_PATTERN_CASES = 2  # combining regular expressions costs about that much for each
_MULTIPLES_A_CASE = 10

#: Keywords whose value maps names to schemas.
MAPS = ("properties", "patternProperties", "dependentSchemas")
#: Keywords whose value is data, not a schema.
DATA = ("const", "default", "enum", "examples", "required", "x-guidance")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
#: Keywords that do not constrain values.
REMARKS = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
)
_DEFINITIONS = ("$defs", "definitions")


def check_size(schema: Schema, param: str) -> None:
    """Refuse a schema that would take long to compile."""
    check_values(schema, param)
    _Costs(schema, param).of(schema)


def children(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The schemas directly inside a schema, with the path to each; definitions do not count."""
    for key, value in schema.items():
        if key in DATA or key in _DEFINITIONS:
            continue
        if key in MAPS and isinstance(value, Mapping):
            yield from (((key, name), each) for name, each in value.items() if _is_schema(each))
        elif _is_schema(value):
            yield (key,), value
        elif isinstance(value, list):
            yield from (
                ((key, str(number)), each) for number, each in enumerate(value) if _is_schema(each)
            )


def resolve(root: Schema, pointer: object) -> Schema | None:
    """The schema inside `root` that a local reference names."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found: Any = root
    for step in pointer[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found if _is_schema(found) else None


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping)


def check_values(schemas: object, param: str) -> None:
    """Refuse JSON that is too large, or nested too deep, to be examined any further."""
    values, characters = -1, 0  # what holds all schemas is no value of any
    for depth, level in enumerate(levels(schemas), start=1):
        values += len(level)
        characters += sum(map(_pattern_characters, level))
        if values > MOST_VALUES:
            raise BadRequest(f"Schemas may have at most {MOST_VALUES} values.", param=param)
        if depth > MOST_LEVELS:
            raise BadRequest(f"Schemas may be nested at most {MOST_LEVELS} deep.", param=param)
        if characters > MOST_PATTERN_CHARACTERS:
            raise BadRequest(
                f"The patterns of schemas may have at most {MOST_PATTERN_CHARACTERS} characters in "
                "all.",
                param=param,
            )


def _pattern_characters(value: object) -> int:
    """Of the regular expressions directly inside a value."""
    if not isinstance(value, Mapping):
        return 0
    named = value.get("patternProperties")
    patterns = [value.get("pattern"), *(named if isinstance(named, Mapping) else ())]
    return sum(len(pattern) for pattern in patterns if isinstance(pattern, str))


class Cost(NamedTuple):
    """The cases to distinguish at one place of a schema, and the most at any place below it."""

    here: int = 1
    below: int = 1


class _Costs:
    """Follows local references; a schema inside itself counts as one case."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._known: dict[int, Cost] = {}

    def of(self, schema: Schema) -> Cost:
        if id(schema) not in self._known:
            self._known[id(schema)] = Cost()
            self._known[id(schema)] = self._count(schema)
        return self._known[id(schema)]

    def _count(self, schema: Schema) -> Cost:
        self._check(schema)
        parts = list(self._parts(schema))
        if schema.keys() - REMARKS.union(_COMBINED, _DEFINITIONS):
            parts.append(self._own(schema))
        cost = Cost(prod(part.here for part in parts), prod(part.below for part in parts))
        if max(cost) > MOST_CASES:
            raise BadRequest(
                "The schema combines too many alternatives, patterns or multiples in one place.",
                param=self._param,
            )
        return cost

    def _check(self, schema: Schema) -> None:
        members = schema.get("properties")
        if isinstance(members, Mapping) and len(members) > MOST_PROPERTIES:
            raise BadRequest(
                f"An object may have at most {MOST_PROPERTIES} properties.", param=self._param
            )
        if "$id" in schema and schema is not self._root:
            raise BadRequest("Only the whole schema may have an `$id`.", param=self._param)
        reference = schema.get("$ref", "#")
        if reference != "#" and not str(reference).startswith("#/"):
            raise BadRequest(
                f"`$ref` may only point into the schema itself (#/…), not to {reference!r:.80}.",
                param=self._param,
            )

    def _parts(self, schema: Schema) -> Iterator[Cost]:
        """The costs of the schemas that this one is combined with."""
        for each in _schemas(schema.get("allOf")):
            yield self.of(each)
        for way in ("anyOf", "oneOf"):
            if ways := [self.of(each) for each in _schemas(schema.get(way))]:
                yield Cost(sum(way.here for way in ways), max(way.below for way in ways))
        target = resolve(self._root, schema.get("$ref"))
        if target is not None:
            yield self.of(target)

    def _own(self, schema: Schema) -> Cost:
        below = [self.of(each) for way, each in children(schema) if way[0] not in _COMBINED]
        patterned = "pattern" in schema or "format" in schema
        here = (_PATTERN_CASES if patterned else 1) * _multiples(schema.get("multipleOf"))
        named = _PATTERN_CASES if "patternProperties" in schema else 1
        return Cost(here, max(named, *(max(cost) for cost in below), 1))


def _schemas(value: object) -> list[Schema]:
    return [each for each in value if _is_schema(each)] if isinstance(value, list) else []


def _multiples(step: object) -> int:
    """The states needed to recognise multiples grow with the units of the step."""
    if not isinstance(step, int | float) or not isfinite(step):
        return 1
    return max(1, abs(Fraction(str(step)).numerator) // _MULTIPLES_A_CASE)


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_MOST_LOOKS = 300  # at parts of a refused schema, to locate the error
_MOST_CHARACTERS = 300  # of llguidance's message
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")


def check(schema: Mapping[str, Any] | bool | None, *, param: str = "response_format") -> None:
    """Refuse a schema that cannot be enforced, and name the part that cannot."""
    schema = as_object(schema, param=param)
    check_size(schema, param)
    if problem := refusal(schema):
        raise _error(problem, _place(schema, problem), param)


def as_object(
    schema: Mapping[str, Any] | bool | None, *, param: str = "response_format"
) -> Mapping[str, Any]:
    """The schema as an object; no schema stands for any object."""
    if schema is False:
        raise BadRequest("The schema `false` describes nothing that could be written.", param=param)
    if schema is None:
        return ANY_OBJECT
    return {} if schema is True else schema


def refusal(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Why llguidance cannot compile a schema; empty when it can."""
    grammar = LLMatcher.grammar_from_json_schema(styled(schema, lenient=lenient))
    is_error, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    return problems[0] if is_error else ""


def _error(problem: str, place: str, param: str) -> BadRequest:
    if keys := _KEYS.search(problem):
        named = keys[1].replace('"', "`")
        return Unsupported(f"The schema uses {named}, which is not enforced: {place}.", param=param)
    if name := _FORMAT.search(problem):
        return Unsupported(
            f"The schema uses the format {name[1][:80]!r}, which is not enforced: {place}.",
            param=param,
        )
    first = problem.strip().splitlines()[0][:_MOST_CHARACTERS]
    return BadRequest(f"The schema cannot be enforced: {first}: {place}.", param=param)


def _place(root: Mapping[str, Any], problem: str) -> str:
    """A pointer to the smallest part of the schema that has the same problem."""
    place, schema, seen, looks = "#", root, {id(root)}, _MOST_LOOKS
    while True:
        for way, part in _inner(root, schema):
            looks -= 1
            if id(part) not in seen and refusal(_alone(part, root)) == problem:
                seen.add(id(part))
                place = way if way.startswith("#") else place + way
                schema = part
                break
            if not looks:
                return place
        else:
            return place


def _inner(
    root: Mapping[str, Any], schema: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    inner = [("/" + "/".join(way), part) for way, part in children(schema)]
    target = resolve(root, schema.get("$ref"))
    return inner if target is None else [*inner, (schema["$ref"], target)]


def _alone(part: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part with the definitions that it may refer to."""
    return {**part, **definitions(root)}


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def relocated(schema: Any, place: str) -> Any:
    """A schema for use inside another one: references to its root become references to `place`."""
    if isinstance(schema, list):
        return [relocated(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in DATA else _relocated_value(key, value, place)
        for key, value in schema.items()
    }


def _relocated_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return relocated(value, place)
