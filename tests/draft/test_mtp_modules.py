"""Several layers of multi-token prediction against the `MtpModel` of transformers, in torch and on the kernels."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from foretell.catalogue import BuildContext, build
from foretell.core.context import Context, StepResult
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import MTPModulesDrafter
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig
from foretell.model.config.readers.hf import from_hf
from foretell.model.kernels import available
from foretell.model.load.build import build_decoder
from foretell.model.load.mtp import load_mtp
from foretell.model.load.native import load_native
from foretell.model.load.weights import SafetensorsWeights
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.speculator.export import export
from foretell.speculator.formats.base import Verifier
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.mtp import MTPNetwork
from foretell.train.recipe.base import RecipeSetup
from foretell.train.recipe.mtp import MTPRecipe
from helpers import TinyCheckpoint, chain_tree, context_of, random_tokens

VOCAB, LAYERS, MODULES = 61, 3, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.15, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2,
    "num_nextn_predict_layers": MODULES, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=28, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6,
    ),
    "glm4_moe": transformers.Glm4MoeConfig(**SIZES, num_key_value_heads=2, head_dim=16, use_qk_norm=True),
}  # fmt: skip
NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
TEXT, PATH = random_tokens(24, VOCAB, seed=3), random_tokens(MODULES - 1, VOCAB, seed=4)
backends = pytest.mark.parametrize(
    "native",
    [False, pytest.param(True, marks=pytest.mark.skipif(not available(), reason="the kernels are not available here"))],
)


@cache
def oracle_of(kind: str) -> tuple[Any, MtpModel, Path]:
    """A random model of transformers, its layers, and a folder with the checkpoint of both."""
    torch.manual_seed(0)
    folder = Path(mkdtemp(prefix="foretell-mtp-"))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager").eval()
    layers = MtpModel(model, MODULES).eval()
    for parameter in layers.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    # The names of experts in a checkpoint are those of a model; so each block is written as one of a second model.
    for k, layer in enumerate(layers.layers):
        second = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])
        second.model.layers[0].load_state_dict(layer.mtp_block.state_dict())
        second.save_pretrained(folder / "second")
        at = f"model.layers.{LAYERS + k}."
        for name, tensor in load_file(folder / "second" / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                tensors[name.replace("model.layers.0.", at, 1)] = tensor
        tensors |= {f"{at}{own}.weight": getattr(layer, name).weight.detach() for name, own in NAMES.items()}
    save_file(tensors, folder / "model.safetensors")
    return model, layers, folder


@torch.no_grad()
def reference(kind: str, text: Sequence[int], path: Sequence[int], first: int = 0) -> torch.Tensor:
    """Scores after the last token of a path of drafts, by the layers of transformers over the text from `first` on."""
    model, layers, _ = oracle_of(kind)
    read = torch.tensor([text[:-1]])
    states, tokens = model.model(read).last_hidden_state[:, first:], torch.tensor([[*text, *path][first:]])
    for k in range(len(path) + 1):
        end = k + 1 + states.shape[1]
        states = layers.forward_layer(
            k, states, torch.arange(k + 1, end)[None], MtpCache(config=layers.config), tokens[:, k + 1 : end]
        )
    scores: torch.Tensor = model.lm_head(states)[0, -1]
    return scores


def target_of(kind: str, native: bool) -> tuple[Network, SafetensorsWeights]:
    folder = oracle_of(kind)[2]
    config, weights = from_hf(json.loads((folder / "config.json").read_text())), SafetensorsWeights(folder)
    if native:
        return load_native(config, weights, "float32"), weights
    return build_decoder(config, weights, torch.float32, torch.device("cpu")), weights


def context_in(row: int, length: int = 1) -> Context:
    """The context of a request with the first tokens of the text, all but the last of which were read."""
    return replace(context_of(TEXT[:length]), rows=(row,))


def read_on(runner: DecoderRunner, drafter: MTPModulesDrafter, context: Context, end: int) -> None:
    """Let the target read tokens up to the last one of the first `end`."""
    [row], [text] = context.rows, context.sequences
    start, tree = text.length - 1, chain_tree(TEXT[text.length - 1 : end - 1])
    output = runner.forward([row], tree, hidden_layers=drafter.hidden_layers)
    path = tuple(range(tree.nodes))
    runner.commit(row, path)
    text.append(TEXT[text.length : end])
    drafter.observe(StepResult(context, tree, output, (path,), ((TEXT[end - 1],),), (start,)))


def draft(drafter: MTPModulesDrafter, context: Context, *paths: Sequence[int]) -> list[torch.Tensor]:
    """Scores after the last tokens of paths of one length below one root."""
    tokens, parents, ends = list(context.last_tokens), [-1], [0] * len(paths)
    logits, at = drafter.expand(tree_from_lists([tokens], [parents]), np.array([[0]]), context)
    for depth in range(len(paths[0])):
        for i, path in enumerate(paths):
            tokens, parents = [*tokens, path[depth]], [*parents, ends[i]]
            ends[i] = len(tokens) - 1
        logits, at = drafter.expand(tree_from_lists([tokens], [parents]), np.array([ends]), context)
    return [logits[at[0, end]] for end in ends]


@pytest.mark.covering(2)
@backends
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("ends", [(24,), (2, 3, 4, 9, 10, 24), (5, 6, 24), (23, 24)])
def test_scores_are_those_of_transformers(kind: str, native: bool, ends: Sequence[int]) -> None:
    """Also where drafts of other tokens were read before, after every step, and after a step that failed."""
    network, weights = target_of(kind, native)
    layer = load_mtp(network.config, weights, network)
    assert len(layer.modules) == MODULES
    runner, drafter, context = DecoderRunner(network), MTPModulesDrafter(layer, max_pending=4), context_in(0)
    for end in ends:
        read_on(runner, drafter, context, end)
        for depth in range(MODULES):
            other = random_tokens(depth, VOCAB, seed=end)
            for scores, path in zip(draft(drafter, context, PATH[:depth], other), (PATH[:depth], other), strict=True):
                torch.testing.assert_close(scores, reference(kind, TEXT[:end], path), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_to_train_are_those_of_the_checkpoint_and_are_written_as_they_were_read(
    kind: str, tmp_path: Path
) -> None:
    """They are unrolled as by transformers, draft like the checkpoint's, and every published tensor comes back."""
    network, weights = target_of(kind, False)
    assert isinstance(network, Decoder)
    checkpoint = TinyCheckpoint(network, weights)
    checkpoint.config = network.config
    setup = RecipeSetup(card(network.config), network.config, lent(network), checkpoint)
    recipe = MTPRecipe.build(setup)
    assert recipe.network.layers == recipe.draft_length == MODULES
    text = torch.tensor([TEXT])
    states = oracle_of(kind)[0].model(text).last_hidden_state.detach()
    last = len(TEXT) - MODULES - 1
    wanted = [torch.arange(len(TEXT) - 1)[None] == last for _ in range(MODULES)]
    assert isinstance(recipe.network, MTPNetwork)
    out = recipe.network(text, states, wanted)
    for k, state in enumerate(out):
        expected = reference(kind, TEXT[: last + 2], TEXT[last + 2 : last + 2 + k])
        torch.testing.assert_close(recipe.network.compute_logits(state)[0], expected, rtol=0, atol=1e-4)
    own_modules = load_mtp(network.config, weights, network).modules
    for module, own in zip(recipe.network.to_layer().modules, own_modules, strict=True):
        assert torch.equal(module.norm.weight, own.norm.weight)
    export(recipe.network, Verifier("target", network.config), "hf", tmp_path / "out")
    written, published = load_file(tmp_path / "out" / "mtp.safetensors"), load_file(weights.files[0])
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    for k in range(MODULES):
        at = f"model.layers.{LAYERS + k}."
        ours, theirs = (
            {n.removeprefix(at): t for n, t in ts.items() if n.startswith(at)} for ts in (written, published)
        )
        assert torch.equal(ours["embed_tokens.weight"], network.embedding)
        assert sorted(ours) == sorted([*split_experts(theirs), *copies])
        for name, tensor in split_experts(theirs).items():
            assert torch.equal(ours[name], tensor), name


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's matrices for themselves, as they are published."""
    out = {name: t for name, t in tensors.items() if not name.startswith("mlp.experts.") or name.endswith(".weight")}
    for i, both in enumerate(tensors.get("mlp.experts.gate_up_proj", ())):
        for name, part in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
            out[f"mlp.experts.{i}.{name}.weight"] = part
        out[f"mlp.experts.{i}.down_proj.weight"] = tensors["mlp.experts.down_proj"][i]
    return out


