"""P-EAGLE: drafting is the forward pass of training, rollouts see what they should, and the first depth is EAGLE-3's
first step.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.core.sampling import SamplingParams
from foretell.draft import PEagleDrafter
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import Eagle3, EagleConfig
from foretell.speculator.network.p_eagle import PEagle, PEagleConfig
from foretell.speculator.network.pack import DraftPrecision, pack_network
from helpers import (
    VOCAB,
    after_prompt,
    chain_tree,
    context_of,
    drafted_paths,
    exact_distribution,
    generate,
    p_value,
    random_tokens,
    target,
    unchecked,
    wide_target,
)

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "hidden_layers": (0, 1, 3)}


@cache
def network_of(vocab: int = VOCAB, subset: int | None = 20, wide: bool = False, **changed: Any) -> PEagle:
    """Random weights, in float64 unless for the kernels."""
    of = wide_target() if wide else target(vocab)
    card = TargetInfo(name="tiny", hidden=of.config.hidden, vocab=vocab, layers=2)
    sizes = SIZES | {"target": card, "draft_vocab": subset, "layers": 2, "depth": 4, "fc_norm": True}
    config = PEagleConfig.model_validate(sizes | ({"head_dim": 16} if wide else {}) | changed)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = PEagle(config, EmbeddingAndHead(of.embedding.detach(), of.head.weight.detach()))
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    if subset is not None:
        network.set_draft_vocab(torch.arange(vocab)[1 : 1 + subset])
    return network if wide else network.double()


def features_of(network: PEagle, text: Sequence[int]) -> list[torch.Tensor]:
    output = DecoderRunner(target()).forward([0], chain_tree(text), hidden_layers=network.hidden_layers)
    return [f[None].clone() for f in output.hidden_states]


def predictions(
    network: PEagle, text: Sequence[int], anchors: Sequence[int], features: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits of all depths of rollouts after the positions `anchors` in the forward pass of training, [a p w]."""
    first = torch.zeros(1, len(text) - 1, dtype=torch.bool)
    first[0, list(anchors)] = True
    wanted = [first, *[torch.ones(1, len(anchors), dtype=torch.bool)] * (network.depth - 1)]
    states = features_of(network, text) if features is None else features
    return torch.stack(network(torch.tensor([text]), states, torch.tensor([anchors]), wanted), 1)


class Stepwise(PEagleDrafter):
    """Grows trees level by level."""

    def grow_dynamic_tree(self, context, sizes, bounds):  # type: ignore[no-untyped-def]
        return None


class Recording(Stepwise):
    """Notes the logits of every depth by the text before."""

    def __init__(self, network: PEagle) -> None:
        super().__init__(network)
        self.found: dict[tuple[int, ...], torch.Tensor] = {}

    def _draft(self, rows, texts, anchor):  # type: ignore[no-untyped-def]
        blocks = super()._draft(rows, texts, anchor)
        for text, logits in zip(texts, blocks.logits, strict=True):
            self.found[tuple(text.tokens.tolist())] = logits
        return blocks


def test_drafting_is_the_forward_pass_of_training() -> None:
    """In every step of requests that end, begin and accept paths of all lengths: the same logits at every depth."""
    network = network_of()
    drafter = Recording(network)
    requests = [
        Request(random_tokens(n, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0)) for n in (2, 21, 9, 1)
    ]
    with unchecked():
        texts = generate(Method(drafter, DynamicTree(9, 2, 12), Match()), requests, rows=3, chunk=8)
    assert [len(t) for t in texts] == [8] * 4 and len(drafter.found) > 12
    for text, logits in drafter.found.items():
        expected = predictions(network, text, [len(text) - 2])[0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_a_rollout_sees_what_is_before_it_and_no_other_rollout() -> None:
    network, text = network_of(), random_tokens(15, seed=1)
    features = features_of(network, text)
    logits = predictions(network, text, [4, 9], features)
    for position, changed in ((4, [True, True]), (5, [False, True]), (9, [False, True]), (10, [False, False])):
        other = [f.clone() for f in features]
        other[0][0, position] += 1
        same = torch.isclose(predictions(network, text, [4, 9], other), logits).all(-1).all(-1)
        assert same.tolist() == [not c for c in changed], position
    alone = torch.cat([predictions(network, text, [a], features) for a in (4, 9)])
    torch.testing.assert_close(alone, logits)


def test_masks_see_the_masks_before_them_only() -> None:
    network, text = network_of(), random_tokens(15, seed=2)
    logits, append = predictions(network, text, [9]), network.append_masks

    def disturbed(token, feature, count):  # type: ignore[no-untyped-def]
        embedded, feature = append(token, feature, count)
        embedded, feature = embedded.clone(), feature.clone()
        feature[:, -2] += 1
        return embedded, feature

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "append_masks", disturbed)
        same = torch.isclose(predictions(network, text, [9]), logits).all(-1)[0]
    assert same.tolist() == [True, True, False, False]


