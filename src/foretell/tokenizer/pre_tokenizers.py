"""Where byte-level tokenizers cut a text into words, by the names that GGUF files give (`tokenizer.ggml.pre`).

Each pattern is applied to the pieces that those before it left; what no pattern matches is a piece of its own. The
patterns cut as llama.cpp does, which differs from some published tokenizers: it takes every letter beyond ASCII for an
upper-case and a lower-case one, and folds the case of ASCII letters only.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from foretell.utils.names import unknown

VARIABLE = "FORETELL_PRE_TOKENIZER"
"""Environment variable that names the pre-tokenizer for commands without `--pre-tokenizer`."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut, and what a file is taken to say where it is silent."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is that token, whatever the merges give."""
    add_bos: bool = False
    raw: bool = False
    """Tokens are written as they are, with a token per byte for what has none, not in the alphabet of bytes."""
    escape_whitespaces: bool = False
    """Blanks are written as U+2581."""


CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
"""The ends of shortened English words, in either case of ASCII letters."""
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OTHER_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_BLANKS = r"\s+(?!\S)|\s+"
_SPACE = r"\s*[\r\n]+|" + _BLANKS
_ASCII_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+"
_LINES = r"[^\n]+|\n+"
_DIGIT, _THREE_DIGITS, _DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"
_FROM_RIGHT = r"\P{N}*+\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+"
"""Groups of three digits from the right; the first takes the text before it."""
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[L&&[^a-z]]*[L&&[^A-Z]]+CONTRACTION|[^\r\n\p{L}\p{N}]?[L&&[^a-z]]+[L&&[^A-Z]]*CONTRACTION"
)
"""A word that begins anew where an upper-case ASCII letter follows a lower-case one."""
_HAN = r"\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{f900}-\x{faff}\x{20000}-\x{2a6df}\x{2a700}-\x{2ebef}\x{2f800}-\x{2fa1f}"
_LATIN_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}"
    r"\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}"
    r"\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}"
    r"\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}"
    r"\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}"
    r"\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}"
    r"\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}"
    r"\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}"
    r"\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
"""Letters of alphabets with two cases, as DeepSeek's first tokenizer lists them."""
_EAST_ASIAN = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}&&[^\s]]+"
_ASIAN = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{8c48}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}"
    r"\x{1100}-\x{11ff}]+"
)
_HAN_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_HANGUL_BOPOMOFO = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|"
    r"[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}"
    r"\x{fe30}-\x{fe4f}]+|[\x{3105}-\x{312f}]+|" + _HAN_KANA
)


