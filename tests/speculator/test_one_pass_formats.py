"""Published P-EAGLE checkpoints and PARD models: what is read computes what a plain transcription of the papers
computes, what is exported reads back, and what does not fit is refused in a sentence.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import CARD, LAYER, LAYERS, D, Tensors, V, drawn, embedding_and_head, layer_shapes, matrix, put
from test_eagle_formats import attention, feed_forward, norm, spread
from test_export import KEPT, TARGET, VERIFIER, random

from command import expect_error, tiny_target
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.load import load
from foretell.speculator.export import export
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.speculator.network.pard import PardConfig, PardNetwork
from foretell.testing import letter_codec

TOKENS, MASK, DEPTH = [3, 1, 22, 0, 7, 7, 12], 21, 4


def p_eagle(library: bool = True, kept: int = 9, own: bool = True, **more: Any) -> tuple[dict[str, Any], Tensors]:
    """As the `speculators` library publishes it, or in EAGLE-3's layout: two layers over three hidden states."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 3 * D),
        "norm.weight": (D,),
        "lm_head.weight": (kept, D),
        "mask_hidden": (1, 1, 3 * D) if library else (1, 3 * D),
    }
    shapes |= {"embed_tokens.weight": (V, D)} if own else {}
    shapes |= layer_shapes("layers.0", 2 * D, ("input_layernorm", "hidden_norm", "post_attention_layernorm"), 4)
    shapes |= layer_shapes("layers.1", D, ("input_layernorm", "post_attention_layernorm"), 4)
    layer, tensors = {**LAYER, "head_dim": 4, "num_hidden_layers": 2}, drawn(shapes)
    tokens = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:kept].sort().values
    tensors["d2t"] = tokens - torch.arange(kept)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)
    config: dict[str, Any] = {"draft_vocab_size": kept, "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    if library:
        config |= {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": DEPTH}]},
            "transformer_layer_config": layer,
            "mask_token_id": MASK,
        }
    else:
        config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer, "ptd_token_id": MASK, "num_depths": DEPTH}
    return config | more, tensors


def read(folder: Path) -> PEagle:
    network = load_speculator(folder, CARD, embedding_and_head())
    assert isinstance(network, PEagle)
    return network


def predicted(network: Speculator) -> torch.Tensor:
    """Logits over the whole vocabulary at all depths of a draft after the text."""
    assert isinstance(network, PEagle)
    last = len(TOKENS) - 2
    first = torch.arange(last + 1)[None] == last
    wanted = [first, *[torch.ones(1, 1, dtype=torch.bool)] * (network.depth - 1)]
    features = [matrix(1, len(TOKENS), D, seed=30 + i) for i in range(3)]
    found: tuple[torch.Tensor, ...] = network(torch.tensor([TOKENS]), features, torch.tensor([[last]]), wanted)
    logits: torch.Tensor = network.to_target_vocab(torch.cat(found)).detach()
    return logits


def transcribed(t: Tensors, residual_is_normed: bool = False) -> torch.Tensor:
    """The same, written as in the paper: masks follow the text in one causal sequence."""
    embedding = t.get("embed_tokens.weight", embedding_and_head().embedding)
    token = [*TOKENS[1:], *[MASK] * (DEPTH - 1)]
    states = torch.cat([matrix(1, len(TOKENS), D, seed=30 + i)[0, :-1] for i in range(3)], -1)
    g = torch.cat((states, t["mask_hidden"].view(1, -1).expand(DEPTH - 1, -1))) @ t["fc.weight"].T
    normed = norm(g, t["layers.0.hidden_norm.weight"])
    both = torch.cat((norm(embedding[token], t["layers.0.input_layernorm.weight"]), normed), -1)
    x = feed_forward((normed if residual_is_normed else g) + attention(both, t, "layers.0"), t, "layers.0")
    x = x + attention(norm(x, t["layers.1.input_layernorm.weight"]), t, "layers.1")
    x = norm(feed_forward(x, t, "layers.1"), t["norm.weight"])
    return spread(x[-DEPTH:] @ t["lm_head.weight"].T, t)


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_p_eagle_drafts_as_the_paper_says(tmp_path: Path, library: bool, own: bool) -> None:
    config, tensors = p_eagle(library, own=own, norm_before_residual=True)
    network = read(put(tmp_path, config, tensors))
    assert network.hidden_layers == (1, 3, 5) and network.depth == DEPTH and (network.embedding is not None) == own
    torch.testing.assert_close(predicted(network), transcribed(tensors, True), atol=1e-5, rtol=1e-5)


