"""References to items that are stored here: what they stand for.

An item's id says which response it is of, so that it is found without an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.api.responses.errors import ResponseNotFound
from rekindle.api.responses.items import ID_BYTES, ItemReference, stored_items
from rekindle.api.responses.response import PREFIX
from rekindle.api.responses.stored import DocumentClient
from rekindle.errors import BadRequest, NotFound

MOST_RESPONSES = 64  # that the references of one request may be to
_DIGITS = 2 * ID_BYTES  # of a response's number


async def referenced(items: Sequence[Any], documents: DocumentClient) -> dict[str, Any]:
    """The items by their ids, as far as they are stored."""
    wanted = {item.id for item in items if isinstance(item, ItemReference)}
    if not wanted:
        return {}
    numbers = dict.fromkeys(item_id.partition("_")[2][:_DIGITS] for item_id in wanted)
    if len(numbers) > MOST_RESPONSES:
        raise BadRequest(
            f"The references of a request may be to items of at most {MOST_RESPONSES} responses: "
            "send the items themselves, or `previous_response_id`.",
            param="input",
        )
    outputs = [await _output(f"{PREFIX}{number}", documents) for number in numbers]
    known = [item for output in outputs for item in output if item["id"] in wanted]
    return {item.id: item for item in stored_items.validate_python(known)}


async def _output(key: str, documents: DocumentClient) -> list[dict[str, Any]]:
    try:
        stored = await documents.load(key, ResponseNotFound(key))
    except NotFound:
        return []
    output: list[dict[str, Any]] = stored.object["output"]
    return output