def _cased(contraction: str, letters: str = r"\p{L}") -> str:
    return _CASED_WORD.replace("CONTRACTION", contraction).replace("[L&&", f"[{letters}&&")


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _BLANKS
_LLAMA_3 = "|".join((CONTRACTION, _WORD, _THREE_DIGITS, _OTHER, _SPACE))
_QWEN_2 = "|".join((CONTRACTION, _WORD, _DIGIT, _OTHER, _SPACE))
_SYMBOLS = "|".join((_ASCII_WORD, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+"))
_GPT_4O = "|".join((_cased(CONTRACTION + "?"), _THREE_DIGITS, _OTHER_SLASH, _SPACE))
_MARKED_4O = "|".join((_MARKED_WORD + CONTRACTION + "?", _THREE_DIGITS, _OTHER_SLASH, _SPACE))
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_DEEPSEEK_3 = (_THREE_DIGITS, _HAN_KANA, rf"{_SYMBOLS}[\r\n]*|{_SPACE}")

_TABLE: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, _DIGITS, "[0-9]{3}")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_LLAMA_3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA_3,)),
    "glm4 glm5": PreTokenizer((_LLAMA_3,), ignore_merges=True),
    "minicpm5": PreTokenizer(
        (_THREE_DIGITS, "|".join((CONTRACTION, _WORD, _DIGITS, _OTHER, _SPACE))), ignore_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            "|".join((CONTRACTION, _WORD, _THREE_DIGITS, _OTHER, r"\s*[\r\n]+"))
            + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
            + r"|\s",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]", rf"\s?[{_LATIN_LETTERS}]+",
            r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}\x{3002}]+", r"\s+\z", _EAST_ASIAN,
            _DIGITS,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK_3),
    "spark2_5": PreTokenizer((_THREE_DIGITS, _HAN_KANA, rf"{_SYMBOLS}|[\r\n]|{_BLANKS}", _DIGIT)),
    "youtu": PreTokenizer(
        (_HANGUL_BOPOMOFO, "|".join((_MARKED_WORD + CONTRACTION + "?", _DIGIT, _OTHER_SLASH, _SPACE))),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((_DIGIT, _GPT2)),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
    "roberta-bpe mpt olmo jais trillion granite-docling exaone4": PreTokenizer((_GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN_2,)),
    "laguna": PreTokenizer((_LINES, _QWEN_2)),
    "ufakzeka": PreTokenizer(("|".join((_WORD, _DIGIT, _OTHER, _SPACE)),)),
    "qwen35": PreTokenizer(
        ("|".join((CONTRACTION, _MARKED_WORD, _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE)),)
    ),
    "seed-coder": PreTokenizer(
        ("|".join((CONTRACTION, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE)),)
    ),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        ("|".join((CONTRACTION, _WORD, _DIGIT, _OTHER, r"\s*[\r\n]", _BLANKS)),)
    ),
    "exaone-moe": PreTokenizer(
        (
            "|".join((
                CONTRACTION, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", _DIGIT,
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]", _BLANKS,
            )),
        )
    ),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "tekken": PreTokenizer(
        ("|".join((_cased(""), _DIGIT, _OTHER_SLASH, _SPACE)),), ignore_merges=True, add_bos=True
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT_4O,)),
    "granite-embed-multi-97m": PreTokenizer(
        ("|".join((_cased(CONTRACTION + "?", r"\p{L}\p{M}"), _THREE_DIGITS, _OTHER_SLASH, _SPACE)),),
        ignore_merges=True,
    ),
    "tiny_aya cohere2moe": PreTokenizer((_FROM_RIGHT, _MARKED_4O)),
    "afmoe": PreTokenizer((_FROM_RIGHT, _ASIAN, rf"{_SYMBOLS}[\r\n]*|{_SPACE}")),
    "superbpe": PreTokenizer((_DIGITS, "(?=(?:[0-9]{3})+(?![0-9]))")),
    "kimi-k2": PreTokenizer(
        (
            "|".join((
                f"[{_HAN}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{CONTRACTION}?", _THREE_DIGITS, _OTHER,
                _SPACE,
            )),
        )
    ),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": PreTokenizer((_LINES,), add_bos=True, raw=True, escape_whitespaces=True),
    "sarvam-moe": PreTokenizer((_LINES,), raw=True, escape_whitespaces=True),
}  # fmt: skip
PRE_TOKENIZERS = {name: rule for names, rule in _TABLE.items() for name in names.split()}
"""By every name that llama.cpp knows."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of this name.

    Raises:
        ValueError: no known one.
    """
    if name not in PRE_TOKENIZERS:
        error = unknown("pre-tokenizer", name, PRE_TOKENIZERS)
        raise ValueError(
            f"{error}; if the tokenizer cuts texts as one of these does, name it with --pre-tokenizer NAME, "
            f"or for any command with {VARIABLE}=NAME in the environment"
        )
    return PRE_TOKENIZERS[name]


def split_by(rule: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Cuts a text as the rule says, into words in the alphabet of bytes unless the rule is `raw`."""
    # What is built in, GPT-2's rule and digits, is faster than the same patterns in `Split`.
    built_in = rule.patterns[-1:] == (_GPT2,) and not rule.raw
    cuts = [
        pre_tokenizers.Digits(individual_digits=True)
        if pattern == _DIGIT
        else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in rule.patterns[: -1 if built_in else None]
    ]
    letters = [] if rule.raw else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=built_in)]
    return pre_tokenizers.Sequence([*cuts, *letters])
