"""Signatures of reasoning: they say that a text is what a model here wrote, unchanged.

Nothing is trusted because of one: a client may send any reasoning through chat completions. What
they are good for is to tell our reasoning from that of another provider, which would be strange to
this model. A text that is not shown to the client is in its signature, so that it comes back with
the conversation, whatever became of the server meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from blake3 import blake3

from rekindle.api.base.fields import TextAllowance

PREFIX = "rk1"
DIGEST_BYTES = 16
PIECE_BYTES = 64 << 10  # of a text inside a signature, which are unpacked at once


def sign(text: str) -> str:
    """The signature of a block whose text is shown."""
    return f"{PREFIX}.{_digest(text)}"


def seal(text: str) -> str:
    """The signature of a block whose text is not shown, with the text in it."""
    packed = zlib.compress(text.encode(errors="replace"))
    return f"{sign(text)}.{base64.urlsafe_b64encode(packed).decode()}"


def signed_text(text: str, signature: str, allowance: TextAllowance) -> str | None:
    """What the model wrote; None for a signature that is not ours or not of this text."""
    prefix, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if prefix != PREFIX:
        return None
    original = _unpacked(packed, allowance) if packed and not text else allowance.take(text)
    return original if original is not None and _digest(original) == digest else None


def _digest(text: str) -> str:
    hashed = blake3(
        text.encode(errors="replace"), derive_key_context="rekindle 2026 thinking block"
    )
    return base64.urlsafe_b64encode(hashed.digest(DIGEST_BYTES)).decode().rstrip("=")


def _unpacked(packed: str, allowance: TextAllowance) -> str | None:
    """Anybody can make a signature: each byte counts as it comes, whether it is of ours or not."""
    allowance.spend(len(packed))
    inflate, text = zlib.decompressobj(), bytearray()
    try:
        rest = base64.urlsafe_b64decode(packed)
        while piece := inflate.decompress(rest, PIECE_BYTES):
            allowance.spend(len(piece))
            text += piece
            rest = inflate.unconsumed_tail
        return text.decode()
    except zlib.error:
        allowance.spend(PIECE_BYTES)  # which it may have unpacked before it found the fault
        return None
    except (binascii.Error, ValueError):
        return None
