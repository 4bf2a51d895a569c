"""Draft models of the target's tokenizer whose embeddings are padded to another size: the text stays, drafts are
accepted, and tokens that a draft model lacks stop nothing.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from command import save_tiny_model
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.load import load
from foretell.utils.validation import read_json

METHODS = ("draft_model", "dynamic_tree", "cascade", "pard")


def resized(target: Path, vocab: int, path: Path) -> Path:
    """A copy of a model with another number of rows in its embedding and head, the same tokenizer, and a mask token,
    which only PARD reads.
    """
    config = read_json(save_tiny_model(path, vocab=vocab) / "config.json", "")
    (path / "config.json").write_text(json.dumps(config | {"pard_token": 5}))
    own, kept = load_file(path / "model.safetensors"), load_file(target / "model.safetensors")
    for name, weight in kept.items():
        rows = min(len(weight), len(own[name]))
        own[name][:rows] = weight[:rows]
    own["lm_head.weight"][read_json(target / "config.json", "")["vocab_size"] :] = 0
    save_file(own, path / "model.safetensors")
    shutil.copy(target / "tokenizer.json", path)
    return path


@pytest.mark.covering(1)
@pytest.mark.parametrize("vocab", [257, 330])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_of_another_size_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int, method: str, temperature: float
) -> None:
    """The draft model has the target's weights: of 300 rows it lacks 43, or has 30 more."""
    monkeypatch.setattr(Budget, "governs", lambda self, bound: False)  # it drafts at any cost
    target = save_tiny_model(tmp_path / "target", vocab=300)
    draft = load(str(resized(target, vocab, tmp_path / "draft")), dtype="float32")
    model = load(str(target), dtype="float32")
    sampling = SamplingParams(temperature=temperature, seed=3)
    plain = model.generate(["hello", "a b"], "autoregressive", sampling, max_new_tokens=40, ignore_eos=True)
    built = model.method(method, drafts=[draft, draft] if method == "cascade" else [draft])
    found = model.generate(["hello", "a b"], built, sampling, max_new_tokens=40, ignore_eos=True)
    if not temperature or built.accept.same_seed:
        assert [answer.tokens for answer in found] == [answer.tokens for answer in plain]
    assert max(max(answer.tokens) for answer in plain) >= 257, "the target writes tokens that the smaller model lacks"
    assert sum(answer.statistics.tokens_per_pass for answer in found) > (2 if method == "pard" else 3)
