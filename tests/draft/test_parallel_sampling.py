"""PaSS: learned vectors in the places to come are read as real tokens would be, and whatever they are, they change no
text.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.bench.tracing import TracingRunner
from foretell.catalogue import BuildContext
from foretell.catalogue.speculators import embedding_and_head, target_card
from foretell.core.sampling import SamplingParams
from foretell.core.tree import TokenTree, concatenate_trees
from foretell.draft import HybridDrafter, NoDrafter, ParallelDrafter, Predictor, TokenRecycling
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.config.model import ModelConfig
from foretell.model.kernels import available
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.training.probe_forward import probe_forward
from foretell.shape import BranchingTree, Chain, DynamicTree, HybridTree, RootOnly, Shape, Trie
from foretell.speculator.network.look_ahead import LookAheadConfig, LookAheadEmbeddings
from foretell.testing import TINY, tiny_decoder, tiny_deepseek, tiny_gpt_oss, tiny_moe
from helpers import VOCAB, chain_tree, engine_for, generate, naive, random_tokens, run, target, tokens_of

REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n), 12 + n // 2, eos=(3,))
    for n, t in ((3, 0.0), (37, 1.0), (1, 0.7))
]
WINDOWED = replace(
    TINY, architecture="gemma2", post_norms=True, qk_norm=True, window=3, window_layers=(0,), attention_softcap=5.0
)
FAMILIES = [
    TINY,
    replace(TINY, architecture="mistral", window=4, window_layers=(0, 1)),
    WINDOWED,
    tiny_moe(),
    tiny_gpt_oss(),
    tiny_deepseek(),
]
TEXTS = cache(lambda: [naive(target(), r) for r in REQUESTS])
SHAPES: dict[str, Shape[Predictor]] = {
    "chain": Chain(3, draw=False),
    "too long": Chain(9, draw=False),
    "branches": BranchingTree((2, 2), draw=False),
    "beam": DynamicTree(3, 3, 6),
}
every_number_of_groups = pytest.mark.parametrize("groups", [None, 0, 1, 3])


def vectors_for(network: Decoder, ahead: int = 3, seed: int = 0) -> LookAheadEmbeddings:
    """Random look-ahead embeddings."""
    parts = BuildContext(network.config.vocab, network)
    out = LookAheadEmbeddings(LookAheadConfig(target=target_card(parts), ahead=ahead), embedding_and_head(parts))
    out.vectors.data = torch.randn(out.vectors.shape, generator=torch.Generator().manual_seed(seed))
    return out.requires_grad_(False)


def drafter(groups: int | None = None, ahead: int = 3) -> ParallelDrafter:
    return ParallelDrafter(vectors_for(target(), ahead), groups)


def perfect(decoder: Decoder, tokens: Sequence[int]) -> LookAheadEmbeddings:
    """Vectors that are the embeddings of these tokens."""
    out = vectors_for(decoder, len(tokens)).double()
    out.vectors.data = decoder.embed(torch.tensor(tokens))
    return out


def trace(method: AnyMethod, requests: Sequence[Request], rows: int = 1) -> tuple[list[list[int]], TracingRunner]:
    runner = TracingRunner(DecoderRunner(target()))
    return [tokens_of(u) for u in run(Engine(runner, method, rows=rows), requests)], runner


@pytest.mark.covering(1)
@every_number_of_groups
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_embeddings_never_change_an_answer(shape: Shape[Predictor], groups: int | None) -> None:
    assert generate(Method(drafter(groups), shape, Match()), REQUESTS) == TEXTS()


@every_number_of_groups
def test_states_are_those_of_the_embeddings_after_the_sequence_alone(groups: int | None) -> None:
    """After every step: one pass over all tokens but the last, the vectors after them, nothing else."""
    guesser = drafter(groups)
    engine = engine_for(Method(guesser, BranchingTree((2, 1), draw=False), Match()), chunk=7)
    texts = {engine.submit(replace(r, eos=())): list(r.prompt) for r in REQUESTS}
    checked = 0
    while engine.busy and checked < 30:
        for update in engine.step():
            texts[update.request] += update.tokens
        running = {r.number: r.sequence for r in engine._scheduler.running}
        for number, sequence in running.items():
            length, states = guesser._root_states.get(sequence, (0, torch.zeros(0)))
            if len(states):
                text = texts[number]
                assert length == len(text)
                ahead = probe_forward(
                    target(), torch.tensor([text[:-1]]), torch.tensor([[length - 2]]), guesser.network()
                )
                torch.testing.assert_close(states.double(), ahead[0, 0, : len(states)], atol=1e-9, rtol=0)
                checked += 1
    assert checked > 10


def test_an_embedding_equal_to_the_next_token_predicts_the_target_token_after_it() -> None:
    """With the true tokens for vectors every draft is right: the places and the scores are where they should be."""
    prompt = random_tokens(9, seed=2)
    text = naive(target(), Request(prompt, max_new_tokens=5))
    # The pass that reads the prompt decides text[0]; vectors in its place and the next ones guess text[1], text[2],
    # text[3].
    method = Method(ParallelDrafter(perfect(target(), text[:3])), Chain(3, draw=False), Match())
    engine = engine_for(method, rows=1)
    engine.submit(Request(prompt, max_new_tokens=5))
    assert [list(u.tokens) for u in engine.run()] == [text[:1], text[1:5]]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.architecture)
def test_groups_equal_separate_passes_over_their_sequences(config: ModelConfig) -> None:
    """Groups after several places at once give what each gives alone in a token tree of the engine."""
    decoder = tiny_decoder(config)
    network = vectors_for(decoder)
    token = torch.tensor([random_tokens(9, config.vocab, seed=i) for i in range(2)])
    cut = torch.tensor([[0, 4, 8], [7, 2, 5]])
    found = probe_forward(decoder, token, cut, network())
    for row in range(2):
        for g, at in enumerate(cut[row].tolist()):
            tree = chain_tree(token[row, : at + 1].tolist())
            ids = list(range(config.vocab, config.vocab + 3))
            probes = tree.with_probes([ids], [[tree.nodes - 1, tree.nodes, tree.nodes + 1]], scored=[()])
            hidden_layer = (config.layers + 1,)
            output = DecoderRunner(decoder).forward(
                [0], replace(probes, probe_embeddings=network()), hidden_layers=hidden_layer
            )
            torch.testing.assert_close(found[row, g], output.hidden_states[0][-3:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.architecture)
def test_a_group_of_real_tokens_equals_the_sequence_itself(config: ModelConfig) -> None:
    decoder, text = tiny_decoder(config), random_tokens(10, config.vocab, seed=4)
    after = probe_forward(decoder, torch.tensor([text]), torch.tensor([[5]]), decoder.embed(torch.tensor(text[6:9])))
    whole = DecoderRunner(decoder).forward([0], chain_tree(text), hidden_layers=(config.layers + 1,)).hidden_states[0]
    torch.testing.assert_close(after[0, 0], whole[6:9], atol=1e-9, rtol=0)


def trees_of(runner: TracingRunner) -> list[TokenTree]:
    """The tree of every pass."""
    return [p.tree for p in runner.passes]


def test_the_published_form_looks_ahead_in_every_other_pass() -> None:
    prompt = random_tokens(5, seed=1)
    _, runner = trace(Method(drafter(groups=0), Chain(3, draw=False), Match()), [Request(prompt, max_new_tokens=40)])
    trees = [(int(t.valid[0].sum() - t.prefix_length[0]), int(t.probe[0].sum())) for t in trees_of(runner)]
    whole = len(trees) - 8
    assert whole > 10 and trees[:whole] == [((0, 3), (3, 0))[i % 2] for i in range(whole)]
    kept = [len(p.path) - int(p.tree.prefix_length[0]) + 1 for p in runner.passes]
    rounds = [a + b for a, b in zip(kept[::2], kept[1::2], strict=False)]
    assert all(2 <= tokens <= 3 + 2 for tokens in rounds)


def test_groups_follow_every_node_or_the_most_probable_ones() -> None:
    request = [Request(random_tokens(5, seed=1), max_new_tokens=16)]
    for groups, expected in ((None, 7), (2, 2)):
        _, runner = trace(Method(drafter(groups), BranchingTree((2, 2), draw=False), Match()), request)
        full = [t for t in trees_of(runner)[1:-6] if t.valid[0].sum() == 7]
        assert full and all((t.token[0] == VOCAB).sum() == expected for t in full)


def test_the_group_follows_the_last_draft_if_the_drafts_are_certain() -> None:
    """With the drafter's law sharpened to certainty, a chain is expected to stand whole."""
    guesser = drafter(groups=1)
    guesser.network.register_buffer("_shared_head", guesser.network.get_buffer("_shared_head") * 1e4)
    _, runner = trace(Method(guesser, Chain(3, draw=False), Match()), [Request([1, 2], max_new_tokens=30)])
    places = [(int(t.parent[0][t.token[0] == VOCAB][0]), int(t.valid[0].sum()) - 1) for t in trees_of(runner)[1:-6]]
    assert places and all(place == last for place, last in places)


