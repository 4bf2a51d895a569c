"""Sliding windows and attention sinks of published drafters: what is read drafts beyond the window as a plain
transcription does and, where the library is installed, as `speculators` does; in chains and in trees, with the kernels
and without.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from published import Tensors, drawn, put
from test_export import VERIFIER

from foretell.draft.cached_states import layout_of
from foretell.model import kernels as native
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.speculator.checkpoint import save
from foretell.speculator.export import export
from foretell.speculator.load import load_speculator
from foretell.speculator.network.base import Speculator, TargetInfo
from foretell.speculator.network.dflash import DFlash
from foretell.speculator.network.eagle import Eagle3, EagleNetwork
from foretell.speculator.network.p_eagle import PEagle
from foretell.speculator.network.pack import pack_network

D, HEADS, KV, E, FFN, V, LAYERS, WINDOW, MASK, SIZE = 32, 2, 1, 16, 48, 23, 6, 6, 20, 4
CARD = TargetInfo(name="tiny", hidden=D, vocab=V, layers=LAYERS)
GENERATOR = torch.Generator().manual_seed(1)
TEXT = torch.randint(V, (24,), generator=GENERATOR).tolist()
STATES = [torch.randn(len(TEXT), D, generator=GENERATOR) for _ in range(2)]
LENT = EmbeddingAndHead(torch.randn(V, D, generator=GENERATOR), torch.randn(V, D, generator=GENERATOR))
TYPES = (["sliding_attention"] * 2, ["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"])
LAYER = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": FFN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": 2, "head_dim": E, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "hidden_act": "silu",
    "vocab_size": V, "sliding_window": WINDOW, "use_sliding_window": True, "attention_bias": False,
}  # fmt: skip
with_kernels = pytest.mark.parametrize(
    "kernels",
    [False, pytest.param(True, marks=pytest.mark.skipif(not native.available(), reason="there are no kernels"))],
)


def layer(i: int, inputs: int, norms: Sequence[str], kind: str = "llama") -> dict[str, tuple[int, ...]]:
    at = f"layers.{i}"
    shapes: dict[str, tuple[int, ...]] = {f"{at}.{n}.weight": (D,) for n in (*norms, "post_attention_layernorm")}
    for n, rows in (("q", HEADS * E), ("k", KV * E), ("v", KV * E)):
        shapes[f"{at}.self_attn.{n}_proj.weight"] = (rows, inputs)
    if kind == "qwen3":
        shapes |= {f"{at}.self_attn.{n}_norm.weight": (E,) for n in "qk"}
    shapes[f"{at}.self_attn.o_proj.weight"] = (D, HEADS * E)
    shapes |= {f"{at}.mlp.{n}_proj.weight": (FFN, D) for n in ("gate", "up")}
    return shapes | {f"{at}.mlp.down_proj.weight": (D, FFN)}


def library(kind: str, types: Sequence[str], **more: Any) -> tuple[dict[str, Any], Tensors]:
    """A checkpoint as the `speculators` library 0.9 writes it: two layers on two hidden states."""
    block = kind in ("dflash", "dspark")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D), "norm.weight": (D,), "lm_head.weight": (V, D)}
    shapes |= layer(
        0, D if block else 2 * D, ("input_layernorm", *(() if block else ("hidden_norm",))), "qwen3" * block
    )
    shapes |= layer(1, D, ("input_layernorm",), "qwen3" * block) | ({"hidden_norm.weight": (D,)} if block else {})
    shapes |= {"mask_hidden": (1, 1, 2 * D)} if kind == "peagle" else {}
    config = {
        "architectures": [{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}.get(kind, "DFlashSpeculator")],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": SIZE}]},
        "transformer_layer_config": LAYER | {"layer_types": types} | ({"model_type": "qwen3"} if block else {}),
        "draft_vocab_size": V,
        "transformers_version": "5.0.0",
        **({} if kind == "eagle3" else {"mask_token_id": MASK}),
        **({"aux_hidden_state_layer_ids": [2, 3], "block_size": SIZE, "sliding_window_non_causal": False} if block else
           {"eagle_aux_hidden_state_layer_ids": [2, 3], "norm_before_residual": True}),
        **more,
    }  # fmt: skip
    return config, drawn(shapes)


def read(folder: Path, kernels: bool = False) -> Any:
    network = load_speculator(folder, CARD, LENT)
    return pack_network(network, "float32") if kernels else network


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def project(x: torch.Tensor, t: Tensors, at: str, position: torch.Tensor) -> list[torch.Tensor]:
    out = []
    for n in "qkv":
        y = F.linear(x, t[f"{at}.self_attn.{n}_proj.weight"]).view(len(x), -1, E)
        y = norm(y, t[f"{at}.self_attn.{n}_norm.weight"]) if f"{at}.self_attn.{n}_norm.weight" in t else y
        if n != "v":
            angle = position[:, None] * 500.0 ** (-torch.arange(E // 2) / (E // 2))
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = y[..., : E // 2], y[..., E // 2 :]
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        out.append(y)
    return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    k, v = (part.repeat_interleave(HEADS // KV, 1) for part in (k, v))
    score = (torch.einsum("ihe,jhe->hij", q, k) / E**0.5).masked_fill(~sees, float("-inf"))
    if f"{at}.self_attn.attention_sink_bias" in t:
        sink = t[f"{at}.self_attn.attention_sink_bias"][:, None, None].expand(-1, len(q), 1)
        weight = torch.cat((score, sink), -1).softmax(-1)[..., :-1]
    else:
        weight = score.softmax(-1)
    return torch.einsum("hij,jhe->ihe", weight, v).flatten(1) @ t[f"{at}.self_attn.o_proj.weight"].T


def feed_forward(x: torch.Tensor, t: Tensors, at: str) -> torch.Tensor:
    y = norm(x, t[f"{at}.post_attention_layernorm.weight"])
    gated = F.silu(y @ t[f"{at}.mlp.gate_proj.weight"].T) * (y @ t[f"{at}.mlp.up_proj.weight"].T)
    return x + gated @ t[f"{at}.mlp.down_proj.weight"].T


def plain_eagle3(t: Tensors, types: Sequence[str], embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """Outputs of the layers over one path, position by position."""
    position = torch.arange(len(embedded))
    distance = position[:, None] - position
    normed = norm(feature, t["layers.0.hidden_norm.weight"])
    x, y = normed, torch.cat((norm(embedded, t["layers.0.input_layernorm.weight"]), normed), -1)
    for i, kind in enumerate(types):
        at = f"layers.{i}"
        y = norm(x, t[f"{at}.input_layernorm.weight"]) if i else y
        sees = (distance >= 0) & (distance < (WINDOW if kind == "sliding_attention" else len(position)))
        q, k, v = project(y, t, at, position)
        x = feed_forward(x + attend(q, k, v, sees, t, at), t, at)
    return x


PATHS: tuple[tuple[int, ...], ...] = ((3,), (9,), (3, 5), (3, 8), (9, 1), (3, 5, 2), (9, 1, 4), (3, 5, 2, 11))
"""A tree, level by level, and in it a chain of four."""


def tree_logits(network: EagleNetwork) -> dict[tuple[int, ...], torch.Tensor]:
    """Logits after every node of the tree below the text."""
    n, cache = len(TEXT) - 1, network.new_cache(torch.device("cpu"))
    cache.reserve([0], [n + len(PATHS)])
    every = np.arange(n)
    layout, tokens = layout_of(np.zeros(n), every, every, every + 1), torch.tensor(TEXT[1:])
    outputs = network.forward_target_states(tokens, STATES, every, layout, cache)[-1:]
    number: dict[tuple[int, ...], int] = {(): 0}
    for depth in range(1, 1 + max(map(len, PATHS))):
        level = [path for path in PATHS if len(path) == depth]
        slots = [[n + PATHS.index(path[: i + 1]) for i in range(depth)] for path in level]
        count, parents = len(level), torch.tensor([number[path[:-1]] for path in level])
        layout = layout_of(
            np.zeros(count), np.array([s[-1] for s in slots]), np.full(count, n - 1 + depth), np.full(count, n), slots
        )
        new = network.forward_features(torch.tensor([p[-1] for p in level]), outputs, parents, layout, cache)
        number |= {path: len(outputs) + i for i, path in enumerate(level)}
        outputs = torch.cat((outputs, new))
    logits = network.compute_logits(network.head_input(outputs))
    return {path: logits[i] for path, i in number.items()}


@with_kernels
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=lambda types: types[0][:4] + types[1][:4])
def test_eagle3_drafts_beyond_its_window(tmp_path: Path, types: list[str], sinks: bool, kernels: bool) -> None:
    config, t = library("eagle3", types)
    if sinks:
        t |= {f"layers.{i}.self_attn.attention_sink_bias": torch.tensor([1.5, -0.5]) * (i + 1) for i in range(2)}
    network = read(put(tmp_path, config, t), kernels)
    assert isinstance(network, Eagle3) and (network.native is not None) == kernels
    drafted, fused = tree_logits(network), torch.cat(STATES, -1)[:-1] @ t["fc.weight"].T
    for path in ((), *PATHS):
        feature, text = fused, [*TEXT[1:], *path]
        for length in range(len(TEXT) - 1, len(text) + 1):
            out = plain_eagle3(t, types, LENT.embedding[text[:length]], feature)
            feature = torch.cat((feature, out[-1:]))
        wanted = norm(out[-1], t["norm.weight"]) @ t["lm_head.weight"].T
        torch.testing.assert_close(drafted[path], wanted, atol=1e-4, rtol=1e-4)


def block_logits(network: DFlash) -> torch.Tensor:
    """Logits of the predicting slots of a block below the text, from the cache."""
    n, cache = len(TEXT) - 1, network.new_cache(torch.device("cpu"))
    cache.reserve([0], [n + SIZE])
    every, slots = np.arange(n), np.arange(n, n + SIZE)
    network.read_target_states(STATES, every, layout_of(np.zeros(n), every, every, every + 1), cache)
    layout = layout_of(np.zeros(SIZE), slots, slots, np.full(SIZE, n + SIZE))
    states = network.draft_block(torch.tensor(TEXT[-1:]), layout, cache)
    logits: torch.Tensor = network.compute_logits(network.predicting_slots(states)[0])
    return logits


def plain_dflash(t: Tensors, types: Sequence[str], causal: bool, from_anchor: bool) -> torch.Tensor:
    n = len(TEXT) - 1
    c = norm(torch.cat(STATES, -1)[:n] @ t["fc.weight"].T, t["hidden_norm.weight"])
    x, slot, context = LENT.embedding[[TEXT[-1], *[MASK] * (SIZE - 1)]], n + torch.arange(SIZE), torch.arange(n)
    for i, kind in enumerate(types):
        at, key = f"layers.{i}", torch.cat((context, slot))
        q, own_k, own_v = project(norm(x, t[f"{at}.input_layernorm.weight"]), t, at, slot)
        _, k, v = project(c, t, at, context)
        sees = torch.ones(SIZE, n + SIZE, dtype=torch.bool)
        if kind == "causal":
            sees = key <= slot[:, None]
        elif kind == "sliding_attention":
            sees = key >= (n - WINDOW if from_anchor else slot[:, None] - WINDOW + 1)
            sees = sees.expand(SIZE, -1) & ((key <= slot[:, None]) | (not causal))
        x = feed_forward(x + attend(q, torch.cat((k, own_k)), torch.cat((v, own_v)), sees, t, at), t, at)
    return norm(x, t["norm.weight"])[1:] @ t["lm_head.weight"].T


@with_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=lambda types: types[0][:4] + types[1][:4])
def test_dflash_of_the_library_drafts_beyond_its_window(
    tmp_path: Path, types: list[str], causal: bool, kernels: bool
) -> None:
    config, t = library("dflash", types, sliding_window_non_causal=not causal)
    network = read(put(tmp_path, config, t), kernels)
    assert (network.native is not None) == kernels
    torch.testing.assert_close(block_logits(network), plain_dflash(t, types, causal, True), atol=1e-4, rtol=1e-4)


@with_kernels
@pytest.mark.parametrize("causal", [None, False, True])
def test_dflash_of_specforge_counts_its_window_from_every_slot(
    tmp_path: Path, causal: bool | None, kernels: bool
) -> None:
    """And its blocks are causal in layers with a window, unless a flag says otherwise."""
    types, (config, t) = TYPES[0], library("dflash", TYPES[0])
    own = {"target_layer_ids": [1, 2], "mask_token_id": MASK} | ({} if causal is None else {"causal": causal})
    config = {**config["transformer_layer_config"], "architectures": ["DFlashDraftModel"], "block_size": SIZE}
    network = read(put(tmp_path / "in", config | {"dflash_config": own}, t), kernels)
    wanted = plain_dflash(t, types, causal is not False, False)
    torch.testing.assert_close(block_logits(network), wanted, atol=1e-4, rtol=1e-4)


def jetspec(key: str = "causal_head") -> tuple[dict[str, Any], Tensors]:
    """A checkpoint of JetSpec: DFlash's with a flag. With the name `causal` vLLM reads the flag."""
    config, t = library("dflash", ["full_attention"] * 2)
    own = {"target_layer_ids": [1, 2], "mask_token_id": MASK, key: True}
    config = {**config["transformer_layer_config"], "architectures": ["DFlashDraftModel"], "block_size": SIZE}
    return config | {"dflash_config": own}, t


