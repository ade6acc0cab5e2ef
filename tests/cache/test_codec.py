from __future__ import annotations

import pickle
import random
import struct
from itertools import accumulate

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.codec import MAGIC, Record, decode, encode
from rekindle.cache.key import KEY_BYTES, pack
from rekindle.errors import CorruptBlock

SECRET = b"s" * 32
MAC_BYTES = 32
FIELD_BYTES = (len(MAGIC), 8, KEY_BYTES, KEY_BYTES, 1, 4)  # up to the token count
HEADER_BYTES = sum(FIELD_BYTES)
RECORD = Record(
    root=b"r" * KEY_BYTES,
    parent=b"p" * KEY_BYTES,
    packed=pack(range(64)),
    blob=random.Random(1).randbytes(20_000),
    exact=True,
)

keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
records = st.builds(
    Record,
    root=keys,
    parent=keys,
    packed=st.lists(st.integers(0, 2**32 - 1)).map(pack),
    blob=st.binary(),
    exact=st.booleans(),
)


def sealed(body: bytes) -> bytes:
    return body + blake3(body, key=SECRET).digest()


def flipped(raw: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def refuse(raw: bytes, secret: bytes = SECRET) -> None:
    with pytest.raises(CorruptBlock):
        decode(raw, secret)


@given(records, keys)
def test_a_record_comes_back_whole(record: Record, secret: bytes) -> None:
    assert decode(encode(record, secret), secret) == record


@given(records, records)
def test_different_records_have_different_bytes(one: Record, other: Record) -> None:
    assert (encode(one, SECRET) == encode(other, SECRET)) == (one == other)


def test_the_header_is_as_long_as_its_fields() -> None:
    nothing = Record(RECORD.root, RECORD.parent, b"", b"", exact=False)
    assert len(encode(nothing, SECRET)) == HEADER_BYTES + MAC_BYTES


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


SECTION_ENDS = list(accumulate((0, *FIELD_BYTES, len(RECORD.packed), len(RECORD.blob))))


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
def test_a_header_that_lies_about_sizes_is_refused_though_it_is_sealed(
    blob_bytes: int, tokens: int
) -> None:
    fields = (MAGIC, blob_bytes, RECORD.parent, RECORD.root, True, tokens)
    refuse(sealed(struct.pack(">4sQ32s32s?I", *fields) + bytes(16)))


def test_a_record_of_another_format_is_refused_though_it_is_sealed() -> None:
    body = encode(RECORD, SECRET)[:-MAC_BYTES]
    refuse(sealed(b"RKB2" + body[len(MAGIC) :]))


def test_a_state_moved_under_other_tokens_is_refused() -> None:
    raw = encode(RECORD, SECRET)
    other = encode(Record(RECORD.root, RECORD.parent, pack(range(1, 65)), b"", True), SECRET)
    state = HEADER_BYTES + len(RECORD.packed)
    refuse(raw[:HEADER_BYTES] + other[HEADER_BYTES:state] + raw[state:])


class Canary:
    """Sings when it is unpickled."""

    sang = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Canary, "sang", True)


def test_a_pickle_is_only_bytes() -> None:
    canary = pickle.dumps(Canary())
    refuse(canary)
    refuse(MAGIC + canary)
    record = Record(RECORD.root, RECORD.parent, pack([1]), canary, exact=False)
    assert decode(encode(record, SECRET), SECRET).blob == canary
    assert not Canary.sang
