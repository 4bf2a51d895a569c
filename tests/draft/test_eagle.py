"""EAGLE's layer follows the target: shifts, keys that stay, trees level by level as training unrolls them, and drawn
trees.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.draft import EagleDrafter
from foretell.draft.base import Predictor
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model import kernels as native
from foretell.model.block.attention import AttentionBackend
from foretell.model.block.decoder import Decoder
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.block.rope import apply_rope
from foretell.model.cache.layout import Layout
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, DynamicTree, FixedTree, Shape
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.eagle import Eagle1, Eagle3, EagleConfig, EagleNetwork
from foretell.speculator.network.layer import make_norm
from foretell.speculator.network.pack import DraftPrecision, pack_network
from foretell.testing import TINY, tiny_decoder
from helpers import (
    VOCAB,
    after_prompt,
    chain_tree,
    context_of,
    drafted_paths,
    engine_for,
    exact_distribution,
    generate,
    p_value,
    random_tokens,
    target,
    unchecked,
)

KINDS = ("eagle", "eagle3")
every_kind = pytest.mark.parametrize("kind", KINDS)


def embedding_and_head(vocab: int = VOCAB) -> EmbeddingAndHead:
    return EmbeddingAndHead(target(vocab).embedding.detach(), target(vocab).head.weight.detach())


@cache
def network_of(kind: str, vocab: int = VOCAB, layers: int = 1, subset: int | None = 20) -> EagleNetwork:
    """Random weights in float64."""
    card = TargetInfo(name="tiny", hidden=TINY.hidden, vocab=vocab, layers=2)
    config = EagleConfig.model_validate(
        {"kind": kind, "target": card, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256}
        | {"draft_vocab": subset, "layers": layers, "fc_norm": True, "hidden_layers": (0, 1, 3)}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = (Eagle1 if kind == "eagle" else Eagle3)(config, embedding_and_head(vocab))
        for parameter in network.parameters():
            parameter.data = parameter.data.double() + 0.3 * torch.randn_like(parameter.data.double())
    if subset is not None:
        network.set_draft_vocab(torch.arange(vocab)[1 : 1 + subset])
    return network.double()


def features_of(network: EagleNetwork, text: Sequence[int], vocab: int = VOCAB) -> list[torch.Tensor]:
    """The target's states over a text read at once, [1 s d] per recorded layer."""
    output = DecoderRunner(target(vocab)).forward([0], chain_tree(text), hidden_layers=network.hidden_layers)
    return [f[None].clone() for f in output.hidden_states]


class Plain(AttentionBackend):
    """Attention of one text without a cache, written plainly: token `i` sees the tokens that `sees[i]` lists."""

    def __init__(self, sees: Sequence[Sequence[int]]) -> None:
        self._sees = sees
        self.keys: list[torch.Tensor] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks is None
        self.keys.append(k)
        out = []
        for i, seen in enumerate(self._sees):
            heads = []
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                score = torch.stack([(q[i, h] * k[j, g]).sum() for j in seen]) * q.shape[2] ** -0.5
                heads.append((score.softmax(0)[:, None] * torch.stack([v[j, g] for j in seen])).sum(0))
            out.append(torch.cat(heads))
        return torch.stack(out)


def read_plainly(network: EagleNetwork, text: Sequence[int], vocab: int = VOCAB) -> tuple[torch.Tensor, Plain]:
    """Outputs and keys of a text, every feature with the token after it."""
    states = torch.cat(features_of(network, text, vocab), -1)[0, :-1]
    n = len(text) - 1
    sight = Plain([range(i + 1) for i in range(n)])
    g = network.fuse(states)
    return network.forward_layers(torch.tensor(text[1:]), g, torch.arange(n), sight), sight


class Watch(EagleDrafter):
    """Notes what it scored after the roots."""

    def __init__(self, network: EagleNetwork, max_pending: int) -> None:
        super().__init__(network, max_pending)
        self.roots: dict[tuple[int, ...], torch.Tensor] = {}

    def _forward_roots(self, able, context):  # type: ignore[no-untyped-def]
        out = super()._forward_roots(able, context)
        for i, state in zip(able, out, strict=True):
            self.roots[tuple(context.sequences[i].tokens.tolist())] = self.network.compute_logits(
                self.network.head_input(state)
            )
        return out


