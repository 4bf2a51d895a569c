"""The multi-stage MLP speculator: its constants, its two forms, and drafting equal to the training forward."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.catalogue.feature_level import mlp_speculator_method
from foretell.catalogue.options.feature_level import MLPSpeculatorOptions
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree
from foretell.draft import MLPSpeculatorDrafter
from foretell.draft.base import Predictor
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.kernels import DynamicTrees, Precision
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, LLMCadTree
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.mlp_speculator import MLPSpeculator, MLPSpeculatorConfig
from foretell.speculator.network.pack import pack_network
from foretell.testing import TINY, tiny_decoder
from helpers import after_prompt, chain_tree, context_of, drafted_paths, random_tokens, run, tokens_of

CONFIG = replace(TINY, vocab=31)
CARD = TargetInfo(name="tiny", hidden=CONFIG.hidden, vocab=CONFIG.vocab, layers=CONFIG.layers)


def small_target() -> Decoder:
    return tiny_decoder(CONFIG, dtype=torch.float32)


def network_of(seed: int = 0, **values: Any) -> MLPSpeculator:
    target = small_target()
    torch.manual_seed(seed)
    network = MLPSpeculator(
        MLPSpeculatorConfig(target=CARD, **{"inner": 40, **values}),
        EmbeddingAndHead(target.embedding.detach(), target.head.weight.detach()),
    )
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network.requires_grad_(False)


def scored(network: MLPSpeculator, features: list[torch.Tensor], given: torch.Tensor) -> list[torch.Tensor]:
    """The training forward's logits, stage by stage."""
    return network.forward(
        features, given, lambda readings: [network.head_logits(r, i) for i, r in enumerate(readings)]
    )


@pytest.mark.parametrize(("stages", "expected"), [(3, 0.890899), (4, 0.917004), (5, 0.933033), (7, 0.951695)])
def test_a_state_keeps_half_of_its_variance_to_the_last_stage(stages: int, expected: float) -> None:
    config = MLPSpeculatorConfig(target=CARD, stages=stages, inner=100)
    assert config.state_weight == pytest.approx(expected, abs=5e-7)
    assert config.state_weight ** (2 * stages) == pytest.approx(0.5)
    assert config.emb_weight**2 / 100 == pytest.approx((1 - config.state_weight**2) / 2)


def test_a_scaled_input_has_variance_one_half() -> None:
    z = 17 * torch.randn(50, CONFIG.hidden)
    scaled = network_of(scale_input=True).initial_state([z])
    torch.testing.assert_close(scaled.square().mean(-1), torch.full((50,), 0.5))
    torch.testing.assert_close(network_of().initial_state([z]), z)


def shapes(modules: torch.nn.ModuleList) -> list[tuple[int, ...]]:
    return [tuple(m.get_parameter("weight").shape) for m in modules]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_tied_stages_share_all_but_the_first_projection(tied: bool, own: bool) -> None:
    network = network_of(tied=tied, own_embedding=own)
    shared, projections = (1, 2) if tied else (4, 4)
    wide = CONFIG.vocab if own else CONFIG.hidden
    assert shapes(network.project) == [(40, 16)] + [(40, 40)] * (projections - 1)
    assert shapes(network.token) == [(wide, 40) if own else (40, wide)] * shared
    assert shapes(network.output) == [(wide, 40)] * shared
    assert len(network.norm) == shared


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "values", [{}, {"scale_input": True}, {"own_head": True, "stages": 1}, {"own_embedding": True, "draft_vocab": None}]
)
def test_the_published_form_gives_the_same_logits(tied: bool, values: dict[str, Any]) -> None:
    network = network_of(tied=tied, **{"draft_vocab": 12, **values})
    if network.token_of is not None:
        network.set_draft_vocab(torch.arange(3, 27, 2))
    z, given = torch.randn(6, CONFIG.hidden), torch.randint(0, CONFIG.vocab, (6, network.stages))
    for stage, logits in enumerate(scored(network, [z], given)):
        expected = published_logits(network.published_tensors(), network.config, z, given, stage)
        kept = slice(None) if network.token_of is None else network.token_of
        torch.testing.assert_close(logits, expected[:, kept], rtol=1e-4, atol=1e-4)


