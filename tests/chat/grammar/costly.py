"""Grammars and schemas that are small but costly to compile, or that overflow the stack."""

from __future__ import annotations

from typing import Any

HANGS = "start: T\nT: " + " & ".join(f"/(.*a.{{{count}}}b.*)/" for count in range(30))
OVERFLOWS = (
    "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(20_000)) + '\nr20000: "c"'
)


def unicode_pattern(classes: int) -> str:
    """A pattern of letters in any case. Eight thousand take seconds to compile."""
    return "^(?i)" + r"\p{L}" * classes + "$"


def referring(pattern: str, **more: Any) -> dict[str, Any]:
    """A schema with 300 properties that refer to one pattern, and possibly others."""
    properties = {f"p{n}": {"$ref": "#/$defs/letters"} for n in range(300)}
    return {
        "type": "object",
        "properties": {**properties, **more},
        "$defs": {"letters": {"type": "string", "pattern": pattern}},
    }


#: 57 kB. Compiling every part to locate the unsupported keyword would take ten minutes.
SLOW_TO_LOCATE = referring(unicode_pattern(8_000), odd={"not": {"type": "string"}})

#: It takes more than five seconds to compile.
SLOW_TO_COMPILE = {"type": "string", "pattern": unicode_pattern(26_000)}