@pytest.mark.covering(1)
@every_kind
@pytest.mark.parametrize("most", [0, 100])
def test_every_root_is_scored_as_by_a_fresh_pass_over_the_sequence(kind: str, most: int) -> None:
    network = network_of(kind, layers=2)
    drafter = Watch(network, most)
    requests = [
        Request(random_tokens(n, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0)) for n in (2, 21, 9, 1)
    ]
    with unchecked():
        texts = generate(Method(drafter, DynamicTree(3, 3, 6), Match()), requests, rows=3, chunk=8)
    assert [len(t) for t in texts] == [8] * 4
    assert len(drafter.roots) > 15
    for text, scores in list(drafter.roots.items())[::5]:
        out = read_plainly(network, text)[0][-1]
        torch.testing.assert_close(scores, network.compute_logits(network.head_input(out)), atol=1e-5, rtol=0)


@every_kind
def test_keys_that_stay_are_those_of_a_fresh_reading(kind: str) -> None:
    # Few tokens, all of which are drafted, so that paths of every length are accepted.
    network, vocab = network_of(kind, 4, subset=None), 4
    drafter = EagleDrafter(network, 5)
    engine = engine_for(Method(drafter, DynamicTree(3, 4, 40), Match()), rows=3, chunk=7, vocab=vocab)
    texts = [random_tokens(n, vocab, seed=n) for n in (5, 17, 11)]
    for i, p in enumerate(list(texts)):
        engine.submit(Request(tuple(p), SamplingParams(temperature=float(i % 2), seed=i), max_new_tokens=99))
    accepted = set[int]()
    with unchecked():
        for _ in range(12):
            for update in engine.step():
                texts[update.request - 1] = [*texts[update.request - 1], *update.tokens]
                accepted.add(update.accepted)
    assert len(accepted) > 2
    for row, text in enumerate(texts):
        known = drafter._prefixes[row]
        assert known.length + known.pending_count == len(text) - 1
        assert known.length > len(text) - 6
        keys = read_plainly(network, text, vocab)[1].keys[0]
        kept = drafter._cache.read(0, torch.tensor([row]), known.length)[0][0].transpose(0, 1)
        torch.testing.assert_close(kept, keys[: known.length], atol=1e-8, rtol=0)


@every_kind
def test_the_feature_of_a_position_goes_with_the_token_after_it(kind: str) -> None:
    """An oracle: its feature is the position, its embedding the token, and its attention nothing."""
    network, prompt, seen = network_of(kind), random_tokens(11, seed=4), list[tuple[int, int, int]]()
    text = [*prompt, *[7] * 5]

    class Oracle(type(network)):  # type: ignore[misc]
        def forward_features(self, token, features, parent, layout, cache):  # type: ignore[no-untyped-def]
            states = features_of(network, text)
            fused = network.fuse(torch.cat(states, -1))[0]
            for t, each, p in zip(token.tolist(), features[parent], layout.position.tolist(), strict=True):
                nearest = int((fused - each).norm(dim=-1).argmin())
                assert (fused[nearest] - each).norm() < 1e-9
                seen.append((nearest, t, p))
            return super().forward_features(token, features, parent, layout, cache)

    oracle = Oracle(network.config, embedding_and_head()).double()
    oracle.load_state_dict(network.state_dict())
    method = Method(EagleDrafter(oracle), Chain(1, draw=False), Match())
    engine = Engine(DecoderRunner(target()), method, rows=1, chunk=5)
    engine.submit(Request(prompt, SamplingParams(logit_bias={7: 1e9}), max_new_tokens=5))
    while engine.busy:
        engine.step()
    assert len(seen) > 11
    assert seen == [(j, text[j + 1], j) for j in range(len(seen))]


def reader(network: EagleNetwork, text: Sequence[int]) -> EagleDrafter:
    """A drafter that has been told all about a text."""
    drafter, tree = EagleDrafter(network), chain_tree(text[:-1])
    output = DecoderRunner(target()).forward([0], tree, hidden_layers=network.hidden_layers)
    drafter.observe(StepResult(context_of(text), tree, output, (tuple(range(tree.nodes)),), ((text[-1],),), (0,)))
    return drafter


