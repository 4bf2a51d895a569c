"""Models with recurrent states against transformers: equal logits for chains in chunks and for trees, and exact states
whatever was drafted and abandoned.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_decoder import SIZES, check_logits, random_parents, read
from test_packed_cache import FileWeights, model_file

from foretell.accept import Match
from foretell.catalogue import BUILT_IN, BuildContext, Entry, build
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree, tree_from_lists
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.cache.base import LayeredCache
from foretell.model.cache.layout import Layout
from foretell.model.cache.state_store import LayerStates, StateStore
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.config.states import DeltaNetConfig, Mamba2Config, ShortConvConfig, StateConfig, StateShape
from foretell.model.kernels import available
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.kernels.structures import Precision
from foretell.model.load import packed_cache
from foretell.model.load.native import finish_writing
from foretell.model.load.network import build_network, build_streamed_network
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.training.full_forward import full_forward
from foretell.shape import BranchingTree, Chain
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, all_logits, chain_tree, methods_by_kind, of_catalogue, random_tokens, speculator

LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "head_dim": 16,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.8,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
}
MAMBA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "num_local_experts": 0,
    "shared_intermediate_size": 48,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 6,
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
    "n_group": 3,
    "topk_group": 2,
}
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", LINEAR | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR | EXPERTS),
    "granite": ("GraniteMoeHybridConfig", MAMBA | MULTIPLIERS),
    "granite experts": (
        "GraniteMoeHybridConfig",
        MAMBA | MULTIPLIERS | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "nemotron": ("NemotronHConfig", NEMOTRON | {"layers_block_type": [LETTERS[c] for c in "M-*-M"], "mlp_bias": True}),
    "nemotron experts": (
        "NemotronHConfig",
        NEMOTRON | {"layers_block_type": [LETTERS[c] for c in "MEM*E-"], "use_bias": True},
    ),
    "granite biased": ("GraniteMoeHybridConfig", MAMBA | {"mamba_proj_bias": True, "position_embedding_type": "rope"}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
}


@cache
def oracle_of(name: str) -> Any:
    """A random model of transformers whose every vector differs from its initial value."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | values))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # Nemotron-H of transformers has another lower limit for prompts, which it does not have for single tokens.
            module.time_step_limit = config.time_step_limit
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.shape[1] == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


@cache
def decoder_of(name: str) -> Decoder:
    folder = Path(mkdtemp(prefix="foretell-state-"))
    # Qwen3.5's mixtures are published with all experts of a layer in one tensor, as transformers holds them.
    oracle_of(name).save_pretrained(folder, save_original_format=name != "qwen3_5_moe")
    return read(folder)


needs_kernels = pytest.mark.skipif(not available(), reason="the kernels are not available here")
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_logits_equal_those_of_transformers(name: str) -> None:
    check_logits(decoder_of(name), oracle_of(name), (7, 1, 1, 19, 12))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", pytest.param("granite", marks=pytest.mark.exhaustive)])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    prompt = random_tokens(9, SIZES["vocab_size"], seed=2)
    wanted = oracle_of(name).generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :]
    engine = Engine(DecoderRunner(decoder_of(name)), build("prompt_lookup", BuildContext(SIZES["vocab_size"], None)))
    found = engine.complete([Request(prompt, SamplingParams(temperature=0), max_new_tokens=64)])[0]
    assert list(found.tokens) == wanted.tolist()


STATES: dict[str, StateConfig] = {
    "delta_net": DeltaNetConfig((0,), key_heads=2, value_heads=4, key_dim=4, value_dim=3),
    "short_conv": ShortConvConfig((0,), channels=16),
    "mamba2": Mamba2Config((0,), heads=4, head_dim=4, groups=2, state_dim=3),
    "nemotron": Mamba2Config((0,), heads=4, head_dim=4, groups=2, state_dim=3),
}


def single_mixers(config: ModelConfig) -> ModelConfig:
    """A Nemotron-H whose layers are Mamba-2, experts, attention, a feed-forward network and Mamba-2."""
    experts = MoEConfig(
        4, 2, 24, shared_ffn=20, layers=(1,), scoring="sigmoid", selection_bias=True, ranked_by=2, scale=1.5
    )
    return replace(
        config, layers=5, activation="relu2", gated=False, experts=experts, attention_free_layers=(1, 3),
        mlp_free_layers=(0, 2, 4), unrotated_layers=tuple(range(5)),
    )  # fmt: skip


