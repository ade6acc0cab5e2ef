# ruff: noqa: RUF001  # letters that look alike are the point
"""Draws texts on which tokenizers differ: many scripts, spaces, digits, marks, code, emoji."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

SCRIPTS = (
    "the quick brown fox jumps over a lazy dog and HTTPServer reads getElementById",
    "Größe café naïve façade Ærøskøbing İstanbul ŁÓDŹ straße ﬁne ĳ Ǆ",
    "Съешь же ещё этих мягких французских булок, да выпей чаю ЁЖИК",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία ΌΧΙ ᾠδή",
    "نص عربي قصير مع حركات مُدَرِّسٌ لا إله",
    "עברית עם נִיקּוּד ושלום",
    "मैं हिन्दी में लिख रहा हूँ क्षत्रिय ज्ञान",
    "আমি বাংলায় গান গাই তমিল",
    "தமிழ் மொழி స్వాగతం ಕನ್ನಡ മലയാളം",
    "ภาษาไทยเป็นภาษาที่มีวรรณยุกต์ ລາວ ខ្មែរ မြန်မာ",
    "한국어 문장입니다 ㄱㄴㄷ 각",
    "日本語の文章です。カタカナ ﾊﾝｶｸ 々",
    "天地玄黃，宇宙洪荒。简体中文「測試」𠀀𪚥",
    "ქართული ენა Հայերեն አማርኛ ᏣᎳᎩ ⴰⵎⴰⵣⵉⵖ བོད་ཡིག ᠮᠣᠩᠭᠣᠯ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 ℵ ℝ ⅷ Ⅻ ª º ᵃ ₁₂ ½ ¾ ① ㉑ ٠١٢٣ ०१२ 一二三",
    "Việt Nam tiếng Việt đẹp Hawaiʻi ʼn Yorùbá ọ̀rọ̀",
)
PIECES = (
    "'s", "'S", "'ll", "'LL", "'Re", "'ve", "\u2019s", "I'm", "DON'T", "'d'", "''",
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "👍🏽", "❤️", "#️⃣", "☃", "∑", "→", "€", "£9.99", "™",
    "123", "1234567", "3.14159", "1,000,000", "0x1F", "2024-01-31", "12:30:59", "+49 (0)30",
    "def f(x):\n    return x**2\n", "if (a&&b||!c) {\r\n\tgo();\r\n}", "</div>", "a.b_c-d",
    "https://example.com/a?b=c&d=%20#e", "user@example.org", "$HOME/.config", "\\n", "\"'`",
    "e\u0301", "a\u0308\u0304", "\u1112\u1161\u11ab", "\u212b", "\u0041\u030a", "\u0301x",
    "q\u0323\u0307",
    "\u00a0", "\u3000", "\u2003", "\u2028", "\u200b", "\u200d", "\ufeff", "\u0085", "\u00ad",
    "\u202e",
    "\x00", "\x01", "\x7f", "\x0b", "\x0c", "\ufffd", "\ue000", "\U0010ffff", "\U000e0001",
    "<|end|>", "<s>", "</s>", "<unk>", "<|", "|>", "[INST]", "<0x0A>", "▁", "▁▁", "Ġ", "Ċ", "##",
    "...", "?!", "--", "----", "====", "''''", "((()))", "!!!!!!!!", "____", "\\\\", "~~~", "/*",
)  # fmt: skip
SPACES = (
    " ", " ", " ", "  ", "   ", "        ", "\n", "\n\n", "\n\n\n", "\r\n", "\t", "\t\t",
    " \n", "\n ", " \t ", "  \n  ", "", "",
)  # fmt: skip


def hard_strings(count: int, seed: int = 0) -> Iterator[str]:
    """Yield texts, always the same ones for a seed. The first ones are the parts themselves."""
    draw = random.Random(seed)
    words = [word for script in SCRIPTS for word in script.split()]
    makers: tuple[Callable[[], str], ...] = (
        lambda: draw.choice(words),
        lambda: draw.choice(words),
        lambda: draw.choice(PIECES),
        lambda: draw.choice(SPACES),
        lambda: draw.choice(SPACES),
        lambda: "".join(draw.choice("".join(SCRIPTS)) for _ in range(draw.randint(1, 6))),
        lambda: draw.choice("abcxyz ABC  012  .,;:!?'\"") * draw.randint(1, 12),
        lambda: str(draw.randrange(10 ** draw.randint(1, 12))),
        lambda: draw.choice(words).swapcase(),
    )
    parts = ["", *SCRIPTS, *PIECES, *SPACES]
    yield from parts[:count]
    for _ in range(count - len(parts)):
        yield "".join(draw.choice(makers)() for _ in range(draw.randint(1, 14)))


def runs_of_spaces(count: int, seed: int = 0) -> Iterator[str]:
    """Yield texts of long runs of spaces and line feeds."""
    draw = random.Random(seed)
    for _ in range(count):
        runs = (" " * draw.randint(1, 45), "\n" * draw.randint(1, 45), "a", "b ", " c", "\t")
        yield "".join(draw.choice(runs) for _ in range(draw.randint(1, 6)))