def after(network: EagleNetwork, text: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Scores after the last token of a path of drafts, asked for one by one."""
    drafter, tokens = reader(network, text), [text[-1], *path]
    for end in range(1, len(tokens) + 1):
        chain = tree_from_lists([tokens[:end]], [list(range(-1, end - 1))])
        logits, at = drafter.expand(chain, np.array([[end - 1]]), context_of(text))
    scores: torch.Tensor = logits[at[0, -1]]
    return scores


@every_kind
def test_drafting_level_by_level_is_the_unrolled_forward_on_the_same_tokens(kind: str) -> None:
    network, text, path = network_of(kind, layers=2), random_tokens(15, seed=6), random_tokens(4, seed=7)
    states = [torch.nn.functional.pad(f, (0, 0, 0, 4)) for f in features_of(network, text)]
    wanted = torch.zeros(1, 18, dtype=torch.bool)
    wanted[0, 13] = True
    guesses = network(torch.tensor([[*text, *path]]), states, [wanted] * 5)
    for depth, guess in enumerate(guesses):
        expected = network.to_target_vocab(guess.logits[0])
        torch.testing.assert_close(after(network, text, path[:depth]), expected, atol=1e-5, rtol=0)


class Recording(EagleDrafter):
    """Notes the scores after every path of drafts."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__(network)
        self.found: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def _outputs(self, tree, frontier, context):  # type: ignore[no-untyped-def]
        out, at = super()._outputs(tree, frontier, context)
        logits = self.network.to_target_vocab(self.network.compute_logits(self.network.head_input(out)))
        for i, row in enumerate(context.rows):
            for node in frontier[i].tolist():
                if at[i, node] >= 0:
                    path = tree.token[i, tree.ancestors(i, node)[1:]].tolist()
                    self.found[row, tuple(path)] = logits[at[i, node]]
        return out, at


@every_kind
def test_nodes_see_their_ancestors_only_whatever_the_rows_lengths(kind: str) -> None:
    """Scores at every node of trees that grow together are those of its path alone."""
    network, texts = network_of(kind, layers=2), [random_tokens(n, seed=n) for n in (9, 2, 17)]
    drafter, context = Recording(network), context_of(*texts)
    drafter.observe(after_prompt(target(), context, network.hidden_layers))
    choices = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1))
    FixedTree(choices).grow(drafter, replace(context, max_depth=np.array([99, 1, 3])))
    assert [sum(row == i for row, _ in drafter.found) for i in range(3)] == [5, 3, 5]
    for (row, path), scores in drafter.found.items():
        torch.testing.assert_close(scores, after(network, texts[row], path), atol=1e-6, rtol=0)


@every_kind
def test_training_time_test_is_attention_recomputed_position_by_position(kind: str) -> None:
    network, text, steps = network_of(kind), random_tokens(10, seed=8), 4
    states = features_of(network, text)
    everywhere = torch.ones(1, len(text) - 1, dtype=torch.bool)
    guesses = network(torch.tensor([text]), states, [everywhere] * steps)
    g0 = network.fuse(torch.cat(states, -1))[0]
    for j in range(len(text) - 1 - steps):
        # Position j on its own: it has read tokens 1 .. j + 1 with features, and goes on with what it says itself.
        tokens, features, positions = text[1 : j + 2], list(g0[: j + 1]), list(range(j + 1))
        for i in range(steps):
            sight = Plain([range(n + 1) for n in range(len(tokens))])
            out = network.forward_layers(torch.tensor(tokens), torch.stack(features), torch.tensor(positions), sight)
            expected = network.compute_logits(network.head_input(out[-1]))
            torch.testing.assert_close(guesses[i].logits[j], expected, atol=1e-5, rtol=0)
            tokens, features, positions = [*tokens, text[j + 2 + i]], [*features, out[-1]], [*positions, j + 1 + i]


SHAPES: dict[str, Shape[Predictor]] = {
    "chain": Chain(3, draw=True),
    "tree": FixedTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), draw=True),
}


