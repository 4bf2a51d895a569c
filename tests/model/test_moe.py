"""Mixture-of-experts targets: dropless passes, and the number of experts that a pass reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import DraftModel, NoDrafter, PromptLookup
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Completion, Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.layer import FeedForward
from foretell.model.block.linear import Linear
from foretell.model.block.moe import ExpertFeedForward
from foretell.model.cache.block_table import BLOCK_SLOTS
from foretell.model.config.model import ModelConfig, MoEConfig
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, RootOnly, Trie
from foretell.testing import TINY, tiny_decoder, tiny_deepseek, tiny_gpt_oss, tiny_moe
from helpers import VOCAB, chain_tree, random_tokens

SMALL = replace(TINY, vocab=VOCAB)


def mixture(count: int, active: int, seed: int = 0) -> ExpertFeedForward:
    """Random experts of width 3 on a stream of width 16."""
    noise = torch.Generator().manual_seed(seed)
    router = Linear(torch.randn(count, 16, generator=noise))
    gate_up, down = torch.randn(count, 6, 16, generator=noise), torch.randn(count, 16, 3, generator=noise)
    return ExpertFeedForward(MoEConfig(count, active, 3), router, [*map(Linear, gate_up)], [*map(Linear, down)])


def sparse_target() -> Decoder:
    return tiny_decoder(tiny_moe(replace(TINY, vocab=VOCAB)))


def decoded(method: AnyMethod) -> Completion:
    engine = Engine(DecoderRunner(sparse_target()), method)
    return engine.complete([Request(random_tokens(12), SamplingParams(temperature=2.5), max_new_tokens=30)])[0]


@pytest.mark.parametrize(("count", "active"), [(8, 2), (64, 8), (4, 4)])
def test_distinct_experts_follow_the_formula_for_random_routing(count: int, active: int) -> None:
    layer = mixture(count, active)
    noise = torch.Generator().manual_seed(1)
    # An unbiased router: every token has random scores.
    layer.router.weight.data = torch.eye(count, 16 if count <= 16 else count)
    width = layer.router.weight.shape[1]
    for tokens in (1, 2, 4, 8, 16):
        seen = []
        for _ in range(200):
            _, index = layer.route(torch.randn(tokens, width, generator=noise))
            seen.append(len(index.unique()))
        expected = count * (1 - (1 - active / count) ** tokens)
        assert max(seen) <= min(count, active * tokens)
        assert np.mean(seen) == pytest.approx(expected, rel=0.03)


def test_a_batched_pass_equals_passes_of_one_token() -> None:
    layer = mixture(8, 2).double()
    x = torch.randn(13, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, routes = layer.forward_with_routes(x)
    alone = [layer.forward_with_routes(x[i : i + 1]) for i in range(len(x))]
    assert torch.allclose(out, torch.cat([o for o, _ in alone]), atol=1e-12)
    assert torch.equal(routes, torch.cat([r for _, r in alone])) and routes.shape == (13, 2)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(layer(x[order]), out[order], atol=1e-12)


@pytest.mark.parametrize(("count", "active"), [(1, 1), (4, 4), (8, 2)])
def test_equal_experts_are_one_dense_network_since_gates_sum_to_one(count: int, active: int) -> None:
    layer = mixture(count, active).double()
    for name, weight in layer.named_parameters():
        if name.startswith(("gate_up", "down")):
            weight.data.copy_(layer.get_parameter(f"{name.split('.')[0]}.0.weight").data)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gates, _ = layer.route(x)
    assert torch.allclose(gates.sum(-1), torch.ones(9, dtype=gates.dtype))
    first, last = layer.gate_up[0], layer.down[0]
    assert isinstance(first, Linear) and isinstance(last, Linear)
    assert torch.allclose(layer(x), FeedForward(first, last, "silu")(x), atol=1e-12)


def test_all_experts_weighted_by_the_router_are_a_dense_layer() -> None:
    """With k = E nothing is left out: the sum over all experts by the softmax of the router."""
    layer = mixture(4, 4).double()
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    share = torch.softmax(layer.router(x), -1)
    parts = [FeedForward(up, down, "silu")(x) for up, down in zip(layer.gate_up, layer.down, strict=True)]  # type: ignore[arg-type]
    assert torch.allclose(layer(x), (share[..., None] * torch.stack(parts, 1)).sum(1), atol=1e-12)


def test_distinct_experts_grow_and_grow_less_and_less() -> None:
    """Of one text, and of the formula: A(1) = k, concave, at most min(E, k N)."""
    layer = mixture(32, 4)
    noise = torch.Generator().manual_seed(6)
    seen = np.zeros(24)
    for _ in range(300):
        _, index = layer.route(torch.randn(24, 16, generator=noise))
        seen += [len(index[: n + 1].unique()) for n in range(24)]
    seen /= 300
    formula = np.array([32 * (1 - (1 - 4 / 32) ** n) for n in range(1, 25)])
    for found in (seen, formula):
        assert found[0] == pytest.approx(4) and (np.diff(found) > 0).all()
        assert (np.diff(found, 2) < 0.12).all() and (found <= np.minimum(32, 4 * np.arange(1, 25))).all()


def test_a_pass_reports_distinct_experts_per_layer() -> None:
    target = sparse_target()
    runner = DecoderRunner(target)
    one = runner.forward([0], chain_tree([5])).experts
    assert one == (2, 2)
    runner.commit(0, [0])
    several = runner.forward([0], chain_tree(random_tokens(9))).experts
    assert all(2 <= n <= 4 for n in several) and len(several) == 2
    assert DecoderRunner(tiny_decoder()).forward([0], chain_tree([5])).experts == ()


def test_a_pass_reports_the_experts_of_every_node() -> None:
    """A tree's nodes have the experts that they have when they are decoded alone (the card's fourth check)."""
    wide = tiny_decoder(tiny_moe(replace(SMALL, hidden=64, head_dim=16)))
    torch_runner, native_runner = DecoderRunner(wide), DecoderRunner(NativeDecoder(wide, "float32"))
    for runner in (torch_runner, native_runner):
        tree = tree_from_lists([[7, 8, 9, 10]], [[-1, 0, 0, 1]])
        output = runner.forward([0], tree)
        runner.truncate(0, 0)
        assert len(output.routes) == 2
        for path in ([0, 1, 3], [0, 2]):
            runner.truncate(0, 0)
            alone = runner.forward([0], chain_tree([int(tree.token[0, node]) for node in path]))
            for whole, own in zip(output.routes, alone.routes, strict=True):
                assert [sorted(r) for r in whole[path].tolist()] == [sorted(r) for r in own.tolist()]
        assert output.experts == tuple(len(np.unique(layer)) for layer in output.routes)


def test_speculation_reads_more_experts_per_pass_for_the_same_text() -> None:
    plain = decoded(Method(NoDrafter(), RootOnly(), Match()))
    draft = DraftModel(DecoderRunner(sparse_target()))
    fast = decoded(Method(draft, Chain(4), Match()))
    assert fast.tokens == plain.tokens
    assert plain.statistics.experts_per_pass == 2
    assert 2 < fast.statistics.experts_per_pass <= 4


@pytest.mark.parametrize("config", [tiny_gpt_oss(SMALL), tiny_deepseek(SMALL)], ids=lambda c: c.architecture)
def test_drafted_trees_do_not_change_the_text(config: ModelConfig) -> None:
    target, found = tiny_decoder(config), []
    request = Request(random_tokens(12), SamplingParams(temperature=1.0), max_new_tokens=30)
    for method in (
        Method(NoDrafter(), RootOnly(), Match()),
        Method(DraftModel(DecoderRunner(tiny_decoder(SMALL, seed=3))), DynamicTree(3, 2, 6), Match()),
        Method(PromptLookup(2), Trie(8), Match()),
    ):
        found.append(Engine(DecoderRunner(target), method).complete([request])[0].tokens)
    assert found[0] == found[1] == found[2]


def test_the_cache_of_latent_attention_holds_one_vector_per_token() -> None:
    runner = DecoderRunner(tiny_decoder(tiny_deepseek(SMALL)))
    runner.forward([0], chain_tree(random_tokens(5)))
    assert runner.cache.nbytes == 2 * BLOCK_SLOTS * (8 + 4) * 8


def test_dense_models_report_no_experts() -> None:
    engine = Engine(DecoderRunner(tiny_decoder()), Method(NoDrafter(), RootOnly(), Match()))
    assert engine.complete([Request([1, 2], max_new_tokens=4)])[0].statistics.experts_per_pass == 0
