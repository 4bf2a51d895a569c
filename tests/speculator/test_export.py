"""What is exported reads back with the same logits, says what other loaders want, and is there whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import CARD, LAYERS, D, V, embedding_and_head, matrix
from safetensors.torch import load_file

from foretell.load import load
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig, RopeConfig
from foretell.speculator import export as room
from foretell.speculator.export import export
from foretell.speculator.formats.base import ExportFormat, Verifier
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.blockwise import Blockwise, BlockwiseConfig
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig, EagleNetwork
from foretell.speculator.network.layer import TrainingTimeTestAttention
from foretell.speculator.network.medusa import Medusa, MedusaConfig
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.testing import letter_codec
from helpers import all_logits

TARGET = ModelConfig("llama", vocab=V, hidden=D, layers=LAYERS, heads=2, kv_heads=1, head_dim=4, ffn=12, context=64)
VERIFIER = Verifier("owner/target", TARGET)
KEPT = torch.tensor([1, 4, 5, 9, 20])
H = matrix(3, D, seed=9)


def random(network: Speculator, tokens: torch.Tensor | None = KEPT) -> Speculator:
    """With weights as after training, biases of heads apart."""
    if network.token_of is not None and tokens is not None:
        network.set_draft_vocab(tokens)
    for i, parameter in enumerate(network.parameters()):
        parameter.data = matrix(*parameter.shape, seed=200 + i)
    return network


def eagle3(**more: Any) -> Eagle3:
    sizes: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "ffn": 12,
        "context": 64,
        "hidden_layers": (1, 3, 5),
    }
    values, lent = sizes | {"target": CARD, "draft_vocab": len(KEPT)} | more, embedding_and_head()
    masked = values.get("kind") == "p_eagle"
    network = random(PEagle(PEagleConfig(**values), lent) if masked else Eagle3(EagleConfig(**values), lent))
    assert isinstance(network, Eagle3)
    return network


def back(network: Speculator, format_name: str, out: Path, lent: EmbeddingAndHead | None = None) -> Speculator:
    export(network, VERIFIER, format_name, out)
    assert not [p for p in out.parent.iterdir() if p != out], "nothing is left beside it"
    found = load_speculator(out, CARD, lent or embedding_and_head())
    assert (
        found.kind == network.kind
        and found.target_info.name == "owner/target"
        and found.hidden_layers == network.hidden_layers
    )
    return found


def eagle_logits(network: Speculator) -> torch.Tensor:
    """Of two steps over a text."""
    assert isinstance(network, EagleNetwork)
    token = torch.tensor([[3, 1, 22, 0, 7]])
    features = torch.cat([matrix(1, 4, D, seed=30 + i) for i in range(len(network.hidden_layers))], -1)
    g, sight, out = network.fuse(features), TrainingTimeTestAttention(), []
    for i, text in enumerate((token[:, 1:], torch.tensor([[2, 2, 2, 2]]))):
        g = network.forward_layers(text, g, torch.arange(4)[None] + i, sight)
        out.append(network.to_target_vocab(network.compute_logits(network.head_input(g))))
    return torch.stack(out)


@pytest.mark.parametrize("format_name", ["speculators", "eagle3"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"draft_vocab": None, "own_head": True},
        {"own_head": True, "own_embedding": True, "norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True, "hidden_layers": (2, 6)},
        {
            "fc_norm": True,
            "qk_norm": True,
            "rope": RopeConfig(theta=700.0, kind="llama3", factor=4.0, original_context=16),
        },
    ],
)
def test_eagle3(tmp_path: Path, format_name: str, more: dict[str, Any]) -> None:
    network = eagle3(**more)
    found = back(network, format_name, tmp_path / "out")
    assert torch.equal(eagle_logits(found), eagle_logits(network))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"} <= set(said)


def test_eagle3_of_a_target_that_scales_its_embedding_takes_it_along(tmp_path: Path) -> None:
    lent = EmbeddingAndHead(embedding_and_head().embedding, embedding_and_head().head, embedding_scale=2.0)
    network = random(Eagle3(eagle3().config, lent))
    found = back(network, "speculators", tmp_path / "out", lent)
    assert "embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(eagle_logits(found), eagle_logits(network))


def test_the_documented_schema_of_speculators(tmp_path: Path) -> None:
    network = eagle3()
    export(network, VERIFIER, "speculators", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["architectures"] == ["Eagle3Speculator"] and said["speculators_model_type"] == "eagle3"
    assert "model_type" not in said and said["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    about = said["speculators_config"]
    assert about["default_proposal_method"] in [m["proposal_type"] for m in about["proposal_methods"]]
    assert about["proposal_methods"][0]["speculative_tokens"] >= 1
    assert about["verifier"] == {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    layer, kept = said["transformer_layer_config"], len(KEPT)
    assert layer["vocab_size"] == V and said["draft_vocab_size"] == kept
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        "fc.weight": (D, 3 * D),
        "layers.0.input_layernorm.weight": (D,),
        "layers.0.hidden_norm.weight": (D,),
        "layers.0.post_attention_layernorm.weight": (D,),
        "layers.0.self_attn.q_proj.weight": (16, 2 * D),
        "layers.0.self_attn.k_proj.weight": (8, 2 * D),
        "layers.0.self_attn.v_proj.weight": (8, 2 * D),
        "layers.0.self_attn.o_proj.weight": (D, 16),
        "layers.0.mlp.gate_proj.weight": (12, D),
        "layers.0.mlp.up_proj.weight": (12, D),
        "layers.0.mlp.down_proj.weight": (D, 12),
        "norm.weight": (D,),
        "lm_head.weight": (kept, D),
        "d2t": (kept,),
        "t2d": (V,),
    }
    assert tensors["d2t"].dtype == torch.int64 and torch.equal(tensors["d2t"] + torch.arange(kept), KEPT)
    assert tensors["t2d"].dtype == torch.bool and torch.equal(tensors["t2d"].nonzero()[:, 0], KEPT)


def test_the_classes_of_speculators_accept_it(tmp_path: Path) -> None:
    library = pytest.importorskip("speculators")
    export(eagle3(own_embedding=True), VERIFIER, "speculators", tmp_path / "out")
    config = library.SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    assert type(config).__name__ == "Eagle3SpeculatorConfig" and config.target_vocab_size == V
    model = library.Eagle3DraftModel(config)
    missing, surplus = model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    assert not surplus and all("verifier" in name for name in missing)


def test_the_raw_layout_of_eagle3(tmp_path: Path) -> None:
    export(eagle3(draft_vocab=None), VERIFIER, "eagle3", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLMEagle3"] and said["draft_vocab_size"] == V
    assert said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "midlayer.hidden_norm.weight" in tensors and not tensors["d2t"].any() and tensors["t2d"].all()


@pytest.mark.parametrize(
    ("kind", "format_name"), [(Eagle3, "speculators"), (Eagle3, "eagle3"), (PEagle, "speculators")]
)
def test_the_state_after_the_final_norm_is_read_before_it(tmp_path: Path, kind: type[Eagle3], format_name: str) -> None:
    """For the norms that RMS norms have: states of one length, where the conversion loses nothing but rounding."""
    network = eagle3(fc_norm=True, hidden_layers=(1, LAYERS + 1), **({} if kind is Eagle3 else {"kind": "p_eagle"}))
    assert type(network) is kind
    for norm in network.fc_norm or ():
        norm.get_parameter("weight").data.abs_()
    before = [torch.nn.functional.rms_norm(matrix(40, D, seed=60 + i), (D,)) for i in range(2)]
    final = matrix(D, seed=70).sign()
    known = {1: before[0], LAYERS: 3 * before[1], LAYERS + 1: before[1] * final}
    verifier = replace(VERIFIER, states=lambda layers: [known[t] for t in layers])
    export(network, verifier, format_name, tmp_path / "out")
    assert network.hidden_layers == (1, LAYERS + 1), "it is left as it was"
    again = load_speculator(tmp_path / "out", CARD, embedding_and_head())
    assert isinstance(again, Eagle3) and again.hidden_layers == (1, LAYERS)
    ours, theirs = (n.fuse(torch.cat([known[t] for t in n.hidden_layers], -1)) for n in (network, again))
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    if isinstance(network, PEagle) and isinstance(again, PEagle):
        ours, theirs = (n.fuse(n.mask_states) for n in (network, again))
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    unlike = replace(VERIFIER, states=lambda layers: [matrix(40, D, seed=t) for t in layers])
    with pytest.raises(ValueError, match="which is no RMS norm"):
        export(network, unlike, format_name, tmp_path / "other")


def test_vllm_finds_what_it_reads_beside_the_layers(tmp_path: Path) -> None:
    """vLLM builds its configuration from that of the layers, and adds some keys of the library, not these."""
    export(
        eagle3(fc_norm=True, norm_output=True, hidden_layers=(1, 3, 5, 6)), VERIFIER, "speculators", tmp_path / "out"
    )
    layer = json.loads((tmp_path / "out" / "config.json").read_text())["transformer_layer_config"]
    assert (layer["num_aux_hidden_states"], layer["fc_norm"], layer["norm_output"]) == (4, True, True)
    export(eagle3(hidden_layers=(1, 5)), VERIFIER, "eagle3", tmp_path / "flat")
    assert json.loads((tmp_path / "flat" / "config.json").read_text())["num_aux_hidden_states"] == 2


def test_eagle1(tmp_path: Path) -> None:
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 12, "context": 64}
    network = random(Eagle1(EagleConfig(kind="eagle", target=CARD, **sizes), embedding_and_head()))
    assert torch.equal(eagle_logits(back(network, "eagle", tmp_path / "out")), eagle_logits(network))


def test_eagle1_of_a_reduced_vocabulary_drafts_all_tokens_elsewhere(tmp_path: Path) -> None:
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 12, "context": 64, "draft_vocab": len(KEPT)}
    network = random(Eagle1(EagleConfig(kind="eagle", target=CARD, **sizes), embedding_and_head()))
    found = back(network, "eagle", tmp_path / "out")
    assert found.token_of is None
    torch.testing.assert_close(eagle_logits(found)[..., KEPT], eagle_logits(network)[..., KEPT])


@pytest.mark.parametrize("kept", [None, len(KEPT)])
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_medusa(tmp_path: Path, kept: int | None, own_head: bool, blocks: int, biased: bool) -> None:
    network = random(
        Medusa(
            MedusaConfig(target=CARD, heads=3, blocks=blocks, draft_vocab=kept, own_head=own_head), embedding_and_head()
        )
    )
    for name, parameter in network.named_parameters():
        if name.endswith("bias") and not biased:
            parameter.data.zero_()
    again = back(network, "vllm-medusa", tmp_path / "out")
    drafted = slice(None) if network.token_of is None else network.token_of
    torch.testing.assert_close(again(H)[..., drafted], network(H))
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["truncated_vocab_size"] == V and said["medusa_fc_bias"] == biased
    assert said["original_lm_head"] != own_head
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    # vLLM's loader takes no matrix of a reduced vocabulary: it gets all rows.
    assert {len(t) for n, t in tensors.items() if n.startswith("lm_head")} == {V} and "token_map" not in tensors
    assert any("bias" in n for n in tensors) == biased


@pytest.mark.parametrize("kept", [None, len(KEPT)])
@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculator_with_whole_matrices(tmp_path: Path, kept: int | None, tied: bool) -> None:
    config = MLPSpeculatorConfig(target=CARD, stages=3, inner=6, tied=tied, scale_input=True, draft_vocab=kept)
    network = random(MLPSpeculator(config, embedding_and_head()))
    found = back(network, "vllm-mlp", tmp_path / "out")
    tokens = torch.tensor([[3, 0, 22], [1, 2, 3], [5, 5, 5]])
    for mine, theirs in zip(mlp_logits(network, tokens), mlp_logits(found, tokens), strict=True):
        drafted = slice(None) if network.token_of is None else network.token_of
        torch.testing.assert_close(theirs[:, drafted], mine, rtol=1e-4, atol=1e-4)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["model_type"] == "mlp_speculator" and len(said["top_k_tokens_per_head"]) == said["n_predict"] == 3


def mlp_logits(network: Speculator, tokens: torch.Tensor) -> list[torch.Tensor]:
    assert isinstance(network, MLPSpeculator)
    judge = network.head_logits
    out: list[torch.Tensor] = network([H], tokens, lambda readings: [judge(r, i) for i, r in enumerate(readings)])
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_draft_models_become_ordinary_models(tmp_path: Path, tied: bool) -> None:
    rope = RopeConfig(theta=700.0, kind="llama3", factor=4.0, original_context=16)
    model = replace(TARGET, layers=2, rope=rope)
    lent = EmbeddingAndHead(
        embedding_and_head().embedding, embedding_and_head().embedding if tied else embedding_and_head().head
    )
    network = random(DraftNetwork(DraftModelConfig(target=CARD, model=model, draft_vocab=len(KEPT)), lent))
    assert isinstance(network, DraftNetwork)
    codec = letter_codec(V)
    export(network, replace(VERIFIER, codec=codec), "hf", tmp_path / "out")

    tokens = [3, 1, 22, 0, 7]
    wanted = (network.hidden_states(torch.tensor([tokens])) @ lent.head.T)[0].detach()
    drafted = network.compute_logits(network.hidden_states(torch.tensor([tokens])))[0].detach()
    torch.testing.assert_close(wanted[:, KEPT], drafted)
    mine = load(str(tmp_path / "out"), "float32")
    assert mine.config.tied == tied and mine.codec.encode("abc") == codec.encode("abc")
    torch.testing.assert_close(torch.tensor(all_logits(mine.network, tokens)).float(), wanted, rtol=1e-4, atol=1e-4)


def test_a_network_that_is_no_llama_model_is_refused(tmp_path: Path) -> None:
    model = replace(TARGET, layers=2, window=8, window_layers=(0,))
    network = DraftNetwork(DraftModelConfig(target=CARD, model=model), embedding_and_head())
    with pytest.raises(ValueError, match=r"only networks of the Llama architecture .* a sliding window"):
        export(network, VERIFIER, "hf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unsupported_formats_name_the_supported_ones(tmp_path: Path) -> None:
    medusa = Medusa(MedusaConfig(target=CARD), embedding_and_head())
    with pytest.raises(
        ValueError,
        match=r"is for speculators of kind eagle3 or p_eagle or dflash or mtp, .* kind medusa; .* kind: vllm-medusa",
    ):
        export(medusa, VERIFIER, "speculators", tmp_path / "out")
    with pytest.raises(ValueError, match="formats for that kind: none"):
        export(Blockwise(BlockwiseConfig(target=CARD), embedding_and_head()), VERIFIER, "vllm-medusa", tmp_path / "out")
    with pytest.raises(ValueError, match="unknown format 'speculator': did you mean 'speculators'"):
        export(medusa, VERIFIER, "speculator", tmp_path / "out")
    for more, what in (
        ({"qkv_bias": True}, "biases of queries"),
        ({"hidden_layers": (2, LAYERS + 1)}, "after its final norm"),
        ({"rope": RopeConfig(fraction=0.5)}, "a part of the head"),
    ):
        with pytest.raises(ValueError, match=f"ha(s|ve) no place for .*{what}"):
            export(eagle3(**more), VERIFIER, "speculators", tmp_path / "out")
    with pytest.raises(ValueError, match="one layer, and this speculator has 2"):
        export(eagle3(layers=2), VERIFIER, "eagle3", tmp_path / "out")
    bounded = EmbeddingAndHead(embedding_and_head().embedding, embedding_and_head().head, softcap=30.0)
    with pytest.raises(ValueError, match="no place for a bound on the logits"):
        export(Medusa(MedusaConfig(target=CARD), bounded), VERIFIER, "vllm-medusa", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def write(network: Speculator, verifier: Verifier, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(room, "EXPORTS", (ExportFormat("broken", "medusa", write),))
    empty = tmp_path / "empty"
    empty.mkdir()
    for out in (tmp_path / "new", empty):
        with pytest.raises(type(error)):
            export(Medusa(MedusaConfig(target=CARD), embedding_and_head()), VERIFIER, "broken", out)
    assert list(tmp_path.rglob("*")) == [empty]


def test_places_that_are_taken_are_refused(tmp_path: Path) -> None:
    medusa = Medusa(MedusaConfig(target=CARD), embedding_and_head())
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match="there is something already; name a directory that is new or empty"):
            export(medusa, VERIFIER, "vllm-medusa", out)
    (tmp_path / "empty").mkdir()
    export(medusa, VERIFIER, "vllm-medusa", tmp_path / "empty")
    export(medusa, VERIFIER, "vllm-medusa", tmp_path / "deep" / "new")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "empty").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], "readable by whom the umask lets read"
    assert (tmp_path / "notes.txt").read_text() == "mine"
