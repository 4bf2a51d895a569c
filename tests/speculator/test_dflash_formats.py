"""Published DFlash and DSpark checkpoints: what is read computes what a plain transcription of the paper computes, what
is exported reads back, and what does not fit is refused in a sentence.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published import CARD, LAYER, LAYERS, D, Tensors, V, drawn, embedding_and_head, layer_shapes, matrix, put
from test_eagle_formats import feed_forward, norm
from test_export import VERIFIER

from foretell.speculator.export import export
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.dflash import DFlash

TOKENS, ANCHOR, SIZE, MASK = [3, 1, 22, 0, 7, 7, 12], 4, 4, 20


def dflash(dspark: bool = False, library: bool = False, **more: Any) -> tuple[dict[str, Any], Tensors]:
    """As the authors publish it, or the `speculators` library: two layers of Qwen 3."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(2):
        at = f"layers.{i}"
        shapes |= layer_shapes(at, D, ("input_layernorm", "post_attention_layernorm"), 4)
        shapes |= {f"{at}.self_attn.{n}_norm.weight": (4,) for n in "qk"}
    if dspark:
        shapes |= {f"markov_head.markov_w{i}.weight": (V, 3) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, D + 3), "confidence_head.proj.bias": (1,)}
    layer = {**LAYER, "model_type": "qwen3", "head_dim": 4, "num_hidden_layers": 2}
    if library:
        config: dict[str, Any] = {
            "speculators_model_type": "dspark" if dspark else "dflash",
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": [2, 3],
            "mask_token_id": MASK,
            "block_size": SIZE,
        }
    else:
        config = {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            **layer,
            "block_size": SIZE,
            "num_target_layers": LAYERS,
            "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": MASK},
        }
    return config | more, drawn(shapes)


def load(folder: Path) -> DFlash:
    network = load_speculator(folder, CARD, embedding_and_head())
    assert isinstance(network, DFlash)
    return network