def card(config: ModelConfig) -> TargetInfo:
    return TargetInfo(name="tiny", hidden=config.hidden, vocab=config.vocab, layers=config.layers)


def lent(decoder: Decoder) -> EmbeddingAndHead:
    return EmbeddingAndHead(decoder.embedding.detach(), decoder.head.weight.detach(), 1.0, 0.0)


@pytest.mark.parametrize(("length", "first"), [(16, 0), (13, 0), (10, 10)])
def test_a_row_goes_on_from_another_or_begins_after_what_it_does_not_know(length: int, first: int) -> None:
    """Of 13 read positions it knows what the layers carry over behind the last one alone."""
    network, weights = target_of("glm4_moe", False)
    runner, drafter = DecoderRunner(network), MTPModulesDrafter(load_mtp(network.config, weights, network))
    context = context_in(0)
    read_on(runner, drafter, context, 14)
    draft(drafter, context, PATH)
    read_on(runner, drafter, context, 20)
    for row in (1, 0):
        if row:
            assert drafter.copy_row(0, row, length) == length and runner.copy_row(0, row, length)
        else:
            assert drafter.rewind(row, length) == length
            runner.truncate(row, length)
        context = context_in(row, length + 1)
        read_on(runner, drafter, context, 24)
        [scores] = draft(drafter, context, PATH)
        torch.testing.assert_close(scores, reference("glm4_moe", TEXT, PATH, first), rtol=0, atol=1e-4)