@pytest.mark.covering(1)
@every_kind
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_drafts_keep_the_distribution(kind: str, name: str) -> None:
    network, sampling, start = network_of(kind, 4, subset=3), SamplingParams(temperature=2.5), [1, 0, 2]
    requests = [Request(start, replace(sampling, seed=i), max_new_tokens=3) for i in range(400)]
    with unchecked():
        method = Method(EagleDrafter(network), SHAPES[name], Rejection())
        texts = generate(method, requests, rows=512, chunk=1 << 14, vocab=4)
    where = np.ravel_multi_index(np.array(texts).T, (4,) * 3)
    distribution = exact_distribution(target(4), start, 3, sampling)
    assert p_value(np.bincount(where, minlength=64), distribution) > 1e-3


def test_tensors_of_the_layer_have_the_published_rows() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    made = make_norm(5, 1e-5).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * made.weight
    torch.testing.assert_close(made(x), expected)
    turn = torch.tensor([[0.6]]), torch.tensor([[0.8]])
    turned = apply_rope(torch.tensor([[1.0, 2.0]]), turn)
    torch.testing.assert_close(turned, torch.tensor([[1 * 0.6 - 2 * 0.8, 2 * 0.6 + 1 * 0.8]]))


def test_nothing_is_drafted_before_the_target_has_read_the_prompt() -> None:
    drafter, context = EagleDrafter(network_of("eagle3")), context_of([1, 2, 3], [4, 5], prompt=1)
    assert drafter.max_depths(context).tolist() == [0, 0]
    output = DecoderRunner(target()).forward([0], chain_tree([1, 2]), hidden_layers=drafter.hidden_layers)
    first = context.select([0])
    drafter.observe(StepResult(first, chain_tree([1, 2]), output, ((0, 1),), ((3,),), (0,)))
    assert drafter.max_depths(context).tolist() == [99, 0]
    drafter.release(0)
    assert drafter.max_depths(context).tolist() == [0, 0]


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize(("precision", "near"), [("float32", 2e-5), ("int8", 0.6)])
@every_kind
def test_the_kernels_draft_what_torch_drafts(kind: str, precision: DraftPrecision, near: float) -> None:
    wide = replace(TINY, hidden=64, vocab=VOCAB)
    decoder = tiny_decoder(wide, dtype=torch.float32)
    card = TargetInfo(name="tiny", hidden=64, vocab=wide.vocab, layers=wide.layers)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 40, "context": 99, "layers": 2}
    more = {"fc_norm": True, "norm_output": True, "qk_norm": True, "hidden_layers": (0, 1, 3)}
    more |= {"window": 4, "window_layers": (1,), "sink_layers": (0,)}
    config = EagleConfig.model_validate({"kind": kind, "target": card, "draft_vocab": 20} | sizes | more)
    made = Eagle1 if kind == "eagle" else Eagle3
    torch.manual_seed(5)
    plain = made(config, EmbeddingAndHead(decoder.embedding.detach(), decoder.head.weight.detach()))
    fast = pack_network(plain, precision)
    assert fast.native_stack is not None and plain.native_stack is None
    text, found = random_tokens(12, seed=9), list[dict[tuple[int, tuple[int, ...]], torch.Tensor]]()
    for network in (plain, fast):
        drafter, tree = Recording(network), chain_tree(text[:-1])
        output = DecoderRunner(decoder).forward([0], tree, hidden_layers=network.hidden_layers)
        drafter.observe(StepResult(context_of(text), tree, output, (tuple(range(tree.nodes)),), ((text[-1],),), (0,)))
        FixedTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0))).grow(drafter, context_of(text))
        found.append(drafter.found)
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 3
    for path in shared:
        torch.testing.assert_close(found[1][path], found[0][path], atol=near, rtol=0)


class Stepwise(EagleDrafter):
    """Has its trees grown level by level."""

    def grow_dynamic_tree(self, context, sizes, bounds):  # type: ignore[no-untyped-def]
        return None


@cache
def kernel_network(precision: DraftPrecision, dtype: torch.dtype, subset: int | None) -> tuple[Decoder, EagleNetwork]:
    """A random EAGLE-3 on the CPU kernels, with its target; with the whole vocabulary one that feeds normed outputs
    back, else one with a window and sinks.
    """
    decoder = tiny_decoder(replace(TINY, hidden=64, vocab=VOCAB), dtype=dtype)
    card = TargetInfo(name="tiny", hidden=64, vocab=VOCAB, layers=2)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 40, "context": 99, "layers": 2}
    config = EagleConfig.model_validate(
        {"target": card, "draft_vocab": subset, "fc_norm": True, "norm_output": subset is None}
        | {"hidden_layers": (0, 1, 3), **sizes}
        | ({} if subset is None else {"window": 5, "window_layers": (0,), "sink_layers": (1,)})
    )
    torch.manual_seed(5)
    network = Eagle3(config, EmbeddingAndHead(decoder.embedding.detach(), 3 * decoder.head.weight.detach()))
    if subset is not None:
        network.set_draft_vocab(torch.arange(VOCAB)[2 : 2 + subset])
    return decoder, pack_network(network, precision)