def eagle3_of(network: PEagle, layers: int) -> Eagle3:
    """EAGLE-3 with random weights that reads and drafts what the network does."""
    config = network.config.model_dump(exclude={"kind", "depth", "mask_token"}) | {"layers": layers}
    plain = Eagle3(EagleConfig(**config), EmbeddingAndHead(target().embedding.detach(), target().head.weight.detach()))
    assert network.token_of is not None
    plain.set_draft_vocab(network.token_of)
    return plain.double()


def assert_the_first_depths_agree(network: PEagle, plain: Eagle3) -> None:
    text, mask = random_tokens(12, seed=4), torch.zeros(1, 11, dtype=torch.bool)
    mask[0, 7] = True
    (step,) = plain(torch.tensor([text]), features_of(network, text), [mask])
    torch.testing.assert_close(predictions(network, text, [7])[0, :1], step.logits)


def test_the_first_depth_is_the_first_step_of_eagle3() -> None:
    network = network_of()
    plain = eagle3_of(network, layers=2)
    plain.load_state_dict({n: t for n, t in network.state_dict().items() if not n.startswith("mask")})
    assert_the_first_depths_agree(network, plain)


def test_it_starts_from_an_eagle3_of_fewer_layers() -> None:
    network, mask = deepcopy(network_of()), network_of().mask.clone()
    plain = eagle3_of(network, layers=1)
    network.load_state_dict(network.adapt_state_dict(plain))
    assert_the_first_depths_agree(network, plain)
    assert torch.equal(network.mask, mask)


def test_a_tree_of_one_node_per_level_is_the_chain() -> None:
    network, text = network_of(), random_tokens(10, seed=6)
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    with unchecked():
        chain = drafted_paths(Chain(4, draw=False), PEagleDrafter(network), step)
        assert chain == drafted_paths(DynamicTree(4, 1, 4), PEagleDrafter(network), step)
    assert max(map(len, chain[0])) == 5  # with the root


def test_sampled_drafts_keep_the_distribution() -> None:
    network, sampling, start = network_of(4, subset=3), SamplingParams(temperature=2.5), [1, 0, 2]
    requests = [Request(start, SamplingParams(temperature=2.5, seed=i), max_new_tokens=3) for i in range(500)]
    with unchecked():
        method = Method(PEagleDrafter(network), Chain(3, draw=True), Rejection())
        texts = generate(method, requests, rows=250, chunk=1 << 14, vocab=4)
    where = np.ravel_multi_index(np.array(texts).T, (4,) * 3)
    assert p_value(np.bincount(where, minlength=64), exact_distribution(target(4), start, 3, sampling)) > 1e-3


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_the_kernels_draft_what_torch_drafts() -> None:
    plain = network_of(wide=True)
    packed = pack_network(plain, "float32")
    assert packed.native_stack is not None
    texts, found = [random_tokens(n, seed=n) for n in (9, 17)], []
    step = after_prompt(wide_target(), context_of(*texts), plain.hidden_layers)
    for network in (plain, packed):
        drafter = Recording(network)
        drafter.observe(step)
        Chain(4, draw=False).grow(drafter, context_of(*texts))
        found.append([drafter.found[tuple(text)] for text in texts])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("shape", [DynamicTree(1, 3, 9), DynamicTree(4, 3, 40, 1e-4), DynamicTree(9, 4, 7)], ids=str)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"norm_output": True, "norm_before_residual": True, "fc_norm": False},
        {"window": 5, "window_layers": (1,), "sink_layers": (0,)},
    ],
)
def test_the_kernels_grow_the_trees_that_grow_level_by_level(
    precision: DraftPrecision, shape: DynamicTree, changed: dict[str, Any]
) -> None:
    """Texts of unequal length, one of them with room for two more tokens, one with none."""
    network = pack_network(network_of(wide=True, **changed), precision)
    assert network.native is not None
    texts = [random_tokens(n, seed=n) for n in (9, 3, 17, 5)]
    context = replace(context_of(*texts), max_depth=np.array([4, 2, 4, 0]))
    step = after_prompt(wide_target(), context, network.hidden_layers)
    found = [drafted_paths(shape, drafter, step) for drafter in (PEagleDrafter(network), Stepwise(network))]
    assert found[0] == found[1]
    assert [bool(part) for part in found[0]] == [True, True, True, False]
    assert all(len(path) <= 3 for path in found[0][1])
