"""Sorts request fields of known APIs that this server does not act on.

Each dialect has one table. A field that would change the answer is refused. A field that clients
send without needing it is ignored, and the response header `x-ignored-fields` names it. Fields that
no API has are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from rekindle.errors import Unsupported

IGNORED_FIELDS_HEADER = "x-ignored-fields"


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer."""

    instead: str  # what to do; the name of the field completes the sentence
    neutral: tuple[Any, ...] = ()  # values that change nothing, besides null
    switch: str | None = None  # if this other field is sent as 0, every value changes nothing


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes nothing in the answer, or that clients do not rely on."""

    why: str
    neutral: tuple[Any, ...] = ()  # values that ask for what the server does anyway


#: By name. `a.b` is the field `b` of the object `a`.
FieldTable = Mapping[str, Refused | Ignored]


class KnownFields(BaseModel):
    """A request whose dialect has a table of fields. Raises Unsupported for a refused one."""

    field_table: ClassVar[FieldTable] = {}
    _ignored_fields: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _sort_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):  # an instance that is validated already, or a wrong body
            return handler(data)
        ignored = sort_fields(cls.field_table, data)
        request = handler(data)
        request._ignored_fields = ignored
        return request

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the fields that the client sent and the server ignores."""
        return self._ignored_fields


def sort_fields(table: FieldTable, data: Mapping[str, Any]) -> list[str]:
    """Return the names of ignored fields; raises Unsupported for a refused one."""
    ignored = []
    for name, entry in table.items():
        value = _value(data, name)
        if value is None or value in entry.neutral:
            continue
        if isinstance(entry, Ignored):
            ignored.append(name)
        elif entry.switch is None or _value(data, entry.switch) != 0:
            raise Unsupported(f"{entry.instead} `{name}`", param=name)
    return ignored


def _value(data: Mapping[str, Any], name: str) -> Any:
    if name in data:
        return data[name]
    outer, _, inner = name.partition(".")
    inside = data.get(outer) if inner else None
    return inside.get(inner) if isinstance(inside, dict) else None
