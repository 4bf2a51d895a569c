"""Training Gemma 4's assistant: its logits are those of transformers before and after, and more is accepted."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from training_helpers import answers, check_resume, losses, settings, target, task, trained

from command import expect_error, run_foretell, tiny_target, tiny_tokenizer
from foretell.speculator.network.draft_model import DraftNetwork
from foretell.speculator.network.mtp import AssistantNetwork
from foretell.train.data.batch import Batch
from foretell.train.data.features import compute_hidden_states
from foretell.train.loop.measure import measure
from foretell.train.loop.settings import TrainingSettings
from foretell.train.recipe.mtp import AssistantRecipe
from helpers import all_logits, random_tokens, unchecked

S, L = "sliding_attention", "full_attention"
VOCAB, WINDOW, STEPS = 260, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 5, "head_dim": 16,
    "global_head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": [S, L, S, L, L],
    "sliding_window": WINDOW, "max_position_embeddings": 256, "initializer_range": 0.15, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": VOCAB - 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "E2B": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 1},
    "31B": {
        "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
"""Shared keys and inputs of each layer, like the small models, or like the large ones."""


@cache
def peer_of(kind: str) -> tuple[Any, Path]:
    """A random model of transformers, and its folder."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SIZES, **KINDS[kind])
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.dim() == 1 and ("norm" in name or "layer_scalar" in name):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16())  # so that speculators store it as it is
    folder = Path(mkdtemp(prefix="foretell-gemma-"))
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    return model, folder


@cache
def data_of(kind: str) -> Path:
    return answers(Path(mkdtemp(prefix="foretell-answers-")), target(str(peer_of(kind)[1])))


def wanted(kind: str, out: Path, **changed: Any) -> TrainingSettings:
    options = {"layers": "3", "hidden": "48", "hard": "1"}
    values = {"recipe": "assistant", "options": options, "measure_every": 0, **changed}
    return settings(out, data_of(kind), model=str(peer_of(kind)[1]), **values)


@torch.no_grad()
def drafted(network: AssistantNetwork, kind: str, text: list[int]) -> list[torch.Tensor]:
    """Logits of all steps at all positions of a text."""
    decoder, token = target(str(peer_of(kind)[1])).checkpoint.decoder(torch.float32), torch.tensor([text])
    recipe = task(wanted(kind, Path("new"))).recipe
    assert isinstance(recipe, AssistantRecipe)
    (state,) = compute_hidden_states(decoder, token, recipe.hidden_layers)
    every = torch.ones(1, len(text) - 1, dtype=torch.bool)
    states = network(*recipe.inputs(Batch(token, F.pad(every, (1, 0)), (state,))), [every] * STEPS)
    return [network.compute_logits(each) for each in states]


@torch.no_grad()
def drafted_by_transformers(peer: Any, kind: str, text: list[int], last: int) -> list[torch.Tensor]:
    """Logits of all steps after the text up to token `last`."""
    model, out = peer_of(kind)[0], list[torch.Tensor]()
    read = model.model(torch.tensor([text[:last]]), return_shared_kv_states=True)
    shared = {kind: tuple(part[:, :, -(WINDOW - 1) if kind == S else 0 :] for part in parts)
              for kind, parts in read.shared_kv_states.items()}  # fmt: skip
    state, position = read.last_hidden_state[:, -1:], torch.tensor([[last]])
    for token in text[last : last + STEPS]:
        inputs = torch.cat((model.get_input_embeddings()(torch.tensor([[token]])), state), -1)
        found = peer(inputs_embeds=inputs, position_ids=position, shared_kv_states=shared)
        state = found.last_hidden_state
        out.append(found.logits[0, -1])
    return out