@cache
def state_target(name: str, seed: int = 0) -> Decoder:
    """A small model in float64 with a layer of this kind before one of attention."""
    kinds = {"delta_net": "qwen3_5_text", "short_conv": "lfm2", "mamba2": "granitemoehybrid", "nemotron": "nemotron_h"}
    gate = name == "delta_net"
    config = replace(TINY, vocab=VOCAB, architecture=kinds[name], state=STATES[name], attention_gate=gate)
    return tiny_decoder(single_mixers(config) if name == "nemotron" else config, seed)


REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=0.8 * (n == 9), seed=n), max_new_tokens=12 + n % 5)
    for n in (3, 40, 9)
]


def decoded(name: str, method: AnyMethod, chunk: int = 16) -> list[tuple[int, ...]]:
    engine = Engine(DecoderRunner(state_target(name)), method, rows=2, chunk=chunk)
    return [completion.tokens for completion in engine.complete(REQUESTS)]


@cache
def plain(name: str) -> list[tuple[int, ...]]:
    """The tokens of the requests one by one, each prompt in one pass, without drafts."""
    method = build("plain", BuildContext(VOCAB, state_target(name)))
    return [Engine(DecoderRunner(state_target(name)), method).complete([request])[0].tokens for request in REQUESTS]


REFUSED = ("sparse_kv_draft", "triforce")
"""Methods that draft over a part of a cache of keys and values."""
SPARSE = ("sparse_mlp_draft", "matformer_draft")
"""Methods that draft with a part of the feed-forward networks; they refuse these models, too."""
LOSSLESS = [entry for entry in BUILT_IN if entry.lossless and entry.name not in (*REFUSED, *SPARSE)]


@pytest.mark.parametrize(
    "entry",
    methods_by_kind(
        LOSSLESS, of=("autoregressive", "ngram", "draft_model", "layer_skip", "dynamic_tree", "pass", "eagle3")
    ),
)
def test_lossless_methods_give_the_tokens_of_plain_decoding(entry: Entry) -> None:
    target = state_target("delta_net")
    drafts = DecoderRunner(state_target("delta_net", seed=5)), DecoderRunner(target.first_layers(1))
    trained = speculator(entry.speculator) if entry.speculator else None
    found = decoded("delta_net", of_catalogue(entry, target, drafts, trained))
    same = [i for i, request in enumerate(REQUESTS) if entry.same_seed or not request.sampling_params.temperature]
    assert [found[i] for i in same] == [plain("delta_net")[i] for i in same]


@pytest.mark.parametrize("name", [*REFUSED, *SPARSE])
def test_methods_over_a_part_of_the_model_are_refused(name: str) -> None:
    target = state_target("delta_net")
    entry = next(entry for entry in BUILT_IN if entry.name == name)
    with pytest.raises(ValueError, match="recurrent states"):
        of_catalogue(entry, target, (DecoderRunner(target.first_layers(1)),), None)


@pytest.mark.parametrize("name", STATES)
def test_tokens_depend_neither_on_chunks_nor_on_company(name: str) -> None:
    target = state_target(name)
    assert decoded(name, build("plain", BuildContext(VOCAB, target)), chunk=7) == plain(name)
    draft = DraftModel(DecoderRunner(state_target(name, seed=5)))
    assert decoded(name, Method(draft, BranchingTree((3, 2, 1), draw=False), Match())) == plain(name)


def states_of(runner: DecoderRunner, row: int) -> list[torch.Tensor]:
    """The states of a row's committed tokens."""
    assert isinstance(runner.cache, LayeredCache)
    store = runner.cache.stores[1]
    assert isinstance(store, StateStore)
    side = store._rows[row].side
    return [store.inputs[:, row, side], store.state[:, row, side]]


