"""Defines every error that Rekindle raises on purpose.

`http.responses` and the dialects turn a ServerError into JSON, or into an error event if the
response has begun. The command line prints an error as one sentence.
"""

from __future__ import annotations

from math import ceil

import msgspec

from rekindle.protocol.events import ErrorInfo

#: llama.cpp's type for a prompt that is too long. OpenAI's clients look at `code` instead.
CONTEXT_EXCEEDED = "exceed_context_size_error"


class RekindleError(Exception):
    """An error whose message is written for a person."""


class ConfigError(RekindleError):
    """A setting is wrong. The message says which one and which values are valid."""


class ModelError(RekindleError):
    """A model cannot be found, downloaded or loaded. The message says what to do."""


class ProjectorError(ModelError):
    """A projector does not work with its model. The model can be served without it."""


class LibraryMismatch(RekindleError):
    """An engine's native library is missing or has an unsupported version."""


class CorruptBlock(RekindleError):
    """Stored bytes are damaged. Readers treat this as a cache miss."""


class EngineBroken(RekindleError):
    """The engine had to rebuild its native context and lost all sequences."""


class PoolFull(RekindleError):
    """The engine's KV pool has too few free cells for this step."""


class FolderLocked(RekindleError):
    """Another process uses this cache folder. The message says what to do."""


class IndexDamaged(RekindleError):
    """The index on disk is damaged or foreign. It is rebuilt from the block files."""


class IndexOutdated(IndexDamaged):
    """The index on disk was written by an older version of the server."""


class ServerError(RekindleError):
    """An error that is sent to a client as OpenAI's error object."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"
    tokens: int | None = None  # length of a prompt that is too long, as far as it was counted
    limit: int | None = None  # maximum length of a prompt
    retry_after_s: int | None = None  # None: a 429 or 503 asks the client to wait for a second

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param

    @property
    def info(self) -> ErrorInfo:
        """The error as it travels from a runtime to the front."""
        return msgspec.convert(self, ErrorInfo, from_attributes=True)

    def body(self) -> dict[str, dict[str, str | int | None]]:
        """OpenAI's error object. A prompt that is too long has llama.cpp's figures, too."""
        error: dict[str, str | int | None] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if self.tokens is not None and self.limit is not None:
            figures = {"n_prompt_tokens": self.tokens, "n_ctx": self.limit}
            error |= {"type": CONTEXT_EXCEEDED, **figures}
        return {"error": error}


class ReportedError(ServerError):
    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, param=info.param)
        self.status, self.kind, self.code = info.status, info.kind, info.code
        self.tokens, self.limit = info.tokens, info.limit
        self.retry_after_s = info.retry_after_s


class BadRequest(ServerError):
    status, kind, code = 400, "invalid_request_error", "invalid_value"


class Unsupported(BadRequest):
    code = "unsupported_parameter"


class StateNotPortable(Unsupported):
    def __init__(self) -> None:
        super().__init__(
            "The state of this model cannot be exported or imported: no other program reads the "
            "state of its engine."
        )


class TemplateFailed(BadRequest):
    code = "template_error"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"

    def __init__(
        self, tokens: int, limit: int, *, param: str, pictures: int = 0, at_least: bool = False
    ) -> None:
        """`at_least`: counting stopped at `tokens`, and the prompt may be longer."""
        self.tokens, self.limit = tokens, limit
        found = f"at least {tokens}" if at_least else str(tokens)
        of_pictures = f", including {pictures} different pictures" if pictures > 1 else ""
        remedy = "Send fewer pictures, shorten the prompt" if pictures else "Shorten the prompt"
        # Clients recognise this error by its first words, which are the same in OpenAI's message.
        super().__init__(
            f"This model's maximum context length is {limit} tokens, including at least one "
            f"generated token; the prompt has {found} tokens{of_pictures}. {remedy} or raise "
            "--max-model-len.",
            param=param,
        )


class InputTooLong(BadRequest):
    code = "context_length_exceeded"

    def __init__(self, param: str, place: int, tokens: str, limit: int) -> None:
        super().__init__(
            f"`{param}[{place}]` has {tokens} tokens; this model takes {limit}. Shorten it, or "
            "split it into several inputs.",
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
        super().__init__("There is no such cache key. GET /v1/cache lists your cache keys.")


class UnknownId(NotFound):
    """A request names something that is not stored. Dialects subclass it for each kind of id."""

    prefix = ""  # with which ids of this kind begin
    field: str  # of the request, which has the id
    text: str  # a format string that takes the id

    def __init__(self, key: str) -> None:
        super().__init__(self.text.format(repr(key[:128])), param=self.field)


class NoRoomForPins(ServerError):
    status, kind, code = 507, "insufficient_storage_error", "pins_exceed_budget"


class TooManyRequests(ServerError):
    status, kind, code = 429, "rate_limit_error", "queue_full"


class RateLimited(TooManyRequests):
    """A tenant has reached a limit of its key."""

    code = "rate_limit_exceeded"

    def __init__(self, limit: str, wait_s: float) -> None:
        self.retry_after_s = max(ceil(wait_s), 1)
        super().__init__(f"{limit} Try again in {self.retry_after_s} s.")


class CompileTimeSpent(TooManyRequests):
    """A tenant's new grammars have used up its compile time."""

    code = "compile_time_spent"

    def __init__(self, compile_s: float, period_s: float, wait_s: float) -> None:
        self.retry_after_s = ceil(wait_s)
        super().__init__(
            f"Your new grammars and schemas have taken {compile_s:g} s of compile time within "
            f"{period_s:g} s. Try again in {self.retry_after_s} s, or send fewer or smaller ones."
        )


class NoMemory(ServerError):
    """This turn needs more memory than is free. Other turns are not affected."""

    status, kind, code = 503, "server_error", "no_memory"

    @classmethod
    def for_exact_context(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"An exact turn needs {ceil(needed_bytes / 1e6)} MB of memory, which are not free. Try "
            "again later, or without cache_exact. The operator can lower --max-model-len."
        )

    @classmethod
    def for_kv_type(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"Turns with these kv_bits need {ceil(needed_bytes / 1e6)} MB of memory, which are not "
            "free. Try again later, or without kv_bits. The operator can lower --max-model-len."
        )

    @classmethod
    def for_state_file(cls, needed_bytes: int) -> NoMemory:
        return cls(
            f"The state in this file needs {ceil(needed_bytes / 1e6)} MB of memory, which are not "
            "free. Try again later."
        )


class RuntimeDied(ServerError):
    status, kind, code = 503, "server_error", "model_restarting"


class Unavailable(ServerError):
    status, kind, code = 503, "server_error", "unavailable"


class ModelLoadFailed(ServerError):
    """A model that may be loaded on demand could not be loaded. It is tried again later."""

    status, kind, code = 503, "server_error", "model_load_failed"

    def __init__(self, name: str, reason: str, retry_after_s: int) -> None:
        self.retry_after_s = max(retry_after_s, 1)
        super().__init__(
            f"the model {name} could not be loaded: {reason.rstrip('.')}. A request that comes "
            f"after {self.retry_after_s} s tries it again",
            param="model",
        )


def as_server_error(error: Exception, doing: str) -> ServerError:
    """Return a ServerError unchanged, and wrap any other error in one that says what failed."""
    return error if isinstance(error, ServerError) else ServerError(f"{doing} failed: {error!r}")


class BadMedia(BadRequest):
    """An image or video cannot be fetched or decoded, or is too large."""

    code = "invalid_media"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="messages")


class MediaRefused(BadMedia):
    """The server must not fetch from this address."""

    code = "media_refused"
