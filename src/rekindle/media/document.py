"""Extracts the text of a PDF, or reads a text file. Runs in the decoder process."""

from __future__ import annotations

import codecs
import logging
from io import BytesIO

from pypdf import PdfReader, PdfWriter
from pypdf.errors import DependencyError

from rekindle.media.image import DecodeError, explained
from rekindle.media.jobs import LIMITS

MAX_PAGES = 1_000
MAX_CHARACTERS = LIMITS.text_characters
MAGIC, MAGIC_WITHIN = b"%PDF-", 1024  # some programs write other bytes in front
#: Encodings of text in PDFs. A confined process cannot load them later.
ENCODINGS = (
    *("ascii", "latin-1", "cp1252", "mac-roman", "charmap", "utf-8", "utf-16", "utf-16-be"),
    *("utf-16-le", "gb2312", "gbk", "gb18030", "big5", "big5hkscs", "cp949", "euc-kr"),
    *("shift-jis", "euc-jp", "cp932", "utf-32-be"),
)


def warm_up() -> None:
    """Import everything that reading a file needs."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    for encoding in ENCODINGS:
        codecs.lookup(encoding)
    extract_text(tiny_pdf("warm"))
    extract_text(b"warm")


def extract_text(data: bytes) -> str:
    """Return the text of a PDF, page by page, or of a text file. Raises DecodeError."""
    if MAGIC in data[:MAGIC_WITHIN]:
        with explained("PDF"):
            return _pdf_text(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DecodeError("The file is neither a PDF nor text in UTF-8: send one of these.")
    return _limited(text)


def _pdf_text(data: bytes) -> str:
    reader = PdfReader(BytesIO(data))
    if reader.is_encrypted and not _opens(reader):
        raise DecodeError("The PDF is encrypted: send one that needs no password.")
    if len(reader.pages) > MAX_PAGES:
        raise DecodeError(f"A PDF may have at most {MAX_PAGES} pages: send it in parts.")
    pages, size = [], 0
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > MAX_CHARACTERS:
            break  # before the rest takes time
    text = _limited("\n\n".join(filter(None, pages)))
    if not text:
        raise DecodeError(
            "The PDF has no text, for example because its pages were scanned: send them as images "
            "to a model that sees, or recognise the text first."
        )
    return text.encode(errors="replace").decode()  # a font can map to lone surrogates


def _opens(reader: PdfReader) -> bool:
    """Whether an empty password is right. AES would need another package."""
    try:
        return bool(reader.decrypt(""))
    except DependencyError:
        return False


def _limited(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise DecodeError(f"A file may have at most {MAX_CHARACTERS >> 20} x 2^20 characters.")
    return text


def tiny_pdf(text: str) -> bytes:
    """Write a PDF of one page."""
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = PdfWriter()
    page = writer.add_blank_page(200, 200)
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    fonts = DictionaryObject({NameObject("/F1"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    stream = DecodedStreamObject()
    stream.set_data(b"BT /F1 12 Tf 20 100 Td (" + text.encode("latin-1") + b") Tj ET")
    page[NameObject("/Contents")] = writer._add_object(stream.flate_encode())
    file = BytesIO()
    writer.write(file)
    return file.getvalue()