@with_kernels
@pytest.mark.parametrize("key", ["causal_head", "causal", "is_causal"])
def test_blocks_of_jetspec_are_causal(tmp_path: Path, key: str, kernels: bool) -> None:
    """So what stands in a slot changes none before it; training sees the same."""
    config, t = jetspec(key)
    network = read(put(tmp_path, config, t), kernels)
    assert network.config.causal and (network.native is not None) == kernels
    wanted = plain_dflash(t, ["causal"] * 2, True, False)
    torch.testing.assert_close(block_logits(network), wanted, atol=1e-4, rtol=1e-4)
    assert (wanted - plain_dflash(t, ["full_attention"] * 2, True, False)).abs().max() > 0.01
    torch.testing.assert_close(unrolled(network), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format_name", ["dflash", "speculators"])
def test_what_is_exported_of_jetspec_stays_causal(tmp_path: Path, format_name: str) -> None:
    network = read(put(tmp_path / "in", *jetspec()))
    export(network, VERIFIER, format_name, tmp_path / "out")
    again, config = read(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    torch.testing.assert_close(block_logits(again), block_logits(network))
    assert again.config.causal
    if format_name == "dflash":
        assert config["dflash_config"]["causal_head"] and config["dflash_config"]["causal"] and config["is_causal"]
        assert "sliding_window" not in config
    with pytest.raises(ValueError, match="a window within which a slot sees no later slots"):
        export(network, VERIFIER, "gguf", tmp_path / "gguf")


def p_eagle_logits(network: PEagle) -> torch.Tensor:
    n, masks = len(TEXT) - 1, network.slots
    cache = network.new_cache(torch.device("cpu"))
    cache.reserve([0], [n + masks])
    every = np.arange(n + masks)
    layout, order = layout_of(np.zeros(n + masks), every, every, every + 1), torch.arange(n + masks)
    out = network.draft(torch.tensor(TEXT[1:]), torch.cat(STATES, -1)[:-1], 1, order, layout, cache)
    logits: torch.Tensor = network.compute_logits(network.head_input(out[n - 1 :]))
    return logits


@with_kernels
@pytest.mark.parametrize("types", TYPES, ids=lambda types: types[0][:4] + types[1][:4])
def test_p_eagle_drafts_beyond_its_window(tmp_path: Path, types: list[str], kernels: bool) -> None:
    config, t = library("peagle", types)
    network = read(put(tmp_path, config, t), kernels)
    masks = torch.full((SIZE - 1,), MASK)
    states = torch.cat((torch.cat(STATES, -1)[:-1], t["mask_hidden"][0].expand(SIZE - 1, -1)))
    embedded = LENT.embedding[torch.cat((torch.tensor(TEXT[1:]), masks))]
    out = plain_eagle3(t, types, embedded, states @ t["fc.weight"].T)[-SIZE:]
    wanted = norm(out, t["norm.weight"]) @ t["lm_head.weight"].T
    torch.testing.assert_close(p_eagle_logits(network), wanted, atol=1e-4, rtol=1e-4)


def unrolled(network: Any) -> Any:
    """The forward pass of training: logits of steps, of a rollout, or of a block."""
    token, states = torch.tensor([TEXT]), [s[None] for s in STATES]
    last, every = torch.arange(len(TEXT) - 1)[None] == len(TEXT) - 2, torch.ones(1, 1, dtype=torch.bool)
    if isinstance(network, DFlash):
        wanted = torch.ones(1, 1, network.depth, dtype=torch.bool)
        return network(token, states, torch.tensor([[len(TEXT) - 1]]), wanted).logits
    if isinstance(network, PEagle):
        anchor = torch.tensor([[len(TEXT) - 2]])
        return torch.cat(network(token, states, anchor, [last, *[every] * network.slots]))
    return torch.cat([step.logits for step in network(token, states, [last] * 3)])


def cached(network: Any) -> torch.Tensor:
    """The same over a cache; after the text EAGLE-3 reads the tokens that training pads it with."""
    if isinstance(network, DFlash):
        return block_logits(network)
    if isinstance(network, PEagle):
        return p_eagle_logits(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "PATHS", ((0,), (0, 0)))
        return torch.stack(list(tree_logits(network).values()))


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
@pytest.mark.parametrize("types", TYPES, ids=lambda types: types[0][:4] + types[1][:4])
def test_training_sees_what_drafting_sees(tmp_path: Path, kind: str, types: list[str]) -> None:
    config, t = library(kind, types)
    t |= {f"layers.{i}.self_attn.attention_sink_bias": torch.tensor([1.5, -0.5]) * (i + 1) for i in range(2)}
    network = read(put(tmp_path, config, t))
    torch.testing.assert_close(unrolled(network), cached(network), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "format_name"), [("eagle3", "speculators"), ("peagle", "speculators"), ("dflash", "dflash")]
)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_exported_keeps_the_window(tmp_path: Path, kind: str, format_name: str, causal: bool) -> None:
    more = {"sliding_window_non_causal": not causal} if kind == "dflash" else {}
    network: Speculator = read(put(tmp_path / "in", *library(kind, TYPES[2], **more)))
    export(network, VERIFIER, format_name, tmp_path / "out")
    again = read(tmp_path / "out")
    # The authors' format of DFlash has no place for where a window is counted from.
    apart = {"target", "window_from_anchor"}
    assert again.config.model_dump(exclude=apart) == network.config.model_dump(exclude=apart)
    assert again.config.window == WINDOW and again.config.window_layers == (0,)
    save(tmp_path / "own", network, network.config)
    assert read(tmp_path / "own").config == network.config


def test_sinks_have_no_place_in_the_library(tmp_path: Path) -> None:
    config, t = library("eagle3", TYPES[0])
    network = read(put(tmp_path / "in", config, t | {"layers.1.self_attn.attention_sink_bias": torch.ones(HEADS)}))
    assert network.config.sink_layers == (1,)
    with pytest.raises(ValueError, match="has no place for attention sinks"):
        export(network, VERIFIER, "speculators", tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"use_sliding_window": False}, "use_sliding_window should be true beside layer_types of sliding_attention"),
        ({"sliding_window": None}, "sliding_window should be above 0 beside layer_types of sliding_attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types should be 2 of sliding_attention or full_attention"),
        ({"attention_chunk_size": 64}, "transformer_layer_config.attention_chunk_size should be left out"),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "of the type gemma2, which has"),
    ],
)
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_keys_that_contradict_or_are_not_known_are_named(
    tmp_path: Path, kind: str, changed: dict[str, Any], words: str
) -> None:
    config, t = library(kind, TYPES[0])
    with pytest.raises(ValueError, match=words) as error:
        read(put(tmp_path, config | {"transformer_layer_config": config["transformer_layer_config"] | changed}, t))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