@pytest.mark.covering(1)
@backends
@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_stay_those_of_the_target(kind: str, native: bool) -> None:
    network, weights = target_of(kind, native)
    checkpoint = TinyCheckpoint(network, weights) if isinstance(network, Decoder) else TinyCheckpoint(
        build_decoder(network.config, weights, torch.float32, torch.device("cpu")), weights
    )  # fmt: skip
    checkpoint.config = network.config
    context = BuildContext(VOCAB, network, checkpoint=checkpoint)
    requests = [
        Request(text, SamplingParams(temperature=heat, seed=1), max_new_tokens=25)
        for text in (TEXT, TEXT[:10] + PATH, TEXT[:1])
        for heat in (0, 1)
    ]
    drafted, chained, plain = (
        [c.tokens for c in Engine(DecoderRunner(network), build(name, context, options)).complete(requests)]
        for name, options in (("mtp", {}), ("mtp", {"eagle_topk": 1, "num_steps": 3}), ("autoregressive", {}))
    )
    assert drafted == chained == plain


def test_a_layer_that_is_numbered_with_a_gap_is_refused(tmp_path: Path) -> None:
    folder = oracle_of("glm4_moe")[2]
    missing = f"model.layers.{LAYERS + 1}."
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if not name.startswith(missing)}
    save_file(kept, tmp_path / "model.safetensors")
    network, _ = target_of("glm4_moe", False)
    words = rf"layers of multi-token prediction have a gap at model\.layers\.{LAYERS + 1}\.\*"
    with pytest.raises(ValueError, match=words) as error:
        load_mtp(network.config, SafetensorsWeights(tmp_path), network)
    assert "\n" not in str(error.value)
