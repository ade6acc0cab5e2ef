"""Writes docs/errors.md from the error classes of the server."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import rekindle
from rekindle.api.anthropic.errors import error_body
from rekindle.errors import ServerError
from tools.reference.markdown import code, fill, table

#: What happened, and what to do, by error code.
ERRORS = {
    "internal_error": (
        "The server has a fault.",
        "Look up the `x-request-id` in the server's log, and report it.",
    ),
    "invalid_value": ("A field is missing or has a value that it does not take.", "Change it."),
    "unsupported_parameter": (
        "The request has a field, or a value, that this server does not support.",
        "Remove it. The message names a replacement if there is one.",
    ),
    "not_supported": (
        "llama.cpp's server has this operation, and this server does not.",
        "The message names a replacement.",
    ),
    "model_load_failed": (
        "The model that the request names could not be loaded. The message says why.",
        "Correct the reason. A request after the time in `Retry-After` tries to load it again.",
    ),
    "model_load_cancelled": (
        "An operator cancelled the load of the model while the request waited for it.",
        "Send the request again.",
    ),
    "model_busy": (
        "The model cannot be unloaded or deleted while it answers requests.",
        "Try again when they have ended.",
    ),
    "template_error": (
        "The model's chat template refuses this conversation.",
        "Change the part that the message quotes. Often it is the order of the roles.",
    ),
    "context_length_exceeded": (
        "The prompt does not fit into the model's context.",
        "Shorten it, or raise `--max-model-len`.",
    ),
    "invalid_media": (
        "An image or a video cannot be fetched or decoded, or is too large.",
        "Send a smaller file or another format, or check the URL.",
    ),
    "media_refused": (
        "The server must not fetch from this address.",
        "Send the image as a `data:` URL, or start the server with `--media-allow HOST`.",
    ),
    "headers_too_large": ("The headers are too large.", "Send fewer or shorter headers."),
    "headers_too_slow": ("The headers did not arrive in time.", "Check the network."),
    "invalid_http": ("The request is not valid HTTP.", "Check the client and any proxy."),
    "body_too_large": ("The body is too large.", "Send less, or a smaller file."),
    "too_many_values": (
        "The JSON has too many values to be parsed quickly.",
        "Send fewer or shorter messages.",
    ),
    "body_too_slow": ("The body did not arrive in time.", "Check the network, or send less."),
    "unsupported_media_type": (
        "The content type of the body is not JSON.",
        "Send the header `Content-Type: application/json`.",
    ),
    "wrong_host": (
        "The Host header names another server. This protects a local server from web pages.",
        "Use `localhost` or `127.0.0.1`. Behind a proxy, start the server with "
        "`--allowed-host NAME`.",
    ),
    "invalid_api_key": ("The API key is missing or wrong.", "Send a key that the server accepts."),
    "admin_key_required": ("The operation needs an admin key.", "Send an admin key."),
    "origin_not_allowed": (
        "A web page of this origin may not use the server.",
        "Start the server with `--cors-origin ORIGIN`.",
    ),
    "model_not_found": (
        "No model of this name is served.",
        "Use a name from `GET /v1/models`, or start the server with `--model NAME`.",
    ),
    "not_found": ("The path, or what it names, does not exist.", "See `/docs` for all paths."),
    "method_not_allowed": ("The path does not take this method.", "See `/docs` for its methods."),
    "cache_key_not_found": (
        "There is no entry with this key or name.",
        "`GET /v1/cache` lists your keys.",
    ),
    "response_not_found": (
        "No response with this id is stored.",
        "It had `store: false`, was deleted, or has expired. Send the conversation as `input`.",
    ),
    "previous_response_not_found": (
        "The response that `previous_response_id` names is not stored.",
        "Send the whole conversation as `input`.",
    ),
    "conversation_not_found": (
        "There is no conversation with this id.",
        "Create one with `POST /v1/conversations`.",
    ),
    "item_not_found": (
        "The conversation has no item with this id.",
        "`GET /v1/conversations/{conversation_id}/items` lists its items.",
    ),
    "response_not_ended": (
        "The response that the request continues is still being computed.",
        "Retrieve it until its status is no longer `queued` or `in_progress`, then continue it.",
    ),
    "response_too_large": (
        "There is no room to store a response that is computed in the background.",
        "Send less, or leave `background` out.",
    ),
    "completion_not_found": (
        "No chat completion with this id is stored.",
        "It was created without `store: true`, was deleted, or has expired.",
    ),
    "completion_too_large": (
        "There is no room to store a change of a chat completion.",
        "Delete other completions first.",
    ),
    "thread_not_found": (
        "No thread that ends with this message is stored.",
        'Send the whole conversation with `thread: {"type": "create"}`.',
    ),
    "thread_fingerprint_mismatch": (
        "The request changes a field that cannot change in a thread.",
        'Leave it out, or send the whole conversation with `thread: {"type": "create"}`.',
    ),
    "websocket_stream_limit_reached": (
        "The connection has used too many values of `stream_id`.",
        "Open another connection.",
    ),
    "websocket_connection_limit_reached": (
        "The connection has been open for too long.",
        "Open another connection.",
    ),
    "response_is_ending": (
        "The response to delete is still being stored.",
        "Delete it again in a moment.",
    ),
    "removed_meanwhile": (
        "The prompt was computed, but its entry was removed before it was written.",
        "Prepare it again.",
    ),
    "no_state": (
        "The entry has no state to export.",
        "Send the conversation again, then export it.",
    ),
    "rate_limit_exceeded": (
        "A limit of your API key is reached.",
        "Wait as long as `retry-after` says. The operator can change the key's line.",
    ),
    "queue_full": (
        "Too many requests wait, or your requests take too much memory.",
        "Try again later. The operator can raise `--queue`.",
    ),
    "compile_time_spent": (
        "Your new grammars and schemas took too much time to compile.",
        "Wait as long as `retry-after` says, or send fewer or smaller ones.",
    ),
    "no_memory": (
        "The request needs more memory than is free.",
        "Try again later, or without `cache_exact` or `kv_bits`. The operator can lower "
        "`--max-model-len`.",
    ),
    "model_restarting": (
        "The model's process ended. It is being restarted.",
        "Send the request again. If it happens often, see the server's log.",
    ),
    "unavailable": (
        "A model is loading, or the server is overloaded or stopping.",
        "Try again later.",
    ),
    "not_stored": (
        "The model's process did not confirm in time that it stored a document.",
        "Check the disk, and send the request again.",
    ),
    "pins_exceed_budget": (
        "Pinned entries would take more space than they may.",
        "Unpin or delete another entry, or raise `--ram-cache` and `--disk-cache`.",
    ),
    "no_room": (
        "The state does not fit into the cache.",
        "Raise `--ram-cache` or `--disk-cache`, or free disk space.",
    ),
    "conversation_too_large": (
        "There is no room for the conversation.",
        "Delete some of its items, or begin another.",
    ),
}


def render() -> str:
    """Return the whole page."""
    rows = ((code(error), status, *ERRORS[error], kind) for error, status, kind in sorted(codes()))
    header = ("code", "status", "what happened", "what to do", "Anthropic's type")
    return fill("errors.md", codes=table(header, rows))


def codes() -> set[tuple[str, str, str]]:
    """Every error code of the server, with its status and its type in Anthropic's form."""
    _import_all()
    return {
        (kind.code, str(kind.status), code(error_body(_instance(kind))["error"]["type"]))
        for kind in _subclasses(ServerError)
        if kind.code is not None
    }


def _instance(kind: type[ServerError]) -> ServerError:
    """An error with the status and code of its class, whatever its constructor takes."""
    error = ServerError("")
    error.status, error.code = kind.status, kind.code
    return error


def _subclasses(kind: type[ServerError]) -> Iterator[type[ServerError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("rekindle."):  # tests have errors of their own
            yield from _subclasses(each)


def _import_all() -> None:
    """Import every module that can define an error. Engines have none of their own."""
    for module in pkgutil.walk_packages(rekindle.__path__, "rekindle."):
        if not module.name.startswith("rekindle.engine.") and not module.name.endswith("main"):
            importlib.import_module(module.name)
