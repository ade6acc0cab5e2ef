"""Checks JSON schemas for replies: each is enforced completely, or refused with the reason."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import isfinite, prod
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher

from rekindle.chat.grammar.lark import styled
from rekindle.chat.grammar.trial import cpu_left_s, first_line
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import levels

Schema = Mapping[str, Any]


class SchemaLimits(NamedTuple):
    """Limits on schemas, because one native call compiles a grammar and nothing interrupts it."""

    values: int = 20_000  # of JSON, in all schemas of a reply
    depth: int = 100  # llguidance reads 128
    pattern_characters: int = 1 << 17  # in all schemas of a reply. Half a second at worst
    properties: int = 1_000  # of one object. The cost of their order is quadratic
    cases: int = 1_000  # to multiply out where schemas are combined
    probes: int = 300  # parts of a refused schema that are compiled to locate the error


LIMITS = SchemaLimits()
PATTERN_CASES = 2  # combining regular expressions costs about this factor for each

ANY_OBJECT: Schema = {"type": "object"}
DEFINITIONS = ("$defs", "definitions")
# Keywords whose value maps names to schemas.
MAPS = ("properties", "patternProperties", "dependentSchemas")
# Keywords whose value is data, not a schema.
DATA = ("const", "default", "enum", "examples", "required", "x-guidance")
# Keywords that do not constrain values.
REMARKS = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated")
)
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")


def check(schema: Schema | bool | None, *, param: str = "response_format") -> None:
    """Refuses a schema that cannot be enforced, and names the part that cannot."""
    schema = as_object(schema, param=param)
    check_size(schema, param)
    if problem := refusal(schema):
        raise _error(problem, _place(schema, problem), param)


def as_object(schema: Schema | bool | None, *, param: str = "response_format") -> Schema:
    """The schema as an object. No schema means any object."""
    if schema is False:
        raise BadRequest("No value can match the schema `false`.", param=param)
    if schema is None:
        return ANY_OBJECT
    return {} if schema is True else schema


def check_size(schema: Schema, param: str) -> None:
    check_values(schema, param)
    _Costs(schema, param).of(schema)


def check_values(schemas: object, param: str) -> None:
    """Refuses JSON that is too large or too deep to be examined any further."""
    values, characters = -1, 0  # the outermost value does not count
    for depth, level in enumerate(levels(schemas), start=1):
        values += len(level)
        characters += sum(map(_pattern_characters, level))
        if values > LIMITS.values:
            raise BadRequest(f"Schemas may have at most {LIMITS.values} values.", param=param)
        if depth > LIMITS.depth:
            raise BadRequest(f"Schemas may be nested at most {LIMITS.depth} deep.", param=param)
        if characters > LIMITS.pattern_characters:
            raise BadRequest(
                f"The patterns of schemas may have at most {LIMITS.pattern_characters} characters "
                "in all.",
                param=param,
            )


def _pattern_characters(value: object) -> int:
    if not isinstance(value, Mapping):
        return 0
    named = value.get("patternProperties")
    patterns = [value.get("pattern"), *(named if isinstance(named, Mapping) else ())]
    return sum(len(pattern) for pattern in patterns if isinstance(pattern, str))


def refusal(schema: Schema, *, lenient: bool = False) -> str:
    """Why llguidance cannot compile a schema. Empty if it can."""
    grammar = LLMatcher.grammar_from_json_schema(styled(schema, lenient=lenient))
    is_error, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    return problems[0] if is_error else ""


def children(schema: Schema) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The schemas directly inside a schema except definitions, with the path to each."""
    for key, value in schema.items():
        if key in DATA or key in DEFINITIONS:
            continue
        inner: list[tuple[tuple[str, ...], Any]]
        if key in MAPS and isinstance(value, Mapping):
            inner = [((key, name), each) for name, each in value.items()]
        elif isinstance(value, list):
            inner = [((key, str(number)), each) for number, each in enumerate(value)]
        else:
            inner = [((key,), value)]
        yield from ((path, each) for path, each in inner if isinstance(each, Mapping))


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
    return found if isinstance(found, Mapping) else None


class SchemaCost(NamedTuple):
    """The cases to distinguish at one place of a schema, and the most at any place below it."""

    here: int = 1
    below: int = 1


