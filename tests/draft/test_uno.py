"""UNO's adapters against one pass of a model of transformers in which random tokens alone read the adapter."""

import json
import shutil
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from command import expect_error, run_foretell, tiny_target
from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import UnoDrafter
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.load import load, load_draft
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree
from helpers import random_tokens, unchecked
from uno_recording import Recording

VOCAB, DEPTH, RANK, ALPHA = 257, 4, 3, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
    "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj")  # fmt: skip


@cache
def oracle() -> tuple[Any, dict[str, tuple[torch.Tensor, torch.Tensor]], Path, Path]:
    """A random target, the factors of an adapter for all its linear layers, and the folders of both."""
    torch.manual_seed(0)
    target = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval()
    factors, folders = {}, (Path(mkdtemp(prefix="foretell-target-")), Path(mkdtemp(prefix="foretell-uno-")))
    for name in (f"model.layers.{i}.{part}" for i in range(3) for part in NAMES):
        outputs, inputs = target.get_submodule(name).weight.shape
        factors[name] = 0.2 * torch.randn(RANK, inputs), 0.2 * torch.randn(outputs, RANK)
    target.save_pretrained(folders[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target() / name, folders[0])
    inside = folders[1] / "adapter"  # as on the hub
    inside.mkdir()
    pairs = [(name, *each) for name, pair in factors.items() for each in zip("AB", pair, strict=True)]
    tensors = {f"{name}.lora_{end}.weight": tensor for name, end, tensor in pairs}
    save_file(tensors, inside / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [n.split(".")[1] for n in NAMES]}
    (inside / "adapter_config.json").write_text(json.dumps(config))
    return target, factors, *folders


@torch.no_grad()
def reference(text: list[int], noise: list[int]) -> torch.Tensor:
    """Logits of all depths after a text, the random tokens in one pass with it."""
    target, factors, *_ = oracle()
    rows = torch.arange(len(text) + len(noise))[None, :, None] >= len(text)

    def add(pair: tuple[torch.Tensor, torch.Tensor], module: object, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = inputs[0] @ pair[0].T @ pair[1].T
        return output + rows * (ALPHA / RANK) * update

    hooks = [target.get_submodule(n).register_forward_hook(partial(add, pair)) for n, pair in factors.items()]
    logits: torch.Tensor = target(torch.tensor([[*text, *noise]])).logits[0, -DEPTH:]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="there are no kernels here"))]
)
@pytest.mark.parametrize("shape", [DynamicTree(9, 2, 12), Chain(3, draw=False)], ids=str)
def test_logits_are_those_of_one_pass_and_texts_stay(shape: DynamicTree | Chain, native: bool) -> None:
    """Keys and values of random tokens stay in no cache: the next steps are right, too."""
    _, _, folder, adapter = oracle()
    model = load(str(folder), "float32")
    network = model.network
    if not native:
        network = build_decoder(model.config, SafetensorsWeights(folder), torch.float32, torch.device("cpu"))
    adapted = model.checkpoint.adapted(network, str(adapter / "adapter"))
    assert adapted is not None
    drafter = Recording(adapted, network, DEPTH, VOCAB)
    drafter.noted = {}
    requests = [
        Request(random_tokens(n, VOCAB, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0, seed=n))
        for n in (2, 21, 9, 1)
    ]
    with unchecked():
        drafted, plain = (
            [c.tokens for c in Engine(DecoderRunner(network), m, rows=3, chunk=8).complete(requests)]
            for m in (Method(drafter, shape, Match()), model.method())
        )
    assert drafted == plain and len(drafter.noted) > 8
    for text, (logits, noise) in drafter.noted.items():
        assert len(noise) == DEPTH - 1 and all(0 < token < VOCAB for token in noise)
        torch.testing.assert_close(logits.float(), reference(list(text), noise), atol=1e-4, rtol=0)
    drawn = [tuple(noise) for _, noise in drafter.noted.values()]
    assert len(set(drawn)) > len(drawn) // 2


def test_an_adapter_that_is_named_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the method `pard`; the first draft is the target's own token, so a pass gives two at least."""
    _, _, folder, adapter = oracle()
    monkeypatch.setattr(Budget, "governs", lambda self, bound: False)  # it drafts at any cost
    target, draft = load(str(folder), "float32"), load_draft(str(adapter))
    method = target.method("pard", {"num_steps": 3}, drafts=[draft])
    request = Request(random_tokens(9, VOCAB, seed=1), max_new_tokens=12)
    drafted, plain = (Engine(target.runner(), m).complete([request])[0] for m in (method, target.method()))
    assert drafted.tokens == plain.tokens and method.lossless and isinstance(method.draft, UnoDrafter)
    assert drafted.statistics.target_passes <= 8 < plain.statistics.target_passes
    common = ("generate", "abc", "--raw", "--model", folder, "--dtype", "float32", "--max-new-tokens", "4")
    drafting = "--method", "pard", "--draft-model", adapter
    with unchecked():
        texts = [run_foretell(*common, *more).stdout for more in ((), drafting)]
        said = expect_error(*common, "--method", "eagle3", "--draft-model", adapter)
    assert len(set(texts)) == 1 and "" not in texts
    assert f"{adapter}: an adapter, with which --method pard lets the target itself draft (UNO)" in said


def test_an_adapter_of_more_than_linear_layers_is_refused(tmp_path: Path) -> None:
    _, _, folder, adapter = oracle()
    copied = Path(shutil.copytree(adapter / "adapter", tmp_path / "adapter"))
    more = {"model.embed_tokens.lora_embedding_A": torch.zeros(RANK, VOCAB)}
    more |= {"model.embed_tokens.lora_embedding_B": torch.zeros(32, RANK)}
    save_file(load_file(copied / "adapter_model.safetensors") | more, copied / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="an adapter of linear layers alone drafts"):
        load(str(folder), "float32").method("pard", drafts=[load_draft(str(copied))])