def check_written(folder: Path, kind: str) -> None:
    """Export a trained assistant, and compare what transformers reads with the network that is trained on."""
    out, model = folder.parent / f"{folder.name}-hf", target(str(peer_of(kind)[1]))
    command = ("export", folder, "--format", "hf", "--out", out, "--model", peer_of(kind)[1], "--dtype", "float32")
    said = run_foretell(*command)
    assert said.exit_code == 0, said.output
    peer, report = transformers.Gemma4AssistantForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    network, text = model.speculator(str(folder)), random_tokens(20, VOCAB, seed=7)
    assert isinstance(network, AssistantNetwork)
    ours = drafted(network, kind, text)
    for last in (1, WINDOW - 2, 16):
        for mine, theirs in zip(ours, drafted_by_transformers(peer.eval(), kind, text, last), strict=True):
            torch.testing.assert_close(mine[last - 1], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_more_is_accepted_after_training_and_transformers_reads_both(kind: str, tmp_path: Path) -> None:
    new = task(wanted(kind, tmp_path)).recipe
    new.save(tmp_path / "new")
    check_written(tmp_path / "new", kind)
    done = trained(wanted(kind, tmp_path / "out", steps=60, lr=5e-3))
    check_written(tmp_path / "out", kind)
    found, job = losses(done), done.job
    assert sum(found[-5:]) < 0.3 * sum(found[:5])
    prompts = [document.tokens[: document.start].tolist() for document in job.data[0]]
    with unchecked():
        before, after = (
            measure(job.model.runner(), recipe.method(recipe.network), prompts, 24, ()) for recipe in (new, job.recipe)
        )
    assert after.tokens_per_pass > before.tokens_per_pass + 1
    command = ("generate", "Hi", "--raw", "--model", peer_of(kind)[1], "--max-new-tokens", "24", "--ignore-eos")
    drafting = ("--method", "mtp", "--draft-model")
    with unchecked():
        texts = [
            json.loads(run_foretell(*command, "--json", *more).stdout)["tokens"]
            for more in ((), (*drafting, tmp_path / "out"), (*drafting, tmp_path / "out-hf"))
        ]
    assert texts[0] == texts[1] == texts[2]


def test_a_draft_model_of_all_blocks_gives_the_logits_of_transformers_stored_or_not(tmp_path: Path) -> None:
    (peer, folder), text = peer_of("31B"), random_tokens(20, VOCAB, seed=7)
    cut = {"recipe": "draft_model", "options": {"layers": "5"}, "draft_vocab": None}
    recipe = task(wanted("31B", tmp_path, **cut)).recipe
    recipe.save(tmp_path / "cut")
    with torch.no_grad():
        expected = peer(torch.tensor([text])).logits[0].numpy()
    for network in (recipe.network, target(str(folder)).speculator(str(tmp_path / "cut"))):
        assert isinstance(network, DraftNetwork)
        assert abs(all_logits(network.to_network(), text) - expected).max() < 1e-3
    weights = tmp_path / "cut" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if not name.endswith(".scale")}, weights)
    older = target(str(folder)).speculator(str(tmp_path / "cut"))
    assert isinstance(older, DraftNetwork)
    factors = {name: t for name, t in older.state_dict().items() if name.endswith(".scale")}
    assert len(factors) == 5 and all((t == 1).all() for t in factors.values())


@pytest.mark.exhaustive
def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    check_resume(tmp_path, lambda name: wanted("E2B", tmp_path / name, steps=12, features="stream"), 5)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train assistant: an assistant of Gemma 4, and the target is llama"):
        task(settings(tmp_path, recipe="assistant", options={}, model=str(tiny_target())))
    with pytest.raises(ValueError, match=r"hidden=65: an assistant is at most as wide as its target \(64\)"):
        task(wanted("E2B", tmp_path, options={"hidden": "65"}))
    task(wanted("E2B", tmp_path)).recipe.save(tmp_path / "new")
    common = ("generate", "Hi", "--model", peer_of("E2B")[1], "--draft-model", tmp_path / "new", "--method")
    with unchecked():
        said = [expect_error(*common, method) for method in ("eagle3", "draft_model")]
    assert "of kind assistant, and this method drafts with one of kind eagle3" in said[0]
    assert "drafts with draft models, and a speculator of another kind was named" in said[1]
