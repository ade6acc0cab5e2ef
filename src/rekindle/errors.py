"""Every error Rekindle raises on purpose, split by whose fault it is.

`server.app` alone turns a ServerError into JSON, `server.responses` into an error event once bytes
were sent, and the command line into one sentence.
"""

from __future__ import annotations

from math import ceil

from rekindle.protocol.events import ErrorInfo


class RekindleError(Exception):
    """An error with a sentence for a person."""


class ConfigError(RekindleError):
    """A setting is wrong; the message says which and what it takes."""


class ModelError(RekindleError):
    """A model cannot be found, fetched or loaded; the message says what to do."""


class ProjectorError(ModelError):
    """A projector cannot be used with its model, which can be served without."""


class LibraryMismatch(RekindleError):
    """The native library of an engine is missing or not of the supported version."""


class CorruptBlock(RekindleError):
    """Stored bytes are not what was stored; treated as a miss."""


class EngineBroken(RekindleError):
    """The native context is undefined and has been rebuilt; its sequences are gone."""


class PoolFull(RekindleError):
    """The engine's KV pool has no room for this step."""


class FolderLocked(RekindleError):
    """Another process owns this cache folder; the message says what to do."""


class IndexDamaged(RekindleError):
    """The index on disk is not one of ours, or not whole; it is rebuilt from the files."""


class ServerError(RekindleError):
    """An error answered to a client in OpenAI's shape."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"
    tokens: int | None = None  # of a prompt that is too long, at least
    limit: int | None = None  # that it exceeds

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @property
    def info(self) -> ErrorInfo:
        """The error as it crosses the socket."""
        return ErrorInfo(
            status=self.status,
            kind=self.kind,
            code=self.code,
            message=str(self),
            param=self.param,
            tokens=self.tokens,
            limit=self.limit,
        )

    def body(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class ReportedError(ServerError):
    """An error as a runtime reported it."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, param=info.param)
        self.status, self.kind, self.code = info.status, info.kind, info.code
        self.tokens, self.limit = info.tokens, info.limit


class BadRequest(ServerError):
    status, kind, code = 400, "invalid_request_error", "invalid_value"


class Unsupported(BadRequest):
    code = "unsupported_parameter"


class TemplateFailed(BadRequest):
    code = "template_error"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"

    def __init__(
        self,
        tokens: int,
        limit: int,
        *,
        param: str,
        pictures: int = 0,
        at_least: bool = False,
    ) -> None:
        """`at_least`: it was refused before all of its tokens were counted."""
        self.tokens, self.limit = tokens, limit
        found = f"at least {tokens}" if at_least else str(tokens)
        of_pictures = f", with those of {pictures} different pictures" if pictures > 1 else ""
        way_out = "Send fewer pictures, shorten the prompt" if pictures else "Shorten the prompt"
        # Clients know an error of this kind by the words that OpenAI's begins with.
        super().__init__(
            f"This model's maximum context length is {limit} tokens, including at least one "
            f"generated token; the prompt has {found} tokens{of_pictures}. {way_out} or raise "
            "--max-model-len.",
            param=param,
        )


class InputTooLong(BadRequest):
    code = "context_length_exceeded"

    def __init__(self, param: str, place: int, tokens: str, limit: int) -> None:
        super().__init__(
            f"`{param}[{place}]` has {tokens} tokens; this model takes {limit}. Shorten it, or "
            "send it in parts.",
            param=param,
        )


class Unauthorized(ServerError):
    status, kind, code = 401, "invalid_request_error", "invalid_api_key"


class Forbidden(ServerError):
    status, kind, code = 403, "invalid_request_error", "admin_key_required"


class ModelNotFound(ServerError):
    status, kind, code = 404, "invalid_request_error", "model_not_found"


class NotFound(ServerError):
    status, kind, code = 404, "invalid_request_error", "not_found"


class CacheKeyNotFound(NotFound):
    code = "cache_key_not_found"

    def __init__(self) -> None:
        super().__init__("No such cache key; GET /v1/cache lists those you have.")


class NoRoomForPins(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "pins_exceed_budget"


class TooManyRequests(ServerError):
    status, kind, code = 429, "rate_limit_error", "queue_full"


class NoMemory(ServerError):
    """There is no memory for what this turn needs; others go on."""

    status, kind, code = 503, "server_error", "no_memory"

    @classmethod
    def for_exact_context(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"There is no memory for the {ceil(needed_bytes / 1e6)} MB that an exact turn needs. "
            "Try again later or without cache_exact; the operator can lower --max-model-len."
        )

    @classmethod
    def for_kv_type(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"There is no memory for the {ceil(needed_bytes / 1e6)} MB that turns of these kv_bits "
            "need. Try again later or without kv_bits; the operator can lower --max-model-len."
        )

    @classmethod
    def for_state_file(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"There is no memory for the {ceil(needed_bytes / 1e6)} MB of state in this file. Try "
            "again later."
        )


class RuntimeDied(ServerError):
    status, kind, code = 503, "server_error", "model_restarting"


class Unavailable(ServerError):
    status, kind, code = 503, "server_error", "unavailable"


def as_server_error(error: Exception, doing: str) -> ServerError:
    """The error itself if it is for a client, or one that says what failed."""
    return error if isinstance(error, ServerError) else ServerError(f"{doing} failed: {error!r}")
