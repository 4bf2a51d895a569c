"""Online distillation: the corrections of every pass, the optimizer steps on them, and unchanged answers."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretell.accept import Match, Rejection
from foretell.catalogue import BuildContext
from foretell.catalogue.speculators import embedding_and_head, target_card
from foretell.core.context import StepResult
from foretell.core.sampling import SamplingParams
from foretell.distributions.divergence import forward_kl
from foretell.draft import DraftModel, OnlineDrafter
from foretell.draft.online import Correction, ReplayBuffer, ReplayExample, distillation_loss
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.block.linear import Linear
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain
from foretell.speculator.network.draft_model import DraftModelConfig, DraftNetwork
from foretell.testing import TINY, tiny_decoder
from helpers import all_logits, naive, random_tokens, run, statistics_of, tokens_of, unchecked

VOCAB = 24
KEPT = torch.tensor([t for t in range(VOCAB) if t % 6 != 5])


def varied_target() -> Decoder:
    """A model with a head of its own: where it is the embedding, a random model repeats itself."""
    decoder = tiny_decoder(replace(TINY, vocab=VOCAB, hidden=32, ffn=48))
    head = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Decoder(decoder.config, decoder.embedding, decoder._block_list(), decoder.norm, Linear(0.6 * head))


TARGET = varied_target()


def network() -> DraftNetwork:
    """One block of the target, unsettled so that it is often wrong."""
    parts = BuildContext(VOCAB, TARGET)
    config = DraftModelConfig(target=target_card(parts), draft_vocab=len(KEPT), model=replace(TARGET.config, layers=1))
    draft = DraftNetwork(config, embedding_and_head(parts))
    draft.set_draft_vocab(KEPT)
    draft.init_from_target(TARGET, (0,))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in draft.blocks.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return draft


def method(draft: OnlineDrafter | DraftModel, length: int = 4) -> AnyMethod:
    return Method(draft, Chain(length, draw=False), Match())


def requests(count: int, length: int = 16, seed: int = 0, temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            random_tokens(3 + i % 5, VOCAB, seed=seed + i),
            SamplingParams(temperature, seed=i),
            max_new_tokens=length,
        )
        for i in range(count)
    ]


def engine_of(how: AnyMethod, rows: int = 3, target: Decoder = TARGET) -> Engine:
    return Engine(DecoderRunner(target), how, rows=rows)


class Watching(OnlineDrafter):
    """Remembers every step and every finished lesson."""

    def observe(self, step: StepResult) -> None:
        super().observe(step)
        for i, row in enumerate(step.context.rows):
            if step.new_tokens[i]:
                text = step.context.sequences[i]
                assert self._rows[row].corrections[-1].position == text.length - 1


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 1.0])
def test_answers_are_the_same_before_and_after_updates_and_with_swaps_in_between(temperature: float) -> None:
    asked = requests(6, temperature=temperature)
    expected = [naive(TARGET, r) for r in asked]
    draft = Watching(network(), interval=2, learning_rate=1e-2)
    engine = engine_of(method(draft))
    with unchecked():
        for _ in range(2):
            assert [tokens_of(u) for u in run(engine, asked)] == expected
    assert draft.updates >= 4


def test_drawn_drafts_stay_lossless_across_swaps_too() -> None:
    asked = requests(3)
    for how in (Chain(3), BranchingTree((2, 2))):
        draft = OnlineDrafter(network(), interval=1, learning_rate=1e-2)
        found = [tokens_of(u) for u in run(engine_of(Method(draft, how, Rejection()), rows=1), asked)]
        assert found == [naive(TARGET, r) for r in asked] and draft.updates == 2, "the last one has no pass after it"


def test_a_frozen_one_is_the_plain_draft_model() -> None:
    asked = requests(3, temperature=1.0)
    frozen, plain = (
        engine_of(method(OnlineDrafter(network(), interval=0))),
        engine_of(method(DraftModel(network().to_runner()))),
    )
    pairs = list(zip(frozen.complete(asked), plain.complete(asked), strict=True))
    assert all(mine.tokens == theirs.tokens for mine, theirs in pairs)
    for mine, theirs in ((a.statistics, b.statistics) for a, b in pairs):
        assert (mine.target_passes, mine.drafted, mine.accepted_per_position) == (
            theirs.target_passes,
            theirs.drafted,
            theirs.accepted_per_position,
        )


@pytest.mark.parametrize("eos", [(), (3, 7)], ids=["length", "end of sequence"])
def test_one_correction_per_pass_with_the_targets_distribution(
    eos: tuple[int, ...],
) -> None:
    draft = OnlineDrafter(network(), interval=0, top_k=4)
    engine = engine_of(method(draft), rows=1)
    for request in requests(3):
        engine.submit(replace(request, eos=eos))
        accepted, out = list[int](), list[int]()
        for update in engine.run():
            out += update.tokens
            accepted += range(len(request.prompt) + len(out) - len(update.tokens), len(request.prompt) + len(out))[
                : update.accepted
            ]
        lesson = draft.replay._examples[-1]
        text, places = [*request.prompt, *out], [c.position for c in lesson.corrections]
        assert len(places) == statistics_of([update]).target_passes and places == sorted(set(places))
        assert lesson.tokens.tolist() == text[: places[-1]] and places[-1] == len(text) - 1
        # The last pass may have been cut short by the end; all other corrections are tokens of the target's own.
        assert not set(places[:-1]) & set(accepted)
        logits = torch.from_numpy(all_logits(TARGET, text))
        for c in lesson.corrections:
            distribution = torch.softmax(logits[c.position - 1], -1)
            inside = (distribution[KEPT] / distribution[KEPT].sum()).sort(descending=True)
            assert c.top_tokens.tolist() == inside.indices[:4].tolist()
            assert c.weight == pytest.approx(float(distribution[KEPT].sum()), abs=1e-5)
            np.testing.assert_allclose(np.exp(c.log_p), [*inside.values[:4], inside.values[4:].sum()], atol=1e-5)


def test_the_loss_compares_the_draft_before_a_token_with_the_target_of_that_token() -> None:
    draft, text = network(), random_tokens(12, VOCAB, seed=4)
    generator = torch.Generator().manual_seed(0)

    def correction(position: int) -> Correction:
        log_p = torch.log_softmax(torch.randn(4, generator=generator), -1).numpy()
        return Correction(position, np.array([3, 0, 7]), log_p, 0.5 + 0.1 * position)

    lessons = [
        ReplayExample(np.array(text[:9]), (correction(2), correction(9))),
        ReplayExample(np.array(text[:5]), (correction(5),)),
    ]
    expected, weights = 0.0, 0.0
    for lesson in lessons:
        for c in lesson.corrections:
            scores = all_logits(draft.to_decoder(torch.float64), text[: c.position])[-1]
            q = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
            q = np.array([*q[c.top_tokens], 1 - q[c.top_tokens].sum()])
            p = np.exp(c.log_p)
            expected += c.weight * (p * np.log(p / q)).sum()
            weights += c.weight
    assert float(distillation_loss(draft, lessons, forward_kl, 64).detach()) == pytest.approx(
        expected / weights, abs=1e-4
    )


def test_a_long_sequence_is_learned_from_its_end() -> None:
    some = Correction(3, np.array([1]), np.log(np.array([0.5, 0.5], np.float32)), 1.0)
    late = replace(some, position=30)
    lesson = ReplayExample(np.array(random_tokens(30, VOCAB)), (some, late))
    only = ReplayExample(lesson.tokens[-10:], (replace(late, position=10),))
    found = distillation_loss(network(), [lesson], forward_kl, 10)
    torch.testing.assert_close(found, distillation_loss(network(), [only], forward_kl, 10))


def test_the_buffer_is_bounded_and_first_in_is_first_out() -> None:
    lessons = ReplayBuffer(10)

    def lesson(mark: int, count: int) -> ReplayExample:
        some = Correction(3, np.array([1]), np.log(np.array([0.5, 0.5], np.float32)), 1.0)
        return ReplayExample(np.array([mark] * 4), (some,) * count)

    for mark in range(6):
        lessons.add(lesson(mark, 3))
    assert len(lessons) == 9 and [x.tokens[0] for x in lessons._examples] == [3, 4, 5]
    assert [x.tokens[0] for x in lessons.sample(random.Random(0))] == [3, 4, 5]
    lessons.add(lesson(6, 3))
    taken = [int(x.tokens[0]) for x in lessons.sample(random.Random(0))]
    assert taken[0] == 6 and len(taken) == 2 and taken[1] in (4, 5)
    lessons.add(lesson(7, 25))
    assert len(lessons) == 10 and len(lessons._examples) == 1
    with pytest.raises(ValueError, match="at least one, found 0"):
        ReplayBuffer(0)


def test_cancelled_requests_and_requests_without_a_pass_teach_what_there_is() -> None:
    draft = OnlineDrafter(network(), interval=1)
    engine = engine_of(method(draft), rows=1)
    first, second = (engine.submit(r) for r in requests(2, length=30))
    engine.step()
    engine.cancel(first)
    assert draft.updates == 0 and len(draft.replay) == 1, "a request that ends is forgotten, and nothing else"
    engine.step()
    assert draft.updates == 1
    engine.cancel(second)
    assert not engine.busy and draft.updates == 1


def acceptance(draft: OnlineDrafter, target: Decoder, asked: Sequence[Request]) -> float:
    """Tokens per pass of each of these requests, one after the other."""
    engine = engine_of(method(draft), rows=1, target=target)
    with unchecked():
        counts = [done.statistics for done in engine.complete(asked)]
    return sum(s.new_tokens for s in counts) / sum(s.target_passes for s in counts)


def source(first: int, count: int) -> list[Request]:
    """A stream of questions about one subject: all begin alike."""
    beginnings = [random_tokens(6, VOCAB, seed=1000 + first + i % 3) for i in range(count)]
    return [Request(b, max_new_tokens=20) for b in beginnings]


def test_acceptance_rises_on_one_source() -> None:
    draft = OnlineDrafter(network(), interval=2, learning_rate=5e-3)
    start = acceptance(draft, TARGET, source(0, 3))
    acceptance(draft, TARGET, source(0, 15))
    assert acceptance(draft, TARGET, source(0, 3)) > start + 0.5


@pytest.mark.exhaustive
def test_acceptance_rises_on_one_source_drops_at_a_switch_and_recovers() -> None:
    draft = OnlineDrafter(network(), interval=2, learning_rate=5e-3)
    start = acceptance(draft, TARGET, source(0, 3))
    acceptance(draft, TARGET, source(0, 30))
    learned = acceptance(draft, TARGET, source(0, 3))
    switched = acceptance(draft, TARGET, source(50, 3))
    acceptance(draft, TARGET, source(50, 30))
    recovered = acceptance(draft, TARGET, source(50, 3))
    assert learned > start + 0.5 and switched < learned - 0.5 and recovered > switched + 0.5, (
        start,
        learned,
        switched,
        recovered,
    )
