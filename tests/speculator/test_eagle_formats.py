"""Published EAGLE layers: read whatever their layout, computing what a plain transcription of the papers computes; and
what is refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from published import CARD, LAYER, D, Tensors, V, eagle1, eagle3, embedding_and_head, matrix, put, speculators_eagle3

from foretell.speculator.load import is_speculator, load_speculator
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleNetwork
from foretell.speculator.network.layer import TrainingTimeTestAttention

TOKENS = torch.tensor([[3, 1, 22, 0, 7, 7, 12]])
S = TOKENS.shape[1] - 1


def load(folder: Path, seed: int = 0) -> EagleNetwork:
    assert is_speculator(folder)
    network = load_speculator(folder, CARD, embedding_and_head(seed))
    assert isinstance(network, EagleNetwork)
    return network


def features(count: int) -> list[torch.Tensor]:
    return [matrix(1, S + 1, D, seed=30 + i) for i in range(count)]


def guesses(network: EagleNetwork, steps: int = 2) -> list[torch.Tensor]:
    """Logits over the whole vocabulary after every position, and one step of its own later."""
    g = network.fuse(torch.cat(features(len(network.hidden_layers)), -1)[:, :-1])
    position, sight, out = torch.arange(S)[None], TrainingTimeTestAttention(), []
    for i in range(steps):
        g = network.forward_layers(F.pad(TOKENS[:, 1 + i :], (0, i)), g, position + i, sight)
        out.append(network.to_target_vocab(network.compute_logits(network.head_input(g)))[0].detach())
    return out


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def attention(x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    """Causal attention of [s, i] with four heads on two, rotary at 0, 1, 2..."""

    def project(n: str, heads: int) -> torch.Tensor:
        flat = F.linear(x, t[f"{at}.self_attn.{n}_proj.weight"], t.get(f"{at}.self_attn.{n}_proj.bias"))
        return flat.view(len(x), heads, -1)

    def turn(y: torch.Tensor) -> torch.Tensor:
        half = y.shape[-1] // 2
        angle = torch.arange(len(y))[:, None] * 500.0 ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat((y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin), -1)

    q, k, v = (
        project("q", 4),
        project("k", 2),
        project("v", 2),
    )
    q, k, v = turn(q), turn(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    score = torch.einsum("ihe,jhe->hij", q, k) / q.shape[-1] ** 0.5
    weight = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf")).softmax(-1)
    return torch.einsum("hij,jhe->ihe", weight, v).flatten(1) @ t[f"{at}.self_attn.o_proj.weight"].T


def feed_forward(x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    y = norm(x, t[f"{at}.post_attention_layernorm.weight"])
    gated = F.silu(y @ t[f"{at}.mlp.gate_proj.weight"].T) * (y @ t[f"{at}.mlp.up_proj.weight"].T)
    return x + gated @ t[f"{at}.mlp.down_proj.weight"].T


def plain_eagle1(t: Tensors, embedding: torch.Tensor, head: torch.Tensor, layers: int) -> torch.Tensor:
    x = torch.cat((embedding[TOKENS[0, 1:]], features(1)[0][0, :-1]), -1)
    x = F.linear(x, t["fc.weight"], t.get("fc.bias"))
    for i in range(layers):
        at = f"layers.{i}"
        seen = norm(x, t[f"{at}.input_layernorm.weight"]) if i else x
        x = feed_forward(x + attention(seen, t, at), t, at)
    return x @ head.T


def plain_eagle3(t: Tensors, at: str, embedding: torch.Tensor, flags: dict[str, Any], count: int) -> torch.Tensor:
    """Scores over the draft vocabulary."""
    parts = [f[0, :-1] for f in features(count)]
    if flags.get("fc_norm"):
        parts = [norm(p, t[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)]
    x = torch.cat(parts, -1)
    x = norm(x, t["input_norm.weight"]) if flags.get("norm_before_fc") else x
    g = x @ t["fc.weight"].T
    normed = norm(g, t[f"{at}.hidden_norm.weight"])
    both = torch.cat((norm(embedding[TOKENS[0, 1:]], t[f"{at}.input_layernorm.weight"]), normed), -1)
    x = feed_forward((normed if flags.get("norm_before_residual") else g) + attention(both, t, at), t, at)
    return norm(x, t["norm.weight"]) @ t["lm_head.weight"].T


def spread(logits: torch.Tensor, t: Tensors) -> torch.Tensor:
    if "d2t" not in t:
        return logits
    out = torch.full((len(logits), V), float("-inf"))
    out[:, torch.arange(len(t["d2t"])) + t["d2t"]] = logits
    return out


@pytest.mark.parametrize(("bias", "biased_qkv", "layers"), [(True, False, 1), (False, True, 1), (True, False, 2)])
def test_eagle1(tmp_path: Path, bias: bool, biased_qkv: bool, layers: int) -> None:
    config, tensors = eagle1(bias, biased_qkv, layers)
    network = load(put(tmp_path, config, tensors))
    assert isinstance(network, Eagle1) and network.embedding is None and network.hidden_layers == (CARD.layers + 1,)
    wanted = plain_eagle1(tensors, embedding_and_head().embedding, embedding_and_head().head, layers)
    torch.testing.assert_close(guesses(network)[0], wanted)


def test_eagle1_of_vllm_and_an_embedding_of_its_own(tmp_path: Path) -> None:
    config, tensors = eagle1()
    config |= {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": dict(LAYER)}
    network = load(put(tmp_path, config, {f"model.{n}": t for n, t in tensors.items()}), seed=50)
    assert network.embedding is not None
    wanted = plain_eagle1(tensors, tensors["embed_tokens.weight"], embedding_and_head(50).head, 1)
    torch.testing.assert_close(guesses(network)[0], wanted)


@pytest.mark.parametrize("kept", [9, V])
@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("head_dim", [2, 4])
def test_eagle3(tmp_path: Path, kept: int, layer: str, head_dim: int) -> None:
    config, tensors = eagle3(kept, head_dim, layer)
    network = load(put(tmp_path, config, tensors))
    assert (
        isinstance(network, Eagle3) and network.hidden_layers == (2, 3, 3) and (network.token_of is None) == (kept == V)
    )
    torch.testing.assert_close(
        guesses(network)[0], spread(plain_eagle3(tensors, layer, embedding_and_head().embedding, {}, 3), tensors)
    )


def test_eagle3_with_taps_counted_from_outputs_and_an_embedding_of_its_own(tmp_path: Path) -> None:
    config, tensors = eagle3(aux=2)
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 4]}
    tensors["embed_tokens.weight"] = matrix(V, D, seed=80)
    network = load(put(tmp_path, config, tensors))
    assert network.hidden_layers == (1, 5) and network.embedding is not None
    wanted = spread(plain_eagle3(tensors, "midlayer", tensors["embed_tokens.weight"], {}, 2), tensors)
    torch.testing.assert_close(guesses(network)[0], wanted)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_residual": False, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6]},
        {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [5]},
    ],
)
def test_speculators(tmp_path: Path, flags: dict[str, Any]) -> None:
    config, tensors = speculators_eagle3(**flags)
    network = load(put(tmp_path, config, tensors))
    hidden_layers = tuple(flags.get("eagle_aux_hidden_state_layer_ids", (2, 3, 3)))
    assert (
        isinstance(network, Eagle3)
        and network.hidden_layers == hidden_layers
        and network.target_info.name == "Qwen/Qwen3-8B"
    )
    wanted = plain_eagle3(tensors, "layers.0", embedding_and_head().embedding, flags, len(hidden_layers))
    torch.testing.assert_close(guesses(network)[0], spread(wanted, tensors))


def test_norm_output_feeds_the_normed_state_back(tmp_path: Path) -> None:
    config, tensors = speculators_eagle3(norm_output=True)
    normed = guesses(load(put(tmp_path / "a", config, tensors)))
    plain = guesses(load(put(tmp_path / "b", config | {"norm_output": False}, tensors)))
    torch.testing.assert_close(normed[0], plain[0])
    assert not torch.allclose(normed[1], plain[1])


def test_specforge_calls_plain_eagle3_a_normed_output(tmp_path: Path) -> None:
    """Its releases up to 0.2.0: the head reads normed states, and those that are fed back are not."""
    config, tensors = eagle3()
    plain = guesses(load(put(tmp_path / "plain", config, tensors)))
    of_specforge = guesses(load(put(tmp_path / "flag", config | {"norm_output": True}, tensors)))
    assert all(torch.equal(one, other) for one, other in zip(plain, of_specforge, strict=True))
    others: tuple[dict[str, Any], ...] = {"norm_before_residual": False}, {"architectures": ["LlamaEagle3DraftModel"]}
    for i, other in enumerate(others):
        network = load(put(tmp_path / str(i), config | {"norm_output": True} | other, tensors))
        assert network.config.norm_output, "as vLLM and other trainers say it"


def test_the_norms_of_specforge(tmp_path: Path) -> None:
    config, tensors = eagle3()
    tensors |= {f"fc_norm.{i}.weight": matrix(D, seed=71 + i) for i in range(3)}
    network = load(put(tmp_path, config | {"fc_norm": True, "norm_output": True}, tensors))
    wanted = plain_eagle3(tensors, "midlayer", embedding_and_head().embedding, {"fc_norm": True}, 3)
    torch.testing.assert_close(guesses(network)[0], spread(wanted, tensors))


def test_options_of_model_optimizer_are_read_at_their_plain_values(tmp_path: Path) -> None:
    config, tensors = eagle3()
    own: dict[str, Any]
    own = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    own |= {"use_mtp_layernorm": False, "next_layer_regular": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    load(put(tmp_path / "plain", config | {"eagle_config": own}, tensors))
    for i, key in enumerate(("use_last_layernorm", "use_mtp_layernorm", "use_input_layernorm_in_first_layer")):
        with pytest.raises(
            ValueError, match=rf"eagle_config.{key} should be \w+: nothing else is supported for EAGLE-3"
        ):
            load(put(tmp_path / str(i), config | {"eagle_config": own | {key: not own[key]}}, tensors))


@pytest.mark.parametrize("make", [eagle1, eagle3])
def test_an_unknown_key_is_named(tmp_path: Path, make: Any) -> None:
    config, tensors = make()
    with pytest.raises(ValueError, match=r"post_norm should be left out: this key is not known here, .* found True"):
        load(put(tmp_path, config | {"post_norm": True}, tensors))


def test_layers_of_qwen3_norm_queries_and_keys(tmp_path: Path) -> None:
    config, tensors = speculators_eagle3()
    config["transformer_layer_config"]["model_type"] = "qwen3"
    plain = guesses(load(put(tmp_path / "a", config, tensors)))[0]
    tensors |= {f"layers.0.self_attn.{n}_norm.weight": torch.ones(4) for n in "qk"}
    normed = guesses(load(put(tmp_path / "b", config, tensors)))[0]
    assert torch.equal(normed[0], plain[0]), "the first position sees nothing but itself"
    assert not torch.allclose(normed[1:], plain[1:])


def test_a_head_that_is_not_there_is_the_targets(tmp_path: Path) -> None:
    config, tensors = speculators_eagle3()
    tokens = torch.arange(9) + tensors["d2t"]
    tensors["lm_head.weight"] = embedding_and_head().head[tokens]
    with_head = guesses(load(put(tmp_path / "a", config, tensors)))[0]
    del tensors["lm_head.weight"]
    assert torch.equal(guesses(load(put(tmp_path / "b", config, tensors)))[0], with_head)


@pytest.mark.parametrize("make", [eagle1, eagle3, speculators_eagle3])
def test_what_does_not_fit(tmp_path: Path, make: Any) -> None:
    config, tensors = make()
    name = next(n for n in tensors if n.endswith("o_proj.weight")).replace("midlayer", "layers.0")
    less = {n: t for n, t in tensors.items() if "o_proj" not in n}
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load(put(tmp_path / "less", config, less))
    with pytest.raises(
        ValueError, match=r"fc.weight has the shape \[8, 5\], and its configuration asks for \[8, (16|24)\]"
    ):
        load(put(tmp_path / "odd", config, tensors | {"fc.weight": matrix(D, 5, seed=1)}))
    with pytest.raises(ValueError, match=r"it holds layers.0.self_attn.o_proj.bias, which"):
        load(put(tmp_path / "more", config, tensors | {"layers.0.self_attn.o_proj.bias": matrix(D, seed=1)}))
    folder = put(tmp_path / "fine", config, tensors)
    for change in ({"hidden": D + 4}, {"vocab": V + 1}):
        with pytest.raises(ValueError, match=rf"another model \(.*: width {D}, {V} tokens\); the target has width"):
            load_speculator(folder, CARD.model_copy(update=change), embedding_and_head())


def test_reduced_vocabularies_are_checked(tmp_path: Path) -> None:
    config, tensors = eagle3()
    with pytest.raises(ValueError, match="d2t does not name ascending tokens of a vocabulary of 23"):
        load(put(tmp_path / "absolute", config, tensors | {"d2t": tensors["d2t"] + V}))
    with pytest.raises(ValueError, match="d2t does not name ascending tokens"):
        load(put(tmp_path / "down", config, tensors | {"d2t": -tensors["d2t"]}))


def test_unknown_types_and_forms_are_refused(tmp_path: Path) -> None:
    config, tensors = speculators_eagle3()
    with pytest.raises(ValueError, match="type 'hydra' are not known here; known: eagle3, peagle, dflash, dspark"):
        load(put(tmp_path / "a", config | {"speculators_model_type": "hydra"}, tensors))
    with pytest.raises(ValueError, match="drafts in a width of its own"):
        load(put(tmp_path / "b", config | {"target_hidden_size": 2 * D}, tensors))
    layer = config["transformer_layer_config"] | {"hidden_act": "relu"}
    with pytest.raises(ValueError, match="its activation is relu"):
        load(put(tmp_path / "c", config | {"transformer_layer_config": layer}, tensors))
    with pytest.raises(ValueError, match="transformer_layer_config should describe the layer"):
        load(put(tmp_path / "d", config | {"transformer_layer_config": None}, tensors))


def test_a_draft_of_the_last_state_alone_is_refused_by_name(tmp_path: Path) -> None:
    config, tensors = eagle3()
    with pytest.raises(ValueError, match=r"eagle_config.use_aux_hidden_state should be true: .*, found False"):
        load(put(tmp_path, config | {"eagle_config": {"use_aux_hidden_state": False}}, tensors))