@pytest.mark.parametrize(("name", "rounds"), [("delta_net", 100), ("short_conv", 100), ("nemotron", 12)])
def test_after_many_rounds_the_states_are_those_of_a_fresh_run(name: str, rounds: int) -> None:
    runner, fresh = DecoderRunner(state_target(name)), DecoderRunner(state_target(name))
    noise, kept = np.random.default_rng(1), {0: list[int](), 1: list[int]()}
    for turn in range(rounds):
        rows = [0, 1] if turn % 3 else [int(noise.integers(2))]
        nodes, prefix = int(noise.integers(1, 9)), int(noise.integers(1, 3))
        tokens = [noise.integers(0, VOCAB, nodes).tolist() for _ in rows]
        tree = tree_from_lists(tokens, [random_parents(nodes, seed=turn)] * len(rows))
        tree = tree.with_prefix([[*noise.integers(0, VOCAB, prefix - 1).tolist(), t[0]] for t in tokens])
        if turn % 4 == 0:
            # Level by level, as draft models read their own trees.
            for depth in range(int(tree.depth.max()) + 1):
                before = tree.depth <= max(depth, prefix - 1)
                runner.forward(rows, tree, active=before & (tree.depth >= (0 if depth < prefix else depth)))
        else:
            runner.forward(rows, tree)
        for i, row in enumerate(rows):
            path = tree.ancestors(i, int(noise.integers(prefix - 1, tree.nodes)))
            runner.commit(row, path)
            kept[row] += tree.token[i, path].tolist()
            if len(kept[row]) > 60:
                runner.truncate(row, 0)
                kept[row] = []
    for row, tokens in kept.items():
        for token in tokens:
            fresh.forward([row], chain_tree([token]))
            fresh.commit(row, [0])
        assert len(tokens) > 3
        for found, wanted in zip(states_of(runner, row), states_of(fresh, row), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_the_recurrence_has_the_same_bits_in_trees_chunks_and_batches() -> None:
    shape, noise = StateShape(channels=5, taps=4, heads=4, groups=2, key_dim=8, value_dim=6), np.random.default_rng(0)
    text, parents = noise.integers(0, 30, 40).tolist(), random_parents(20, seed=1)
    tokens = noise.integers(0, 30, 20).tolist()
    table = [torch.randn(30, *size) for size in ((5,), (2, 8), (4, 6), (2, 8))]
    table += [torch.rand(30, 4), torch.rand(30, 4)]

    def run(store: StateStore, rows: list[int], lengths: list[int], tree: TokenTree) -> tuple[torch.Tensor, ...]:
        store.reserve(rows, [0] * len(rows))
        store.begin(rows, lengths, tree.prefix_length.tolist(), tree.nodes)
        layout, _ = Layout.from_tree(tree, rows, np.array(lengths), tree.active)
        states = LayerStates(store.pass_states(layout), 0)
        x, k, v, q, decay, beta = (part[tree.token[tree.active]] for part in table)
        weight = torch.linspace(-1, 1, 20).view(5, 4)
        return states.convolve(x, weight), states.recur(k, v, decay, q, beta)

    def after_text(store: StateStore, row: int, chunk: int) -> None:
        for at in range(0, len(text), chunk):
            run(store, [row], [at], chain_tree(text[at : at + chunk]))
            store.keep(row, at, range(len(text[at : at + chunk])))

    whole = StateStore(1, shape, torch.float32, torch.device("cpu"))
    for row, chunk in enumerate((40, 1, 7)):
        after_text(whole, row, chunk)
    states = [whole.state[:, row, whole._rows[row].side] for row in range(3)]
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    tree = tree_from_lists([tokens] * 3, [parents] * 3)
    found = [part.view(3, 20, -1) for part in run(whole, [2, 0, 1], [40] * 3, tree)]
    alone = StateStore(1, shape, torch.float32, torch.device("cpu"))
    for node in range(20):
        alone.truncate(0, 0)
        after_text(alone, 0, 40)
        path = tree.ancestors(0, node)
        for at, step in enumerate(path):
            outputs = run(alone, [0], [40 + at], chain_tree([tokens[step]]))
            alone.keep(0, 40 + at, [0])
        for part, output in zip(found, outputs, strict=True):
            assert all(torch.equal(part[row, node], output.flatten()) for row in range(3))
    whole.keep(0, 40, tree.ancestors(0, 19))
    assert torch.equal(whole.state[:, 0, whole._rows[0].side], alone.state[:, 0, alone._rows[0].side])
    assert torch.equal(whole.inputs[:, 0, whole._rows[0].side], alone.inputs[:, 0, alone._rows[0].side])


def test_without_writing_the_state_only_decays() -> None:
    store = StateStore(1, StateShape(1, 1, 2, 1, 3, 4), torch.float32, torch.device("cpu"))
    store.reserve([0], [0])
    store.state[:] = torch.randn(2, 3, 4)
    tree = chain_tree([0, 0])
    store.begin([0], [0], [2], 2)
    states = LayerStates(store.pass_states(Layout.from_tree(tree, [0], np.zeros(1, int), tree.active)[0]), 0)
    states.recur(
        torch.randn(2, 1, 3), torch.randn(2, 2, 4), torch.full((2, 2), 0.5), torch.randn(2, 1, 3), torch.zeros(2, 2)
    )
    before = store.state[0, 0, 0].clone()
    store.keep(0, 0, [0, 1])
    assert torch.equal(store.state[0, 0, 1], 0.25 * before) and store.restorable(0, 2) == 2
    assert store.restorable(0, 1) == 0
    with pytest.raises(ValueError, match="prefix"):
        store.keep(0, 2, [0])


def test_a_request_that_continues_a_finished_one_reads_only_the_rest() -> None:
    target = state_target("delta_net")
    draft = DraftModel(DecoderRunner(state_target("delta_net", seed=5)))
    engine = Engine(DecoderRunner(target), Method(draft, Chain(3), Match()), prefix_caching=True)
    first = engine.complete([REQUESTS[1]])[0]
    longer = [*REQUESTS[1].prompt, *first.tokens, 5, 6]
    for prompt, reused in ((longer, len(longer) - 3), (longer[:30], 0), ([*longer[:20], 1, 2], 0)):
        request = replace(REQUESTS[0], prompt=prompt)
        found = engine.complete([request])[0]
        assert found.statistics.cached_tokens == reused
        method = build("plain", BuildContext(VOCAB, target))
        assert found.tokens == Engine(DecoderRunner(target), method).complete([request])[0].tokens


def test_training_refuses_states_by_name() -> None:
    with pytest.raises(ValueError, match="recurrent states"):
        full_forward(state_target("delta_net"), torch.zeros(1, 2, 16, dtype=torch.float64))


def native(name: str, precision: Precision = "float32") -> tuple[Decoder, NativeDecoder]:
    """A small model whose sizes the kernels run, with two layers of this kind around one of attention; in torch and on
    the kernels.
    """
    shapes: dict[str, StateConfig] = {
        "delta_net": DeltaNetConfig((0, 2), key_heads=2, value_heads=4, key_dim=24, value_dim=20),
        "short_conv": ShortConvConfig((0, 2), channels=64, bias=True),
        "mamba2": Mamba2Config((0, 2), heads=8, head_dim=16, groups=2, state_dim=24, bias=True),
        "nemotron": Mamba2Config((0, 4), heads=8, head_dim=16, groups=2, state_dim=24),
    }
    config = replace(state_target(name).config, hidden=64, head_dim=16, state=shapes[name])
    if name != "nemotron":
        config = replace(config, layers=3)
    if name == "mamba2":
        config = replace(config, residual_scale=0.6, logit_scale=0.8, unrotated_layers=(1,))
    decoder = tiny_decoder(config, dtype=torch.float32 if precision == "float32" else torch.bfloat16)
    return decoder, NativeDecoder(decoder, precision)


@pytest.mark.covering(1)
@needs_kernels
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", STATES)
def test_the_kernels_give_every_token_the_same_bits_in_trees_chunks_and_batches(
    name: str, precision: Precision
) -> None:
    decoder, network = native(name, precision)
    runner, alone, text = DecoderRunner(network), DecoderRunner(network), random_tokens(40)
    ends = list[torch.Tensor]()
    for row, chunk in ((0, 40), (2, 1), (1, 7)):
        for at in range(0, len(text), chunk):
            piece = text[at : at + chunk]
            logits = runner.forward([row], chain_tree(piece)).logits
            runner.commit(row, range(len(piece)))
        ends.append(logits[-1])
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    tokens, parents = random_tokens(20, seed=3), random_parents(20, seed=1)
    tree = tree_from_lists([tokens] * 3, [parents] * 3)
    found = runner.forward([2, 0, 1], tree).logits.view(3, 20, -1)
    # Row 1 again, level by level, as draft models read their own trees: later passes read what earlier ones recorded.
    one = tree.select(np.array([0]))
    for depth in range(int(one.depth.max()) + 1):
        output = runner.forward([1], one, active=one.depth == depth)
        assert torch.equal(output.logits, found[2, one.depth[0] == depth])
    for node in range(20):
        alone.truncate(0, 0)
        alone.forward([0], chain_tree(text))
        alone.commit(0, range(40))
        for step in tree.ancestors(0, node):
            logits = alone.forward([0], chain_tree([tokens[step]])).logits
            alone.commit(0, [0])
        assert all(torch.equal(found[row, node], logits[0]) for row in range(3))
    path = tree.ancestors(0, 19)
    for row in range(3):
        runner.commit(row, path)
        assert all(torch.equal(a, b) for a, b in zip(states_of(runner, row), states_of(alone, 0), strict=True))
    after = runner.forward([1], chain_tree([5])).logits
    assert torch.equal(after, alone.forward([0], chain_tree([5])).logits)
    if precision == "float32":
        reference = DecoderRunner(decoder).forward([0], chain_tree([*text, *(tokens[node] for node in path), 5]))
        torch.testing.assert_close(after[0], reference.logits[-1], rtol=0, atol=2e-5)


@needs_kernels
def test_layers_without_rotary_positions_run_on_the_kernels() -> None:
    config = replace(TINY, hidden=64, head_dim=16, vocab=VOCAB, layers=3, unrotated_layers=(1,))
    decoder, text = tiny_decoder(config, dtype=torch.float32), random_tokens(30)
    found, wanted = (all_logits(network, text) for network in (NativeDecoder(decoder, "float32"), decoder))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def attention_first(name: str) -> tuple[Decoder, NativeDecoder]:
    """A small model with two layers of this kind after one of attention, which has experts."""
    config = native(name)[0].config
    assert config.state is not None
    experts = MoEConfig(4, 2, 24, layers=(0,))
    config = replace(config, state=replace(config.state, layers=(1, 2)), experts=experts, unrotated_layers=(0, 2))
    decoder = tiny_decoder(config, dtype=torch.float32)
    return decoder, NativeDecoder(decoder, "float32")


@needs_kernels
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["delta_net", "short_conv"])
def test_the_first_layers_are_a_model_of_their_own(name: str, layers: int) -> None:
    """Also where none of them has a state: the states of the whole model at that depth, and its head."""
    decoder, network = attention_first(name)
    text = random_tokens(24)
    output = DecoderRunner(decoder).forward([0], chain_tree(text), hidden_layers=(layers,))
    wanted = decoder.logits(decoder.final_norm(output.hidden_states[0]))
    for whole in (decoder, network):
        cut = whole.first_layers(layers)
        assert cut.config.state_layers == (1,)[: layers - 1] and (cut.config.state is None) is (layers == 1)
        torch.testing.assert_close(torch.from_numpy(all_logits(cut, text)), wanted.double(), rtol=0, atol=2e-4)
    tree = tree_from_lists([random_tokens(9, seed=3)], [random_parents(9, seed=1)])
    found = [DecoderRunner(whole.first_layers(layers)).forward([0], tree).logits for whole in (decoder, network)]
    torch.testing.assert_close(*found, rtol=0, atol=2e-4)