@pytest.mark.parametrize("inside", [None, "speculators_config", "verifier", "proposal_methods"])
def test_an_unknown_key_of_the_library_is_named(tmp_path: Path, kind: str, inside: str | None) -> None:
    config, t = library(kind, TYPES[0])
    changed: dict[str, Any] = {"tree_fusion": 2}
    if inside is not None:
        about, whole = config["speculators_config"], inside == "speculators_config"
        within = {"verifier": changed, "proposal_methods": [{"speculative_tokens": SIZE} | changed]}
        changed = {"speculators_config": about | (changed if whole else {inside: within[inside]})}
    with pytest.raises(ValueError, match=r"tree_fusion should be left out: this key is not known here.*, found 2"):
        read(put(tmp_path, config | changed, t))
    read(put(tmp_path, config | {"tree_fusion": None}, t))


class Stop(Exception):  # noqa: N818
    """What ends a forward pass whose loss is of no interest."""


def peer_logits(kind: str, types: list[str], folder: Path, patch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits of the library's own module: of EAGLE-3's first step everywhere, of a rollout, or of a block."""
    name = {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dspark": "DSpark"}[kind]
    core = pytest.importorskip(f"speculators.models.{kind}.core", exc_type=ImportError)
    from transformers import LlamaConfig, Qwen3Config

    config, t = library(kind, types)
    block = kind in ("dflash", "dspark")
    config |= {"markov_rank": 0, "enable_confidence_head": False} if kind == "dspark" else {}
    made, of_layers = getattr(core, f"{name}SpeculatorConfig"), Qwen3Config if block else LlamaConfig
    layers = of_layers(**config["transformer_layer_config"])
    layers._attn_implementation = "eager"
    keys = set(made.model_fields) - {"architectures", "transformer_layer_config", "speculators_config"}
    about = made(transformer_layer_config=layers, **{k: v for k, v in config.items() if k in keys})
    peer, n = getattr(core, f"{name}DraftModel")(about), len(TEXT)
    unused = peer.load_state_dict({**t, "embed_tokens.weight": LENT.embedding}, strict=False)
    assert not unused.unexpected_keys and all("verifier" in key for key in unused.missing_keys), unused
    out = list[torch.Tensor]()

    def stop(module: object, inputs: object, output: torch.Tensor) -> None:
        out.append(output.detach()[0])
        raise Stop

    peer.lm_head.register_forward_hook(stop)
    more: dict[str, Any] = {"ttt_steps": 1} if kind == "eagle3" else {"loss_mask": torch.ones(1, n - 1)}
    token, states = torch.tensor([TEXT[1:]]), torch.cat(STATES, -1)[None, :-1]
    if kind == "peagle":
        anchor, depth = [*range(n - SIZE), *[n - SIZE - 1] * (SIZE - 1)], [*[0] * (n - SIZE), *range(1, SIZE)]
        sample = torch.tensor(anchor), torch.tensor(depth)
        patch.setattr(core, "generate_cod_sample_indices", lambda **options: sample)
    if block:
        token, states, more = torch.tensor([TEXT]), torch.cat(STATES, -1)[None], {"loss_mask": torch.ones(1, n)}
        at = torch.tensor([n - SIZE])
        patch.setattr(
            "speculators.models.dflash.core.select_anchors", lambda *options: (at, torch.ones(1, dtype=torch.bool))
        )
        more["max_anchors"] = 1
    if kind != "eagle3":
        more["verifier_last_hidden_states"] = torch.zeros(1, token.shape[1], D)
    with torch.no_grad(), pytest.raises(Stop):
        peer.eval()(
            hidden_states=states, input_ids=token, document_ids=torch.zeros_like(token), **more,
        )  # fmt: skip
    return out[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
@pytest.mark.parametrize("types", TYPES, ids=lambda types: types[0][:4] + types[1][:4])
def test_the_librarys_own_modules_give_the_same(
    tmp_path: Path, kind: str, types: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, network = peer_logits(kind, types, tmp_path, monkeypatch), read(put(tmp_path, *library(kind, types)))
    n, token, states = len(TEXT), torch.tensor([TEXT]), [s[None] for s in STATES]
    every = torch.ones(1, 1, dtype=torch.bool)
    if kind == "eagle3":
        ours = network(token, states, [torch.ones(1, n - 1, dtype=torch.bool)])[0].logits
    elif kind == "peagle":
        last = torch.arange(n - 1)[None] == n - SIZE - 1
        anchor = torch.tensor([[n - SIZE - 1]])
        ours, theirs = torch.cat(network(token, states, anchor, [last, *[every] * network.slots])), theirs[-SIZE:]
    else:
        wanted = torch.ones(1, 1, network.depth, dtype=torch.bool)
        ours, theirs = network(token, states, torch.tensor([[n - SIZE]]), wanted).logits, theirs[-network.depth :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