def test_p_eagle_of_nvidia_has_a_prefix(tmp_path: Path) -> None:
    config, tensors = p_eagle(False, architectures=["LlamaEagle3DraftModel"], parallel_drafting=True)
    config["mask_token_id"] = config.pop("ptd_token_id")
    prefixed = {
        n if n in ("lm_head.weight", "d2t", "t2d", "mask_hidden") else f"model.{n}": t for n, t in tensors.items()
    }
    torch.testing.assert_close(predicted(read(put(tmp_path, config, prefixed))), transcribed(tensors))


@pytest.mark.parametrize("own", [False, True])
def test_exported_p_eagle_reads_back(tmp_path: Path, own: bool) -> None:
    network = read(put(tmp_path / "in", *p_eagle(own=own)))
    export(network, VERIFIER, "speculators", tmp_path / "out")
    again = read(tmp_path / "out")
    assert again.config.model_dump(exclude={"target"}) == network.config.model_dump(exclude={"target"})
    assert again.target_info.name == "owner/target" and torch.equal(predicted(again), predicted(network))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["speculators_model_type"], said["mask_token_id"]) == ("peagle", MASK)


def test_a_learned_mask_takes_the_row_of_a_token_that_is_not_drafted(tmp_path: Path) -> None:
    values = {"heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 12, "context": 64, "hidden_layers": (1, 3, 5)}
    config = PEagleConfig.model_validate({"target": CARD, "draft_vocab": len(KEPT), "depth": DEPTH, **values})
    network = random(PEagle(config, embedding_and_head()))
    export(network, VERIFIER, "speculators", tmp_path / "out")
    again = read(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mask_token_id"] == V - 1 not in KEPT
    assert again.embedding is None and torch.equal(predicted(again), predicted(network))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mask_token_id": V}, f"its mask token is {V}, and the target has {V} tokens"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS + 2]}, f"reads the layers .* has layers 0 to {LAYERS + 1}"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "fc.weight has the shape|mask_hidden has 24 numbers"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 1}]}}, "depth"),
        ({"transformer_layer_config": None}, "transformer_layer_config should describe the layers"),
        ({"speculators_model_type": "other", "architectures": []}, "known: eagle3, peagle, dflash"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    config, tensors = p_eagle()
    if "other" in changed.values():
        del tensors["mask_hidden"]
    with pytest.raises(ValueError, match=words) as error:
        read(put(tmp_path, config | changed, tensors))
    assert "\n" not in str(error.value)


def test_exported_pard_is_a_model_with_a_mask_token(tmp_path: Path) -> None:
    """Other engines read it as a language model; here it predicts what the network predicts."""
    values = {"target": CARD, "model": replace(TARGET, layers=2), "depth": 3, "mask_token": MASK}
    network = random(PardNetwork(PardConfig.model_validate(values), embedding_and_head()))
    export(network, replace(VERIFIER, codec=letter_codec(V)), "hf", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["architectures"], said["pard_token"], said["spd_type"]) == (["LlamaForCausalLM"], MASK, "pard")
    assert load(str(tmp_path / "out"), "float32").config.mask_token == MASK


def test_a_published_pard_model_drafts_several_tokens_in_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A language model with `pard_token`: lossless, and what follows the text is what masks behind it predict."""
    target = load(str(tiny_target()), "float32")
    c = target.config
    config = PardConfig.model_validate(
        {"target": {"name": "t", "hidden": c.hidden, "vocab": c.vocab, "layers": c.layers}, "model": c, "mask_token": 5}
    )
    network = PardNetwork(config, target.checkpoint.embedding_and_head())
    network.init_random()
    export(network, replace(VERIFIER, config=c, codec=target.codec), "hf", tmp_path / "out")
    method = target.method("pard", {"num_steps": 3}, drafts=[load(str(tmp_path / "out"), "float32")])
    request = Request(target.codec.encode("abc"), max_new_tokens=12)
    monkeypatch.setattr(Budget, "governs", lambda self, bound: False)  # it drafts at any cost
    engines = (Engine(target.runner(), m) for m in (method, target.method()))
    drafted, plain = (engine.complete([request])[0] for engine in engines)
    assert drafted.tokens == plain.tokens and drafted.statistics.drafted > 0 and method.lossless
    common = ("generate", "abc", "--model", tiny_target(), "--dtype", "float32")
    ordinary = expect_error(*common, "--method", "pard", "--draft-model", tiny_target())
    assert "the draft model has no mask token (pard_token in its config.json)" in ordinary


def test_pard_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "pard_token": V}
    put(tmp_path, config, {"a": torch.zeros(1)})
    assert f"pard_token is {V}, and its vocabulary has {V} tokens" in expect_error("generate", "a", "--model", tmp_path)