def published_logits(
    weights: dict[str, torch.Tensor], config: MLPSpeculatorConfig, z: torch.Tensor, given: torch.Tensor, stage: int
) -> torch.Tensor:
    """The released recurrence, written from its description."""

    def of(kind: str, i: int, part: str = "weight") -> torch.Tensor:
        tied = min(i, 1) if kind == "proj" else 0
        return weights[f"{kind}.{tied if config.tied else i}.{part}"]

    keep = 0.5 ** (0.5 / config.stages)
    emb = ((1 - keep**2) * config.inner / 2) ** 0.5
    s = z / z.square().mean(-1, keepdim=True).sqrt() / 2**0.5 if config.scale_input else z
    for i in range(stage + 1):
        a = s @ of("proj", i).T + emb / keep * of("emb", i)[given[:, i]]
        a = a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt() * of("ln", i) + of("ln", i, "bias")
        s = a * 0.5 * (1 + torch.erf(a / 2**0.5))
    return s @ of("head", stage).T


def test_what_no_published_format_can_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match="no place for layers \\[1\\] of the target"):
        network_of(more_hidden_layers=(1,)).published_tensors()
    with pytest.raises(ValueError, match="neither a draft_vocab"):
        MLPSpeculatorConfig(target=CARD, own_embedding=True, draft_vocab=4)


def test_untrained_stages_hand_the_targets_state_on() -> None:
    target = small_target()
    network = MLPSpeculator(
        MLPSpeculatorConfig(target=CARD, inner=64), EmbeddingAndHead(target.embedding, target.head.weight)
    )
    with torch.no_grad():
        for token, project, output in zip(network.token, network.project, network.output, strict=True):
            token.get_parameter("weight").zero_()
            for weight in (project.get_parameter("weight"), output.get_parameter("weight")):
                weight[weight.abs() < 0.3 * weight.abs().max()] = 0
        z = torch.randn(20, CONFIG.hidden)
        for logits in scored(network, [z], torch.zeros(20, 4, dtype=torch.long)):
            together = torch.stack([logits, z @ target.head.weight.T])
            assert torch.corrcoef(together.flatten(1))[0, 1] > 0.95


class Watched(MLPSpeculatorDrafter):
    """Remembers what it was asked and what it said."""

    def __init__(self, network: MLPSpeculator) -> None:
        super().__init__(network)
        self.said: list[tuple[TokenTree, list[list[int]], torch.Tensor, np.ndarray]] = []

    def top_tokens(self, tree: Any, frontier: Any, context: Any, count: int, noise: Any = None) -> Any:
        narrow, wide = (
            super().top_tokens(tree, frontier, context, count, noise),
            Predictor.top_tokens(self, tree, frontier, context, count, noise),
        )
        np.testing.assert_array_equal(narrow.logit_index, wide.logit_index)
        np.testing.assert_array_equal(narrow.token, wide.token)
        np.testing.assert_allclose(narrow.probability, wide.probability, rtol=1e-5)
        return narrow

    def expand(self, tree: Any, frontier: Any, context: Any) -> Any:
        logits, at = super().expand(tree, frontier, context)
        self.said.append((tree, [t.tokens.tolist() for t in context.sequences], logits, at))
        return logits, at


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "shape",
    [Chain(4, draw=False), BranchingTree((2, 2, 1), draw=False), DynamicTree(4, 3, 8), LLMCadTree(8)],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("values", [{}, {"tied": True, "more_hidden_layers": (1,)}])