@needs_kernels
@pytest.mark.parametrize("name", ["delta_net", "short_conv"])
def test_layer_skip_drafts_with_attention_layers_alone(name: str) -> None:
    _, network = attention_first(name)
    context = BuildContext(VOCAB, network)
    plain_tokens, found = (
        [c.tokens for c in Engine(DecoderRunner(network), build(method, context), rows=2).complete(REQUESTS)]
        for method in ("plain", "layer_skip")
    )
    greedy = [i for i, request in enumerate(REQUESTS) if not request.sampling_params.temperature]
    assert [found[i] for i in greedy] == [plain_tokens[i] for i in greedy]


@needs_kernels
@pytest.mark.parametrize("name", STATES)
def test_packed_layers_are_read_from_the_cache_of_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "WORTH_CACHING", 0)
    weights, config, cpu = FileWeights(model_file(tmp_path)), native(name)[0].config, torch.device("cpu")
    text = random_tokens(20)
    wanted = all_logits(build_network(config, weights, "bfloat16", cpu), text)
    finish_writing()
    weights.reads.clear()
    for network in (
        build_network(config, weights, "bfloat16", cpu),
        build_streamed_network(config, weights, "bfloat16", cpu, 10**9),
    ):
        assert (all_logits(network, text) == wanted).all()
    assert not any("proj" in read for read in weights.reads)
