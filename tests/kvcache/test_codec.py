from __future__ import annotations

import pickle
import random
import struct
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import CorruptBlock
from rekindle.kvcache import codec
from rekindle.kvcache.block import KEY_BYTES
from rekindle.kvcache.codec import (
    HEADER_BYTES,
    MAC_BYTES,
    MAGIC,
    MAX_TOKENS,
    MIN_STRIPED_BYTES,
    Record,
    RecordHeader,
    parse_header,
    record_bytes,
    seal,
    verify,
)
from rekindle.tokens import Tokens

SECRET = b"s" * 32
FIELD_BYTES = (len(MAGIC), 8, KEY_BYTES, KEY_BYTES, 1, 4)  # up to the token count
RECORD = Record(
    namespace=b"r" * KEY_BYTES,
    parent=b"p" * KEY_BYTES,
    tokens=Tokens.of(range(64)),
    blob=random.Random(1).randbytes(20_000),
    exact=True,
)

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
records = st.builds(
    Record,
    namespace=keys,
    parent=keys,
    tokens=st.lists(st.integers(0, 2**32 - 1)).map(Tokens.of),
    blob=st.binary() | st.binary().map(bytearray),
    exact=st.booleans(),
)


def encode(record: Record, secret: bytes) -> bytes:
    return b"".join(seal(record, secret))


def decode(raw: bytes, secret: bytes) -> Record:
    """Split a record as a reader does, by its header."""
    header = parse_header(raw[:HEADER_BYTES])
    split = HEADER_BYTES + header.packed_bytes
    body, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
    return verify(raw[:HEADER_BYTES], body[HEADER_BYTES:split], body[split:], mac, secret)


def sealed(body: bytes) -> bytes:
    key = blake3(SECRET, derive_key_context=codec._CONTEXT).digest()
    return body + blake3(body, key=key).digest()


def flipped(raw: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def refuse(raw: bytes, secret: bytes = SECRET) -> None:
    with pytest.raises(CorruptBlock):
        decode(raw, secret)


@given(records, keys)
def test_a_sealed_record_can_be_verified(record: Record, secret: bytes) -> None:
    assert decode(encode(record, secret), secret) == record


@given(records, records)
def test_different_records_have_different_bytes(one: Record, other: Record) -> None:
    assert (encode(one, SECRET) == encode(other, SECRET)) == (one == other)


@given(records)
def test_a_record_has_the_length_that_its_header_says(record: Record) -> None:
    raw = encode(record, SECRET)
    assert len(raw) == record_bytes(len(record.tokens.packed), len(record.blob))
    assert len(raw) == parse_header(raw).record_bytes
    assert sum(FIELD_BYTES) == HEADER_BYTES


def test_sealing_does_not_copy_the_state() -> None:
    parts = seal(RECORD, SECRET)
    assert parts[1] is RECORD.tokens.packed
    assert parts[2] is RECORD.blob


def test_verifying_does_not_copy_the_state() -> None:
    header, packed, blob, mac = seal(RECORD, SECRET)
    read = bytearray(blob)
    assert verify(header, packed, read, mac, SECRET).blob is read


def test_a_header_can_be_read_before_the_rest() -> None:
    assert parse_header(seal(RECORD, SECRET)[0]) == RecordHeader(
        MAGIC,
        len(RECORD.blob),
        RECORD.parent,
        RECORD.namespace,
        exact=True,
        resumable=False,
        tokens=64,
    )


@pytest.mark.parametrize("packed", [b"abc", bytes(4 * (MAX_TOKENS + 1))])
def test_a_record_that_no_reader_accepts_is_not_sealed(packed: bytes) -> None:
    with pytest.raises(ValueError, match="tokens"):
        seal(Record(RECORD.namespace, RECORD.parent, Tokens(packed), b"", exact=False), SECRET)


def test_the_seal_is_not_a_plain_keyed_hash_under_the_secret() -> None:
    """The secret signs other things too, which must not pass for blocks."""
    raw = encode(RECORD, SECRET)
    refuse(raw[:-MAC_BYTES] + blake3(raw[:-MAC_BYTES], key=SECRET).digest())


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_the_header_and_the_checksum_is_noticed(bit: int) -> None:
    raw = encode(RECORD, SECRET)
    for offset in (*range(HEADER_BYTES), *range(-MAC_BYTES, 0)):
        refuse(flipped(raw, offset, bit))


def test_flipped_bits_all_over_tokens_and_state_are_noticed() -> None:
    raw = encode(RECORD, SECRET)
    chance = random.Random(2)
    for offset in chance.sample(range(HEADER_BYTES, len(raw) - MAC_BYTES), 600):
        refuse(flipped(raw, offset, chance.randrange(8)))


SECTION_ENDS = list(accumulate((0, *FIELD_BYTES, len(RECORD.tokens.packed), len(RECORD.blob))))


@pytest.mark.parametrize("end", SECTION_ENDS)
def test_a_record_cut_short_at_any_section_is_noticed(end: int) -> None:
    raw = encode(RECORD, SECRET)
    for stop in (max(end - 1, 0), end, end + 1):
        refuse(raw[:stop])
        refuse(raw[:stop] + raw[stop + 1 :])


@pytest.mark.parametrize("end", SECTION_ENDS[:-1])
def test_a_record_cut_short_and_sealed_again_is_noticed(end: int) -> None:
    body = encode(RECORD, SECRET)[:-MAC_BYTES]
    for stop in (max(end - 1, 0), end, end + 1):
        refuse(sealed(body[:stop]))


def test_bytes_after_a_record_are_noticed() -> None:
    raw = encode(RECORD, SECRET)
    refuse(raw + b"\0")
    refuse(raw + raw)
    refuse(sealed(raw))


@given(records, keys.filter(lambda secret: secret != SECRET))
def test_a_record_under_another_secret_is_refused(record: Record, secret: bytes) -> None:
    refuse(encode(record, secret))


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_refused_even_with_the_right_beginning(garbage: bytes, begins: bool) -> None:
    refuse(MAGIC + garbage if begins else garbage)


@given(st.binary(max_size=400))
def test_garbage_under_our_own_seal_is_refused(garbage: bytes) -> None:
    refuse(sealed(b"x" + garbage))


LIES = [
    (blob_bytes, tokens)
    for blob_bytes in (0, 4, 7, 9, 2**32, 2**63, 2**64 - 1)
    for tokens in (0, 1, 2, 3, 2**32 - 1)
    if 4 * tokens + blob_bytes != 16
]


@pytest.mark.parametrize(("blob_bytes", "tokens"), LIES)
def test_a_sealed_header_with_wrong_sizes_is_refused(blob_bytes: int, tokens: int) -> None:
    fields = (MAGIC, blob_bytes, RECORD.parent, RECORD.namespace, True, tokens)
    refuse(sealed(struct.pack(">4sQ32s32s?I", *fields) + bytes(16)))


@pytest.mark.parametrize(("origin", "tokens"), [(4, 1), (255, 1), (0, MAX_TOKENS + 1)])
def test_an_invalid_header_is_refused_before_memory_is_allocated(origin: int, tokens: int) -> None:
    fields = (MAGIC, 0, RECORD.parent, RECORD.namespace, origin, tokens)
    with pytest.raises(CorruptBlock, match="no sense"):
        parse_header(struct.pack(">4sQ32s32sBI", *fields))


def test_a_sealed_record_of_another_format_is_refused() -> None:
    body = encode(RECORD, SECRET)[:-MAC_BYTES]
    refuse(sealed(b"RKB9" + body[len(MAGIC) :]))


def test_a_state_moved_under_other_tokens_is_refused() -> None:
    raw = encode(RECORD, SECRET)
    other = encode(
        Record(RECORD.namespace, RECORD.parent, Tokens.of(range(1, 65)), b"", True), SECRET
    )
    state = HEADER_BYTES + len(RECORD.tokens.packed)
    refuse(raw[:HEADER_BYTES] + other[HEADER_BYTES:state] + raw[state:])


class Canary:
    """Leaves a trace when it is unpickled."""

    sang = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Canary, "sang", True)


