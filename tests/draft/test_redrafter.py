"""ReDrafter: drafting is the forward pass of training, and longer drafts than trained are refused."""

import pytest
import torch

from foretell.accept import Match
from foretell.catalogue.feature_level import redrafter_method
from foretell.catalogue.options.feature_level import BeamSearchOptions
from foretell.core.tree import tree_from_lists
from foretell.draft import ReDrafterDrafter
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.shape import BeamSearch
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.pack import pack_network
from foretell.speculator.network.redrafter import ReDrafter, ReDrafterConfig
from helpers import VOCAB, after_prompt, context_of, generate, random_tokens, target, unchecked


def network_of(subset: int | None = 20) -> ReDrafter:
    card = TargetInfo(name="tiny", hidden=target().config.hidden, vocab=VOCAB, layers=2)
    config = ReDrafterConfig(target=card, draft_vocab=subset, stages=4, inner=12)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = ReDrafter(config, EmbeddingAndHead(target().embedding.detach(), target().head.weight.detach()))
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    if subset is not None:
        network.set_draft_vocab(torch.arange(VOCAB)[1 : 1 + subset])
    return network.double().requires_grad_(False)


def test_drafting_is_the_forward_pass_of_training() -> None:
    network, text = network_of(None), random_tokens(9, seed=2)
    step = after_prompt(target(), context_of(text), network.hidden_layers)
    drafter = ReDrafterDrafter(network)
    drafter.observe(step)
    state = step.output.hidden_states[0][step.output.hidden_index[0, step.paths[0][-1]]][None]
    path = [5, 2, 8]
    given = torch.tensor([[text[-1], *path]])
    expected = network([state], given, lambda inputs: [network.head_logits(x, i) for i, x in enumerate(inputs)])
    for depth in range(4):
        tree = tree_from_lists([[text[-1], *path[:depth]]], [list(range(-1, depth))])
        logits, index = drafter.expand(tree, tree.valid.nonzero()[1][None, -1:], step.context)
        torch.testing.assert_close(logits[index[0, depth]], expected[depth][0])


def test_a_new_network_begins_with_the_target_itself() -> None:
    network = ReDrafter(network_of().config, EmbeddingAndHead(target().embedding, target().head.weight))
    network = network.double()
    state = torch.randn(3, target().config.hidden, dtype=torch.float64)
    after = network.next_state(network.initial_state([state]), torch.tensor([1, 2, 3]), 0)
    assert torch.nn.functional.cosine_similarity(network.head_input(after, 0), state).min() > 0.95


def test_beams_of_the_packed_network_are_lossless() -> None:
    network = network_of().float()
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=12) for n in (3, 8)]
    with unchecked():
        methods = [Method(ReDrafterDrafter(n), BeamSearch(4, 3), Match()) for n in (network, pack_network(network))]
        one, other = (generate(method, requests, rows=2) for method in methods)
    assert one == other


def test_sequences_longer_than_trained_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="was trained to draft 4 tokens, and 5 were asked for"):
        redrafter_method(network_of(), BeamSearchOptions(num_steps=5))
