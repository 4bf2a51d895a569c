"""Texts on which tokenizers differ: digits, scripts, marks, emoji, blanks, contractions, titlecase letters, control
tokens as text.
"""

import itertools

_WORDS = [
    "Hello", "HelloWorld", "helloWORLD", "iPhone", "naïve", "Straße", "ǅungla", "aǅb", "ŉaive", "ﬁne", "ſtart", "İstanbul",
    "Привет", "ПРИВЕТмир", "Ωmega", "ελληνικά", "日本語", "漢字かなカナ", "한국어", "ㄱㄴㄷ", "ㄅㄆㄇ", "ภาษาไทย", "မြန်မာ", "ខ្មែរ", "ລາວ",
    "العربية", "مَرْحَبًا", "עִבְרִית", "हिन्दी", "বাংলা", "e\u0301a\u0300", "\u0301x", "x\u0301\u0302y", "ᏣᎳᎩ", "ᲐᲑ", "𝒜𝒷", "𠀀𠀁", "ⅣⅫ", "ªº", "ʰʷ",
]  # fmt: skip
_NUMBERS = [
    "1",
    "12",
    "123",
    "1234",
    "12345",
    "123456",
    "1234567",
    "3.14",
    "1,000,000",
    "1e10",
    "x1y22z333",
    "0x1F4A9",
    "٣٤٥",
    "१२३४",
    "²³½",
    "²12345",
    "①②③④",
    "1२३4",
    "2024-05-06",
    "+49 (0)30 1234",
    "100%",
    "$9.99",
    "5€",
]
_CONTRACTIONS = [
    "it's", "IT'S", "don't", "DON'T", "we're", "We'Re", "I'm", "I'M", "they'll", "THEY'LL", "he'd", "I've", "'s", "'sa",
    "it’s", "x'ſ", "rock'n'roll", "'''", "'tis", "a'b", "O'Reilly", "İ'da", "ı's",
]  # fmt: skip
_SYMBOLS = [
    "!", "?!", "...", "…", "。", "、", "！？", "“q”", "‘q’", "—", "(a)", "[b]", "{c}", "<d>", "a/b", "//", "a\\b", "$x", "^_^", "`x`", "|",
    "~", "@user", "#tag", "&amp;", "*bold*", "a_b", "==", "!=", "->", "=>", "©®™", "±×÷", "«x»", "¿qué?", "℃", "→⇒", "☃", "♥️", "︙", "﹏", "・",
    "\ue000", "\u00ad", "\u200b", "\u200d", "\ufeff", "\u0378", "\U000e0041",
]  # fmt: skip
_EMOJI = ["👍", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "🏴\U000e0067\U000e0062\U000e007f", "1️⃣", "❤️‍🔥", "🫠x", "a😀b"]
_BLANKS = [
    " ", "  ", "   ", "    ", " " * 7, " " * 17, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", " \n", "\n ", " \n \n ", "\t\n\t",
    "\u00a0", "\u3000", "\u2003 ", "\u0085", "\u2028", "\v\f", "  \r", "\x1c", "\x00", "\x7f",
]  # fmt: skip
CONTROL_TEXTS = [
    "<s>", "</s>x", "a<s>b", "a <s> b", "<s><s>", "<unk>", "<pad>", "<|user|>hi", "x <tool> y", "<tool>", "<|user|> \n<tool> ",
    "<|us", "< s>", "<0x41>", "<0x0A>", "▁", "a▁b", "Ġ", "aĊb",
]  # fmt: skip
"""With the names of added tokens, or what looks like them."""


def _mixed() -> list[str]:
    cycles = [itertools.cycle(group) for group in (_WORDS, _BLANKS, _NUMBERS, _SYMBOLS, _CONTRACTIONS, _EMOJI)]
    orders = (
        (0, 1, 2, 1, 0),
        (3, 0, 1, 4, 3),
        (0, 3, 2, 3),
        (1, 0, 1, 5, 1),
        (4, 0, 2, 0),
        (1, 2, 1, 3, 1),
        (0, 4, 1, 1),
    )
    return ["".join(next(cycles[kind]) for kind in order) for order in orders for _ in range(13)]


def hostile_texts() -> list[str]:
    """Some 300 texts, each once."""
    alone = [*_WORDS, *_NUMBERS, *_CONTRACTIONS, *_SYMBOLS, *_EMOJI, *_BLANKS, *CONTROL_TEXTS]
    between = [f"a{blank}b" for blank in _BLANKS] + [f" {blank}1{blank} " for blank in _BLANKS[:14]]
    return list(dict.fromkeys([*alone, *between, *_mixed(), "a" * 40 + "1" * 40 + "!" * 40]))