def test_without_vectors_it_is_plain_decoding() -> None:
    request = [Request(random_tokens(5, seed=1), max_new_tokens=12)]
    texts, runner = trace(Method(drafter(ahead=0), Chain(3), Rejection()), request)
    plain, others = trace(Method(NoDrafter(), RootOnly(), Match()), request)
    assert texts == plain
    assert [t.nodes for t in trees_of(runner)] == [t.nodes for t in trees_of(others)]


def test_vectors_are_read_and_not_scored() -> None:
    class Counting(DecoderRunner):
        def forward(self, rows, tree, **options):  # type: ignore[no-untyped-def]
            output = super().forward(rows, tree, **options)
            counts.append(
                (len(output.logits), int(tree.valid.sum() - tree.prefix_length[0] + 1), int(tree.probe.sum()))
            )
            return output

    counts = list[tuple[int, int, int]]()
    engine = Engine(Counting(target()), Method(drafter(), Chain(3, draw=False), Match()), rows=1)
    run(engine, [Request([1, 2, 3], max_new_tokens=30)])
    assert all(scored == drafted for scored, drafted, _ in counts) and max(probes for *_, probes in counts) == 12


def test_retrieved_drafts_beside_embeddings_keep_every_answer() -> None:
    """Whoever learns from all that was scored must not take vectors for tokens."""
    hybrid = HybridDrafter(TokenRecycling(VOCAB), drafter(groups=2))
    shape = HybridTree(Trie(8, elastic=True), Chain(3, draw=False))
    assert generate(Method(hybrid, shape, Match()), REQUESTS) == TEXTS()


