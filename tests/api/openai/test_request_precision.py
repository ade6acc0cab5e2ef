"""KV precision in requests and answers."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.events import CacheReport, Reason
from tests.api.scripted import Front, ScriptedRuntime, error, events, finished, reply

QUANTISED = CacheReport("hit", Reason.FULL_MATCH, 9, 12, "ram", kv_bits=8, kv_group_size=32)


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        *(("kv_bits", bits, "takes 4 or 8") for bits in (0, 2, 5, 16, -8, 8.5, "8", True, [8])),
        *(
            ("kv_group_size", size, "takes a positive number that 8 divides")
            for size in (0, -64, 12, 64.5, "64", True)
        ),
        *(("kv_quantization_start", start, "takes a") for start in (-1, 1.5, "0", 10**8)),
        *(("quantized_kv_start", start, "takes a") for start in (-1, 1.5, "0", 10**8)),
    ],
)
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_wrong_values_are_refused_with_the_allowed_values(
    path: str, field: str, value: Any, takes: str
) -> None:
    answer = getattr(Front(), path)(**{field: value})
    assert answer.status_code == 400
    assert error(answer)["param"] == field
    assert error(answer)["message"].startswith(f"`{field}` {takes}")


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "bits", "start"),
    [
        ({}, None, 5000),
        ({"kv_bits": 8}, 8, 5000),
        ({"kv_bits": 4.0, "kv_group_size": 64, "kv_quantization_start": 0}, 4, 0),
        ({"kv_bits": 4, "quantized_kv_start": 70}, 4, 70),
        ({"kv_bits": 8, "quantized_kv_start": 7, "kv_quantization_start": 7}, 8, 7),
        ({"kv_bits": None, "kv_group_size": None}, None, 5000),
    ],
)
def test_a_request_says_which_cells_it_wants(
    path: str, fields: dict[str, Any], bits: int | None, start: int
) -> None:
    front = Front()
    assert getattr(front, path)(**fields).status_code == 200
    asked = front.runtime.requested
    assert (asked.kv_bits, asked.kv_quantization_start) == (bits, start)
    assert asked.kv_group_size == fields.get("kv_group_size")


def test_two_starts_that_differ_are_refused() -> None:
    answer = Front().chat(kv_bits=8, kv_quantization_start=1, quantized_kv_start=2)
    assert answer.status_code == 400
    assert "alias of `kv_quantization_start`" in error(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "bits", "start"),
    [({}, 4, 300), ({"kv_bits": 8}, 8, 300), ({"kv_quantization_start": 0}, 4, 0)],
)
def test_the_server_has_defaults(fields: dict[str, Any], bits: int, start: int) -> None:
    front = Front(kv_bits=4, kv_quantization_start=300)
    front.chat(**fields)
    asked = front.runtime.requested
    assert (asked.kv_bits, asked.kv_quantization_start) == (bits, start)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_an_answer_says_which_cells_its_state_has(path: str) -> None:
    front = Front(ScriptedRuntime(reply("x", end=finished(cache=QUANTISED))))
    report = getattr(front, path)(kv_bits=8, kv_group_size=64).json()["x_cache"]
    assert (report["kv_bits"], report["kv_group_size"]) == (8, 32)  # the engine's, not the asked
    streamed = getattr(front, path)(kv_bits=8, stream=True)
    *_, last, _ = events(streamed.text)
    assert (last.name, last.json["kv_bits"]) == ("x_cache", 8)
    assert "kv_group_size" not in Front().chat().json()["x_cache"]