def test_drafting_scores_are_those_of_the_training_forward(shape: Any, values: dict[str, Any]) -> None:
    target, network = small_target(), network_of(draft_vocab=20, **values)
    drafter = Watched(network)
    prompts = [random_tokens(n, CONFIG.vocab, seed=n) for n in (4, 9, 23)]
    engine = Engine(DecoderRunner(target), Method(drafter, shape, Match()), rows=2, chunk=8)
    plain = run(engine, [Request(p, max_new_tokens=12) for p in prompts])
    assert [len(tokens_of(u)) for u in plain] == [12] * 3
    compared = 0
    for tree, texts, logits, at in drafter.said:
        for row, node in np.argwhere(at >= 0).tolist():
            path = tree.ancestors(row, node)
            output = DecoderRunner(target).forward(
                [0], chain_tree(texts[row][:-1]), hidden_layers=network.hidden_layers
            )
            features = [f[-1:] for f in output.hidden_states]
            given = torch.tensor([tree.token[row, path].tolist() + [0] * (4 - len(path))])
            expected = network.to_target_vocab(scored(network, features, given)[len(path) - 1])
            torch.testing.assert_close(logits[at[row, node]], expected[0], rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > 30


def test_trees_deeper_than_the_stages_are_refused() -> None:
    network = network_of(stages=3)
    for values in ({"num_steps": 4}, {"speculative_tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
                   {"draft_sample_method": "probabilistic", "num_speculative_tokens": 4}):  # fmt: skip
        with pytest.raises(ValueError, match="3 stages, one for each level, and 4 levels were asked for"):
            mlp_speculator_method(network, MLPSpeculatorOptions.from_values("mlp_speculator", dict(values)))


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize(("precision", "near"), [("float32", 2e-5), ("int8", 0.5)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_on_the_kernels_is_that_of_torch(tied: bool, precision: Precision, near: float) -> None:
    plain = network_of(5, tied=tied, draft_vocab=20, more_hidden_layers=(1,))
    fast = pack_network(plain, precision)
    assert fast.native is not None and plain.native is None and pack_network(fast) is fast
    state = torch.randn(7, 2 * CONFIG.hidden)
    for stage in range(4):
        token = torch.randint(0, CONFIG.vocab, (7,))
        alone = [fast.draft_step(state[i : i + 1], token[i : i + 1], stage) for i in range(7)]
        expected, found = plain.draft_step(state, token, stage), fast.draft_step(state, token, stage)
        for mine, right, parts in zip(found, expected, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(mine, right, atol=near, rtol=0)
            assert torch.equal(mine, torch.cat(parts))
        state = expected[0]


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize("tied", [False, True])
def test_published_stages_draft_with_their_packed_heads(tied: bool) -> None:
    plain = network_of(5, tied=tied, own_embedding=True)
    fast = pack_network(plain, "float32")
    state, token = torch.randn(7, CONFIG.hidden), torch.randint(0, CONFIG.vocab, (7,))
    for stage in range(4):
        expected, found = plain.draft_step(state, token, stage), fast.draft_step(state, token, stage)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right, atol=2e-5, rtol=0)
        state = expected[0]


class Stepwise(MLPSpeculatorDrafter):
    """Has its trees grown level by level."""

    def grow_dynamic_tree(self, context, sizes, bounds):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.covering(2)
@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.2, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=4, min_p=0.02),
    ],
    ids=["greedy", "sampled", "top_p", "top_k"],
)
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "shape",
    [DynamicTree(1, 3, 9), DynamicTree(9, 3, 60, 1e-4), DynamicTree(4, 4, 7), DynamicTree(4, 2, 9, 0.02)],
    ids=str,
)
def test_the_kernels_grow_the_trees_that_grow_level_by_level(
    precision: Precision, tied: bool, shape: DynamicTree, sampling: SamplingParams
) -> None:
    """Texts of unequal length, one of them with room for two more tokens, one with none; with the target's noise."""
    network = pack_network(network_of(7, tied=tied, draft_vocab=20, more_hidden_layers=(1,)), precision)
    network.set_draft_vocab(torch.arange(CONFIG.vocab)[3:23])
    texts = [random_tokens(n, 31, seed=n) for n in (9, 3, 17, 5)]
    context = replace(context_of(*texts, sampling=sampling), max_depth=np.array([99, 2, 99, 0]), coupled=True)
    step = after_prompt(small_target(), context, network.hidden_layers)
    found = [drafted_paths(shape, drafter, step) for drafter in (MLPSpeculatorDrafter(network), Stepwise(network))]
    assert found[0] == found[1]
    assert [bool(part) for part in found[0]] == [True, True, True, False]
    assert all(len(path) <= 3 for path in found[0][1]) and all(len(path) <= 5 for path in found[0][0])


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_the_kernels_refuse_what_is_deeper_than_the_stages_or_no_token() -> None:
    kernels = pack_network(network_of(7), "float32").native
    assert kernels is not None
    for depth, token in ((5, 0), (4, 31), (4, -1)):
        with pytest.raises(ValueError, match="there are 4 stages and 31 tokens"):
            kernels.grow_dynamic_trees(
                torch.zeros(1, CONFIG.hidden),
                [token],
                DynamicTrees(np.ones(1, int), (depth, 2, 4), (0.0, 0.0)),
            )
