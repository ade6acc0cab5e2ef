"""What a request calls the state it goes on from, in the runtime's words."""

from __future__ import annotations

from msgspec import structs

from rekindle.api.openai.schema import ChatRequest, Request
from rekindle.config import Config
from rekindle.protocol.requests import Names

DAY_S = 86_400.0


def naming(request: Request, config: Config, choice: int) -> Names | None:
    """The first choice bears the request's names; how long to keep state goes for all of them."""
    plain = Names(
        wants_message_id=isinstance(request, ChatRequest) and bool(request.use_kv_cache),
        ttl_s=DAY_S if request.prompt_cache_retention == "24h" else None,
        in_memory=request.prompt_cache_retention in ("in_memory", "in-memory"),
    )
    named = plain if choice else _named(plain, request, config)
    return None if named == Names() else named


def _named(plain: Names, request: Request, config: Config) -> Names:
    chat = request if isinstance(request, ChatRequest) else None
    return structs.replace(
        plain,
        cache_key=request.cache_key,
        return_cache_key=bool(request.return_cache_key),
        session_id=request.session_id,
        session_number=request.kv_cache_session_id,
        message_ids=chat.message_ids if chat else [],
        prompt_cache_key=request.prompt_cache_key,
        by_fingerprint=bool(chat and config.force_cache and not chat.names_state),
    )