def predicted(network: Speculator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits over the whole vocabulary at all places of the block, and of the confidence head."""
    assert isinstance(network, DFlash)
    features = [matrix(1, len(TOKENS), D, seed=30 + i) for i in range(2)]
    wanted = torch.ones(1, 1, network.depth, dtype=torch.bool)
    found = network(torch.tensor([TOKENS]), features, torch.tensor([[ANCHOR]]), wanted)
    confidence = None if found.confidence is None else found.confidence.detach()
    return network.to_target_vocab(found.logits).detach(), confidence


def transcribed(t: Tensors, dspark: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, written as in the paper."""
    lent = embedding_and_head()
    states = torch.cat([matrix(1, len(TOKENS), D, seed=30 + i)[0, :ANCHOR] for i in range(2)], -1)
    c = norm(states @ t["fc.weight"].T, t["hidden_norm.weight"])
    x = lent.embedding[[TOKENS[ANCHOR], *[MASK] * (SIZE - 1)]]
    for i in range(2):
        at = f"layers.{i}"
        x = x + block_attention(c, norm(x, t[f"{at}.input_layernorm.weight"]), t, at)
        x = feed_forward(x, t, at)
    h = norm(x, t["norm.weight"])[0 if dspark else 1 :]
    logits = h @ lent.head.T
    if not dspark:
        return logits, None
    before = t["markov_head.markov_w1.weight"][[*TOKENS[ANCHOR:], 0]]
    confidence = F.linear(torch.cat((h, before), -1), t["confidence_head.proj.weight"], t["confidence_head.proj.bias"])
    return logits + before @ t["markov_head.markov_w2.weight"].T, confidence[:, 0]


def block_attention(c: torch.Tensor, x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    def project(n: str, y: torch.Tensor, first: int) -> torch.Tensor:
        heads = (y @ t[f"{at}.self_attn.{n}_proj.weight"].T).view(len(y), -1, 4)
        if n == "v":
            return heads
        heads = norm(heads, t[f"{at}.self_attn.{n}_norm.weight"])
        angle = (first + torch.arange(len(y)))[:, None] * 500.0 ** (-torch.arange(2) / 2)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((heads[..., :2] * cos - heads[..., 2:] * sin, heads[..., 2:] * cos + heads[..., :2] * sin), -1)

    q = project("q", x, ANCHOR)
    k, v = (torch.cat((project(n, c, 0), project(n, x, ANCHOR))).repeat_interleave(2, 1) for n in "kv")
    weight = (torch.einsum("ihe,jhe->hij", q, k) / 2).softmax(-1)
    return torch.einsum("hij,jhe->ihe", weight, v).flatten(1) @ t[f"{at}.self_attn.o_proj.weight"].T


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("dspark", [False, True])
def test_what_is_read_drafts_as_the_paper_says(tmp_path: Path, dspark: bool, library: bool) -> None:
    config, tensors = dflash(dspark, library)
    network = load(put(tmp_path, config, tensors))
    assert network.hidden_layers == (2, 3) and network.depth == SIZE - (not dspark)
    for found, expected in zip(predicted(network), transcribed(tensors, dspark), strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dspark", [False, True])
def test_what_is_exported_reads_back(tmp_path: Path, dspark: bool) -> None:
    network = load(put(tmp_path / "in", *dflash(dspark)))
    export(network, VERIFIER, "dflash", tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.config.model_dump(exclude={"target"}) == network.config.model_dump(exclude={"target"})
    for one, other in zip(predicted(network), predicted(again), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]
    own = json.loads((tmp_path / "out" / "config.json").read_text())["dflash_config"]
    assert own == {"mask_token_id": MASK, "target_layer_ids": [1, 2]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fc_norm": True}, "no place for norms of the fused states"),
        ({"qk_norm": False}, "no place for layers without norms of queries and keys"),
        ({"convolution": True}, "no place for a convolution over slots"),
        ({"markov_rank": 2}, "set predicts_from_anchor=true, or markov_rank=0"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = load(put(tmp_path / "in", *dflash())).config.model_copy(update=changed)
    with pytest.raises(ValueError, match=words):
        export(DFlash(config, embedding_and_head()), VERIFIER, "dflash", tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_target_layers": 36}, f"reads a target of 36 layers .*, and this one has {LAYERS}"),
        ({"dflash_config": {"target_layer_ids": [1, 33], "mask_token_id": 2}}, r"reads the layers \[2, 34\] of its"),
        ({"dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": V}}, f"mask token is {V}, and the target has"),
        ({"dflash_config": {"target_layer_ids": [1, 2]}}, "mask_token_id"),
        ({"block_size": 1}, "block_size"),
        ({"hidden_size": 16}, "was trained for another model|should"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    config, tensors = dflash()
    with pytest.raises(ValueError, match=words) as error:
        load(put(tmp_path, config | changed, tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dspark", [False, True])
def test_the_library_says_whether_the_anchor_predicts(dspark: bool, tmp_path: Path) -> None:
    network = load(put(tmp_path, *dflash(dspark, library=True, sample_from_anchor=not dspark)))
    assert network.config.predicts_from_anchor is not dspark and network.depth == SIZE - dspark


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({"use_swa": True, "swa_window_size": 512}, "use_swa"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"selector_rank": 256, "selector_top_k": 16}, "selector_rank"),
        ({"conv_kernel_size": 2, "conv_group_size": 16}, "conv_kernel_size"),
        ({"output_multiplier": 0.2}, "output_multiplier"),
        ({"final_logit_softcapping": 20.0}, "final_logit_softcapping"),
        ({"input_embedding_scale": 8.0}, "input_embedding_scale"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"shift_label": True}, "shift_label"),
    ],
)
def test_options_that_would_draft_otherwise_are_refused_by_name(own: dict[str, Any], key: str, tmp_path: Path) -> None:
    config, tensors = dflash()
    inside = {**config["dflash_config"], **own}
    for i, changed in enumerate((config | {"dflash_config": inside}, config | own)):
        with pytest.raises(ValueError, match=f"{key} should be .*: nothing else is supported for DFlash here, found"):
            load(put(tmp_path / str(i), changed, tensors))


def test_options_at_their_plain_values_are_read(tmp_path: Path) -> None:
    config, tensors = dflash(is_causal=False, final_logit_softcapping=None, layer_types=["full_attention"] * 2)
    load(put(tmp_path, config, tensors))


def test_dspark_as_specforge_writes_it(tmp_path: Path) -> None:
    """Its heads are described beside the layers that it reads."""
    config, tensors = dflash(True)
    heads = {"projector_type": "dspark", "markov_rank": 3, "markov_head_type": "vanilla", "confidence_head_alpha": 1.0}
    heads |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    own = {"architectures": ["DSparkDraftModel"], "dflash_config": config["dflash_config"] | heads}
    network = load(put(tmp_path / "whole", config | own, tensors))
    torch.testing.assert_close(predicted(network)[0], transcribed(tensors, True)[0], atol=1e-5, rtol=1e-5)
    own["dflash_config"]["markov_head_type"] = "rnn"
    with pytest.raises(ValueError, match="markov_head_type should be vanilla"):
        load(put(tmp_path / "rnn", config | own, tensors))


@pytest.mark.parametrize("key", ["is_causal", "causal", "causal_head"])
def test_causal_blocks_in_some_layers_without_a_window_are_refused(key: str, tmp_path: Path) -> None:
    """A flag for all layers, of which one has a window."""
    types: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    types |= {"use_sliding_window": True}
    assert load(put(tmp_path / "without", *dflash(**types))).config.window_causal
    with pytest.raises(ValueError, match=f"{key} should be False"):
        load(put(tmp_path / "with", *dflash(**(types | {key: True}))))


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    config, tensors = dflash()
    inside = {"dflash_config": config["dflash_config"] | {"attention_value_scale": 0.7}}
    for i, changed in enumerate((inside, {"attention_value_scale": 0.7})):
        with pytest.raises(ValueError, match=r"attention_value_scale should be left out: .*, found 0.7"):
            load(put(tmp_path / str(i), config | changed, tensors))


def test_a_confidence_head_without_markov_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="confidence_head_with_markov should be True"):
        load(put(tmp_path, *dflash(True, confidence_head_with_markov=False)))


def test_another_markov_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="markov_head_type should be vanilla: nothing else is supported"):
        load(put(tmp_path, *dflash(True, markov_head_type="gated")))