@pytest.mark.covering(2)
@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("int8", torch.bfloat16), ("int4", torch.bfloat16)]
)
@pytest.mark.parametrize(
    "shape",
    [
        DynamicTree(1, 3, 9),
        DynamicTree(5, 3, 60, 1e-4),
        DynamicTree(4, 4, 7),
        DynamicTree(4, 2, 9, 0.02),
        DynamicTree(3, 99, 30),
    ],
    ids=str,
)
@pytest.mark.parametrize("subset", [20, None])
def test_the_kernels_grow_the_trees_that_grow_level_by_level(
    precision: DraftPrecision, dtype: torch.dtype, shape: DynamicTree, subset: int | None
) -> None:
    """Texts of unequal length, one of them with room for two more tokens, one with none."""
    decoder, network = kernel_network(precision, dtype, subset)
    texts = [random_tokens(n, seed=n) for n in (9, 3, 17, 5)]
    context = replace(context_of(*texts), max_depth=np.array([99, 2, 99, 0]))
    step = after_prompt(decoder, context, network.hidden_layers)
    # Of more pending positions than these, all but the last are stored before trees grow, or when they are observed.
    drafters = [EagleDrafter(network), EagleDrafter(network, 20), EagleDrafter(network, 3), Stepwise(network)]
    found = [drafted_paths(shape, drafter, step) for drafter in drafters]
    assert all(len(part) <= shape.budget for part in found[0])
    assert all(part == found[0] for part in found)
    assert [bool(part) for part in found[0]] == [True, True, True, False]
    assert all(len(path) <= 3 for path in found[0][1])


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_the_kernels_refuse_tokens_and_features_that_are_not_there() -> None:
    _, network = kernel_network("float32", torch.float32, None)
    kernels = network.native
    assert kernels is not None
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    layout = Layout(
        row=zero, slot=zero, position=zero, visible_prefix=one, extra_slots=zero[:, None][:, :0].contiguous()
    )
    cache = network.new_cache(torch.device("cpu"))
    cache.reserve([0], [8])
    for token, parent in ((VOCAB, 0), (-1, 0), (1, 1), (1, -1)):
        with pytest.raises(ValueError, match="is not among"):
            kernels.forward(torch.tensor([token]), torch.zeros(1, 64), torch.tensor([parent]), layout, cache)
    states, at = [torch.zeros(2, 64)] * 3, np.array([1])
    kernels.forward_from_target(torch.tensor([3]), states, at, layout, cache)
    for token, place in ((VOCAB, at), (3, at + 1), (3, at - 2)):
        with pytest.raises(ValueError, match="is not among"):
            kernels.forward_from_target(torch.tensor([token]), states, place, layout, cache)
    for found, place in ((states[1:], at), (states, np.array([0, 1]))):
        with pytest.raises(ValueError, match="3 states at 1 places are read"):
            kernels.forward_from_target(torch.tensor([3]), found, place, layout, cache)


@every_kind
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_drafter_with_a_window_reads_the_end_of_a_prompt_and_keeps_the_text(kind: str, chunk: int) -> None:
    found, starts = [], []
    for window in (None, 9):
        drafter = EagleDrafter(network_of(kind), window=window)
        engine = engine_for(Method(drafter, Chain(3), Match()), rows=1, chunk=chunk)
        engine.submit(Request(random_tokens(60, seed=4), max_new_tokens=12))
        tokens, done = list[int](), False
        while not done:
            updates = engine.step()
            done = any(u.finish_reason for u in updates)
            tokens += [t for u in updates for t in u.tokens]
            starts += [prefix.start for prefix in drafter._prefixes.values() if tokens]
        found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 12
    assert set(starts) == {0, 51}
