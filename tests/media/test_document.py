"""The text of PDFs and of text files. What cannot be read is refused with a remedy."""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO

import pytest
from pypdf import PdfReader, PdfWriter

from rekindle.media import document
from rekindle.media.document import extract_text, tiny_pdf
from rekindle.media.image import DecodeError


def joined(*pages: bytes, password: str | None = None) -> bytes:
    """One PDF with the pages of several."""
    writer = PdfWriter()
    for each in pages:
        writer.append(PdfReader(BytesIO(each)))
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    file = BytesIO()
    writer.write(file)
    return file.getvalue()


def blank() -> bytes:
    writer = PdfWriter()
    writer.add_blank_page(100, 100)
    file = BytesIO()
    writer.write(file)
    return file.getvalue()


def refusal(data: bytes) -> str:
    with pytest.raises(DecodeError) as refused:
        extract_text(data)
    return str(refused.value)


def test_the_text_of_a_pdf_comes_page_by_page() -> None:
    data = joined(tiny_pdf("First page."), blank(), tiny_pdf("Second page."))
    assert extract_text(data) == "First page.\n\nSecond page."


def test_a_pdf_may_begin_with_other_bytes() -> None:
    assert extract_text(b"\r\n" * 8 + tiny_pdf("Late")) == "Late"


def test_a_text_file_is_its_text() -> None:
    assert extract_text("Grüße\n".encode()) == "Grüße\n"
    assert extract_text("\ufeffmarked".encode()) == "marked"


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (b"\xff\xd8\xff\xe0", "neither a PDF nor text in UTF-8"),
        (b"a\0b", "neither a PDF nor text in UTF-8"),
        (b"%PDF-1.7 and then nothing", "damaged or cut short"),
        (tiny_pdf("cut")[:200], "damaged or cut short"),
        (blank(), "send them as images"),
        (joined(tiny_pdf("x"), password="secret"), "needs no password"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(data: bytes, remedy: str) -> None:
    assert remedy in refusal(data)


def test_a_pdf_with_an_empty_password_is_read() -> None:
    assert extract_text(joined(tiny_pdf("Open"), password="")) == "Open"


def test_pages_and_characters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_PAGES", 1)
    assert "at most 1 pages" in refusal(joined(tiny_pdf("a"), tiny_pdf("b")))
    monkeypatch.setattr(document, "MAX_CHARACTERS", 3)
    assert "characters" in refusal(b"long")
    assert "characters" in refusal(tiny_pdf("long"))


@pytest.mark.parametrize("cut", range(0, 600, 37))
def test_a_damaged_pdf_gives_text_or_a_refusal(cut: int) -> None:
    data = bytearray(tiny_pdf("Hello"))
    data[cut % len(data)] ^= 0xFF
    with suppress(DecodeError):
        assert "\0" not in extract_text(bytes(data))


def test_an_inflating_pdf_is_refused() -> None:
    writer = PdfWriter(BytesIO(tiny_pdf("x")))
    stream = writer.pages[0].get_contents()
    assert stream is not None
    stream.set_data(b"% " + b" " * (96 << 20) + b"\n")
    writer.pages[0].replace_contents(stream)
    for page in writer.pages:
        page.compress_content_streams()
    file = BytesIO()
    writer.write(file)
    assert len(file.getvalue()) < 1 << 20
    assert refusal(file.getvalue())