def test_a_chance_of_ending_belongs_to_every_node_and_they_sum_to_one() -> None:
    guesser, seen = drafter(groups=2), list[float]()
    chances = guesser._end_probabilities

    def spy(tree: TokenTree, i: int, context: object, nodes: Sequence[int]) -> dict[int, float]:
        out = chances(tree, i, context, nodes)  # type: ignore[arg-type]
        seen.append(sum(out.values()))
        assert set(out) == set(nodes) and min(out.values()) > -1e-6
        return out

    guesser._end_probabilities = spy  # type: ignore[method-assign]
    generate(Method(guesser, BranchingTree((3, 2), draw=False), Match()), REQUESTS)
    assert len(seen) > 5 and seen == pytest.approx([1.0] * len(seen))


@pytest.mark.skipif(not available(), reason="no native kernels")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_scores_are_bit_identical_with_and_without_vectors_on_the_kernels(precision: str) -> None:
    config = replace(TINY, vocab=VOCAB, hidden=64, head_dim=16)
    decoder = tiny_decoder(config, dtype=torch.float32)
    network: Network = NativeDecoder(decoder, precision)  # type: ignore[arg-type]
    method = Method(ParallelDrafter(vectors_for(decoder)), BranchingTree((12, 3), draw=False), Match())
    requests = [replace(r, eos=(), logprobs=True) for r in REQUESTS]
    ours = run(Engine(DecoderRunner(network), method, rows=3), requests)
    plain = run(Engine(DecoderRunner(network), Method(NoDrafter(), RootOnly(), Match()), rows=3), requests)
    assert [tokens_of(u) for u in ours] == [tokens_of(u) for u in plain]
    assert [[p for u in us for p in u.logprobs] for us in ours] == [[p for u in us for p in u.logprobs] for us in plain]
    assert sum(u.accepted for us in ours for u in us) > 0


def test_a_negative_number_of_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="found -1"):
        drafter(groups=-1)


def test_trees_carry_vectors_and_silence_through_every_rearrangement() -> None:
    tree = replace(
        chain_tree([1]).with_probes([[VOCAB, VOCAB + 1]], [[0, 1]], scored=[{2}]),
        probe_embeddings=torch.ones(2, TINY.hidden),
    )
    assert tree.scored.tolist() == [[True, False, True]]
    longer = tree.with_prefix([[5, 6, 1]])
    assert (
        longer.scored.tolist() == [[True, True, True, False, True]] and longer.probe_embeddings is tree.probe_embeddings
    )
    other = chain_tree([4])
    both = concatenate_trees([other, tree])
    assert (
        both.scored.tolist() == [[True, False, False], [True, False, True]]
        and both.probe_embeddings is tree.probe_embeddings
    )
    assert both.select(np.array([1, 0])).scored.tolist() == both.scored[::-1].tolist()