class _Costs:
    """Computes costs and follows local references. A schema inside itself counts as one case."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._known: dict[int, SchemaCost] = {}

    def of(self, schema: Schema) -> SchemaCost:
        if id(schema) not in self._known:
            self._known[id(schema)] = SchemaCost()
            self._known[id(schema)] = self._count(schema)
        return self._known[id(schema)]

    def _count(self, schema: Schema) -> SchemaCost:
        self._check(schema)
        parts = list(self._parts(schema))
        if schema.keys() - REMARKS.union(_COMBINED, DEFINITIONS):
            parts.append(self._own(schema))
        cost = SchemaCost(prod(part.here for part in parts), prod(part.below for part in parts))
        if max(cost) > LIMITS.cases:
            raise BadRequest(
                "The schema combines too many alternatives, patterns or multiples in one place.",
                param=self._param,
            )
        return cost

    def _check(self, schema: Schema) -> None:
        members = schema.get("properties")
        if isinstance(members, Mapping) and len(members) > LIMITS.properties:
            raise BadRequest(
                f"An object may have at most {LIMITS.properties} properties.", param=self._param
            )
        if "$id" in schema and schema is not self._root:
            raise BadRequest("Only the whole schema may have an `$id`.", param=self._param)
        reference = schema.get("$ref", "#")
        if reference != "#" and not str(reference).startswith("#/"):
            raise BadRequest(
                f"`$ref` may only point into the schema itself (#/…), not to {reference!r:.80}.",
                param=self._param,
            )

    def _parts(self, schema: Schema) -> Iterator[SchemaCost]:
        yield from self._each(schema.get("allOf"))
        for way in ("anyOf", "oneOf"):
            if ways := self._each(schema.get(way)):
                yield SchemaCost(sum(each.here for each in ways), max(each.below for each in ways))
        target = resolve(self._root, schema.get("$ref"))
        if target is not None:
            yield self.of(target)

    def _each(self, schemas: object) -> list[SchemaCost]:
        found = schemas if isinstance(schemas, list) else []
        return [self.of(each) for each in found if isinstance(each, Mapping)]

    def _own(self, schema: Schema) -> SchemaCost:
        below = [self.of(each) for way, each in children(schema) if way[0] not in _COMBINED]
        patterned = "pattern" in schema or "format" in schema
        here = (PATTERN_CASES if patterned else 1) * _multiple_cases(schema.get("multipleOf"))
        named = PATTERN_CASES if "patternProperties" in schema else 1
        return SchemaCost(here, max(named, *(max(cost) for cost in below), 1))


def _multiple_cases(step: object) -> int:
    """The states that recognise multiples grow with the step. Ten of them count as a case."""
    if not isinstance(step, int | float) or not isfinite(step):
        return 1
    return max(1, abs(Fraction(str(step)).numerator) // 10)


def _error(problem: str, place: str, param: str) -> BadRequest:
    if keys := _KEYS.search(problem):
        used = keys[1].replace('"', "`")
    elif name := _FORMAT.search(problem):
        used = f"the format {name[1][:80]!r}"
    else:
        reason = first_line(problem)
        return BadRequest(f"The schema cannot be enforced: {reason}: {place}.", param=param)
    return Unsupported(f"The schema uses {used}, which is not enforced: {place}.", param=param)


def _place(root: Schema, problem: str) -> str:
    """A pointer to the smallest part of the schema that has the same problem.

    The search ends early, with a larger part, when the CPU time of this process might not suffice
    for the next part.
    """
    place, schema, seen, left, cost_s = "#", root, {id(root)}, LIMITS.probes, 0.0
    suspects = _suspects(root, problem)
    while True:
        for path, part in _inner(root, schema):
            if id(part) in seen or id(part) not in suspects:
                continue
            left_s = cpu_left_s()
            if not left or (left_s is not None and left_s < 2 * cost_s):
                return place
            left -= 1
            started_s = time.process_time()
            found = refusal(with_definitions(part, root))
            cost_s = max(cost_s, time.process_time() - started_s)
            if found == problem:
                seen.add(id(part))
                place = path if path.startswith("#") else place + path
                schema = part
                break
        else:
            return place


def _inner(root: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas inside a schema and the one to which it refers, each with a pointer to it."""
    yield from (("/" + "/".join(path), part) for path, part in children(schema))
    target = resolve(root, schema.get("$ref"))
    if target is not None:
        yield schema["$ref"], target


def _suspects(root: Schema, problem: str) -> set[int]:
    """The ids of the schemas that may have the problem, found without compiling anything.

    A part without the problem takes longest to compile. So if the problem names keywords or a
    format, only the schemas that contain them, or refer to one that does, are suspects.
    """
    schemas, above = {id(root): root}, dict[int, list[int]]()
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        for _, part in _inner(root, schema):
            above.setdefault(id(part), []).append(id(schema))
            if id(part) not in schemas:
                schemas[id(part)] = part
                waiting.append(part)
    suspects = {number for number, schema in schemas.items() if _may_have(schema, problem)}
    spreading = list(suspects)
    while spreading:
        new = set(above.get(spreading.pop(), ())) - suspects
        suspects |= new
        spreading += new
    return suspects


def _may_have(schema: Schema, problem: str) -> bool:
    if keys := _KEYS.search(problem):
        return any(f'"{key}"' in keys[1] for key in schema)
    if name := _FORMAT.search(problem):
        return schema.get("format") == name[1]
    return True


def with_definitions(part: Schema, root: Schema) -> Schema:
    """A part of a schema with the definitions to which it may refer."""
    return {**part, **{key: root[key] for key in DEFINITIONS if key in root}}


def relocated(schema: Any, place: str) -> Any:
    """A schema for use inside another one. References to its root become references to `place`."""
    if isinstance(schema, list):
        return [relocated(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place + value[1:]
        else:
            found[key] = value if key in DATA else relocated(value, place)
    return found