def test_a_pickle_is_only_bytes() -> None:
    canary = pickle.dumps(Canary())
    refuse(canary)
    refuse(MAGIC + canary)
    record = Record(RECORD.namespace, RECORD.parent, Tokens.of([1]), canary, exact=False)
    assert decode(encode(record, SECRET), SECRET).blob == canary
    assert not Canary.sang


def test_the_record_format_is_the_same_as_in_earlier_versions() -> None:
    tokens, state = Tokens.of(range(64)), b"state" * 100
    record = Record(b"r" * KEY_BYTES, b"p" * KEY_BYTES, tokens, state, exact=True, resumable=True)
    digest = sha256(encode(record, SECRET)).hexdigest()
    assert digest == "edd1b490ce2cf336c693be5ab7490da95041f84d8ec95c436c5c56e7ff072f5c"


def test_the_format_of_a_striped_record_is_fixed() -> None:
    state = bytes(range(256)) * (MIN_STRIPED_BYTES // 256) + b"end"
    record = replace(RECORD, blob=state)
    header, packed, blob, mac = seal(record, SECRET)
    assert parse_header(header).is_striped
    assert blob is state
    assert not parse_header(seal(replace(record, blob=state[3:-1]), SECRET)[0]).is_striped
    digest = sha256(b"".join((header, packed, mac))).hexdigest()
    assert digest == "091cc16448e08d7a07b39e251756e42cd3a62b163f8dea0f0ed7a44fc6ea7776"
    assert verify(header, packed, blob, mac, SECRET) == record
    with pytest.raises(CorruptBlock, match="checksum"):
        verify(header, packed, state[:-1] + b"x", mac, SECRET)


def test_the_number_of_cores_does_not_change_the_seal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Record(
        b"n" * 32, b"p" * 32, Tokens.of([1, 2, 3]), bytes(range(256)) * 8192, exact=True
    )
    alone = seal(record, SECRET)
    monkeypatch.setattr(codec, "PARALLEL_HASH_BYTES", 1)
    together = seal(record, SECRET)
    assert [bytes(part) for part in alone] == [bytes(part) for part in together]
