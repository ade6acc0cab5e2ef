"""Signs the reasoning of replies, to recognise it when a client sends it back.

A signature proves nothing, because a client may send any reasoning through chat completions. It
tells our reasoning from that of another provider, which would confuse this model. Reasoning that is
hidden from the client is packed into its signature, so that it survives a restart of the server.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from blake3 import blake3

from rekindle.api.base.fields import TextBudget

PREFIX = "rk1"
PIECE_BYTES = 64 << 10  # of a packed text, unpacked in one step


def sign(text: str) -> str:
    """Sign a text that the client can see."""
    return f"{PREFIX}.{_digest(text)}"


def seal(text: str) -> str:
    """Sign a hidden text. The signature contains the text."""
    packed = zlib.compress(text.encode(errors="replace"))
    return f"{sign(text)}.{base64.urlsafe_b64encode(packed).decode()}"


def signed_text(text: str, signature: str, budget: TextBudget) -> str | None:
    """Return what the model wrote, or None if the signature is not ours or not of this text."""
    prefix, _, rest = signature.partition(".")
    digest, _, packed = rest.partition(".")
    if prefix != PREFIX:
        return None
    original = _unpacked(packed, budget) if packed and not text else budget.take(text)
    return original if original is not None and _digest(original) == digest else None


def _digest(text: str) -> str:
    hashed = blake3(
        text.encode(errors="replace"), derive_key_context="rekindle 2026 thinking block"
    )
    return base64.urlsafe_b64encode(hashed.digest(16)).decode().rstrip("=")


def _unpacked(packed: str, budget: TextBudget) -> str | None:
    """Unpack in steps and count every byte: anybody can send a packed text."""
    budget.spend(len(packed))
    inflate, text = zlib.decompressobj(), bytearray()
    try:
        rest = base64.urlsafe_b64decode(packed)
        while piece := inflate.decompress(rest, PIECE_BYTES):
            budget.spend(len(piece))
            text += piece
            rest = inflate.unconsumed_tail
        return text.decode()
    except zlib.error:
        budget.spend(PIECE_BYTES)  # it may have unpacked this much before the fault
        return None
    except (binascii.Error, ValueError):
        return None
