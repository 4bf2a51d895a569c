"""Medusa's and blockwise heads as drafters: when they may draft, what from, and how fast forms compare with plain
ones.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.catalogue import BuildContext, build
from foretell.catalogue.heads import heads_tree
from foretell.catalogue.options.heads import MedusaOptions
from foretell.catalogue.speculators import trained_speculator
from foretell.core.sampling import SamplingParams
from foretell.draft import HeadsDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, FixedTree
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.heads import HeadsNetwork
from foretell.speculator.network.pack import pack_network
from helpers import (
    VOCAB,
    all_logits,
    chain_tree,
    context_of,
    engine_for,
    generate,
    naive,
    random_tokens,
    run,
    speculator,
    statistics_of,
    target,
)

KINDS = ("medusa", "blockwise")
PROMPT = random_tokens(11, seed=4)


def network(kind: str) -> HeadsNetwork:
    found = trained_speculator(BuildContext(VOCAB, target(), speculators=(speculator(kind),)), kind)
    assert isinstance(found, HeadsNetwork)
    return found


def fresh(kind: str, embedding_and_head: EmbeddingAndHead, **sizes: object) -> HeadsNetwork:
    config_type, network_type = NETWORKS[kind]
    card = TargetInfo(name="toy", hidden=embedding_and_head.hidden, vocab=embedding_and_head.vocab, layers=2)
    made = network_type(config_type.model_validate({"target": card, **sizes}), embedding_and_head)
    assert isinstance(made, HeadsNetwork)
    return made


@pytest.mark.parametrize(("kind", "own"), [("medusa", False), ("medusa", True), ("blockwise", False)])
def test_untrained_heads_give_the_targets_logits(kind: str, own: bool) -> None:
    embedding_and_head = EmbeddingAndHead(torch.randn(20, 16), torch.randn(20, 16), softcap=5.0)
    made, kept = fresh(kind, embedding_and_head, heads=3, draft_vocab=12, own_head=own), torch.arange(1, 20)[:12]
    made.set_draft_vocab(kept)
    h = torch.randn(2, 5, 16)
    base = torch.tanh(h @ embedding_and_head.head.T / 5) * 5
    for head in range(3):
        torch.testing.assert_close(made(h)[..., head, :], base[..., kept])
    wide = made.to_target_vocab(made(h))
    assert wide.shape == (2, 5, 3, 20)
    assert set(wide[0, 0, 0].isinf().nonzero()[:, 0].tolist()) == set(range(20)) - set(kept.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drafted_before_the_prompt_is_read(kind: str) -> None:
    method = Method(HeadsDrafter(network(kind)), FixedTree(((0,), (1,), (0, 0), (0, 0, 0))), Match())
    engine = engine_for(method, rows=1, chunk=4)
    number = engine.submit(Request(PROMPT, max_new_tokens=12))
    context = context_of(PROMPT)
    rows = replace(context, rows=(0,))
    for _ in range(2):
        engine.step()
        assert method.draft.max_depths(rows).tolist() == [0]
    engine.step()
    assert engine.statistics[number].drafted == 0
    engine.step()
    assert engine.statistics[number].drafted == 4


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_come_from_the_state_that_produced_the_root_whatever_the_path(kind: str) -> None:
    heads = HeadsDrafter(network(kind))
    engine = engine_for(Method(heads, FixedTree(((0,), (2,), (0, 0), (2, 1))), Match()), rows=1)
    engine.submit(Request(PROMPT, max_new_tokens=20))
    text = list(PROMPT)
    for _ in range(4):
        for update in engine.step():
            text += update.tokens
    output = DecoderRunner(target()).forward([0], chain_tree(text[:-1]), hidden_layers=heads.hidden_layers)
    wanted = heads.network.to_target_vocab(heads.network(output.hidden_states[0][-1]))
    (running,) = engine._scheduler.running
    context = replace(context_of(text), sequences=(running.sequence,))
    tree = FixedTree(((0,), (2,), (0, 0), (2, 1))).grow(heads, context)
    order = wanted.argsort(-1, descending=True)
    assert tree.token[0].tolist() == [text[-1], *order[0, [0, 2]].tolist(), *order[1, [0, 1]].tolist()]
    logits, at = heads.expand(tree, np.array([[1, 2]]), context)
    assert at[0, 1] == at[0, 2]
    torch.testing.assert_close(logits[at[0, 1]], wanted[1])


@pytest.mark.parametrize(
    "shape", [Chain(9, draw=False), FixedTree(tuple((0,) * n for n in range(1, 10))), DynamicTree(9, 3, 20)]
)
def test_no_draft_is_deeper_than_there_are_heads(shape: object) -> None:
    method = Method(HeadsDrafter(network("medusa")), shape, Match())  # type: ignore[arg-type]
    request = Request(PROMPT, max_new_tokens=30)
    engine = engine_for(method)
    (updates,) = run(engine, [request])
    assert [t for u in updates for t in u.tokens] == naive(target(), request)
    assert all(1 <= len(u.tokens) <= 4 for u in updates)
    assert len(statistics_of(updates).accepted_per_position) <= 3


def test_a_tree_of_the_root_alone_is_plain_decoding() -> None:
    context = BuildContext(VOCAB, target(), speculators=(speculator("medusa"),))
    engine = engine_for(build("medusa", context, {"speculative_tree": []}))
    statistics = engine.complete([Request(PROMPT, max_new_tokens=15)])[0].statistics
    assert (statistics.drafted, statistics.target_passes) == (0, 15)


def test_typical_acceptance_of_heads_is_greedy_at_temperature_zero() -> None:
    parts = BuildContext(VOCAB, target(), speculators=(speculator("medusa"),))
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=20) for n in (3, 9)]
    assert generate(build("medusa_lossy", parts), requests) == [naive(target(), r) for r in requests]


def test_the_earned_tree_is_the_default_and_can_be_replaced() -> None:
    heads = network("medusa")
    paths = ((0,), (0, 0), (1,), (0, 0, 0), (1, 0), (2,))
    heads.set_tree(paths, (0.6, 0.4, 0.2, 0.2, 0.1, 0.05))
    assert list(heads.paths) == list(paths)
    assert set(heads_tree(heads, MedusaOptions()).choices) == set(paths)
    assert set(heads_tree(heads, MedusaOptions(num_draft_tokens=3)).choices) == set(paths[:3])
    assert heads_tree(heads, MedusaOptions(speculative_tree=[[0], [3]])).choices == ((0,), (3,))
    flat = heads_tree(heads, MedusaOptions(acceptance=[0.2, 0.1], num_draft_tokens=2))
    assert flat.choices == ((0,), (1,))
    heads.set_tree((), ())
    assert not heads.paths
    assert max(map(len, heads_tree(heads, MedusaOptions()).choices)) <= heads.heads


def test_blockwise_heads_draft_for_the_lossy_method_where_they_are_named() -> None:
    parts = BuildContext(VOCAB, target(), speculators=(speculator("blockwise"),))
    assert isinstance(build("blockwise_lossy", parts).draft, HeadsDrafter)
    exact = build("blockwise_lossy", parts, {"accept_top_k": 1})
    request = Request(PROMPT, SamplingParams(), 20)
    assert generate(exact, [request]) == [naive(target(), request)]


@pytest.mark.skipif(not native.available(), reason="no kernels here")
@pytest.mark.parametrize("kind", ["medusa", "medusa own", "blockwise"])
def test_packed_heads_agree_and_do_not_depend_on_the_batch(kind: str) -> None:
    torch.manual_seed(0)
    embedding_and_head = EmbeddingAndHead(torch.randn(90, 48).bfloat16(), torch.randn(90, 48).bfloat16())
    own = {"own_head": True} if kind.endswith("own") else {}
    made = fresh(kind.split()[0], embedding_and_head, heads=3, draft_vocab=70, **own)
    for parameter in made.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    h = torch.randn(6, 48)
    fast, before = pack_network(made, "float32"), {name: tensor.clone() for name, tensor in made.state_dict().items()}
    plain = made(h)
    assert made.packed_head is None and made.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())
    torch.testing.assert_close(fast(h), plain, rtol=1e-2, atol=0.1)
    assert fast.dtype == torch.float32
    if not own:
        x = fast.head_states(h)
        assert torch.equal(fast.compute_logits(x), torch.cat([fast.compute_logits(row[None]) for row in x]))


def test_packing_leaves_doubles_alone() -> None:
    heads = network("medusa")
    assert pack_network(heads).packed_head is None
    assert heads.dtype == torch.float64
    assert Engine(DecoderRunner(target()), Method(HeadsDrafter(heads), Chain(3, draw=False), Match())) is not None
    assert all_logits(target(), PROMPT).shape == (11, VOCAB)
