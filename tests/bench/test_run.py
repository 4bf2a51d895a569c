"""Runs with a tiny model: conversations, equality with plain decoding, acceptance, interruption."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench_helpers import QUESTIONS, draft, model

from foretell.bench.competitor import (
    Competitor,
    GenerationSettings,
    MethodCompetitor,
    MethodSpec,
    PeerCompetitor,
)
from foretell.bench.peers.base import Peer
from foretell.bench.questions import Question
from foretell.bench.run import BenchRun, first_divergence
from foretell.bench.schema import Answer, BenchSettings, QuestionResult
from foretell.bench.timestamps import TokenTimestamps
from foretell.bench.tracing import TracedPass, TracingRunner
from foretell.core.tree import tree_from_lists
from foretell.load import load
from foretell.utils.store import SETTINGS_FILE, RunStore

GENERATION = GenerationSettings(12)


def own(method: str, settings: GenerationSettings = GENERATION) -> MethodCompetitor:
    drafts = [load(str(draft()), "float32")] if method == "draft_model" else []
    return MethodCompetitor(model(), MethodSpec.parse(method), settings, drafts)


def result_of(answers: tuple[Answer, ...], name: str = "autoregressive/float32") -> QuestionResult:
    q = QUESTIONS[0]
    return QuestionResult(question=q.id, category=q.category, group=q.group, competitor=name, repeat=0, answers=answers)


class ConstantPeer(Peer):
    """Writes one token again and again; keeps the prompts and counts."""

    name = "transformers-plain/float32"

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def generate(self, prompt: Sequence[int], count: int) -> TokenTimestamps:
        self.calls.append((list(prompt), count))
        return TokenTimestamps((7,) * count, tuple(0.1 * (i + 1) for i in range(count)), (1,) * count)


class Interrupted(MethodCompetitor):
    """Is interrupted at its third question."""

    count = 0

    def answer(self, question: Question, plain_result: QuestionResult | None, repeat: int = 0) -> tuple[Answer, ...]:
        self.count += 1
        if self.count == 3:
            raise KeyboardInterrupt
        return super().answer(question, plain_result, repeat)


class Failing(MethodCompetitor):
    """Cannot answer one question."""

    def answer(self, question: Question, plain_result: QuestionResult | None, repeat: int = 0) -> tuple[Answer, ...]:
        if question.id == "talk":
            raise ValueError("too long")
        return super().answer(question, plain_result, repeat)


def test_the_second_prompt_contains_the_first_answer() -> None:
    plain = own("autoregressive").answer(QUESTIONS[0], None)
    answer = model().codec.decode(plain[0].tokens)
    messages = [
        {"role": "user", "content": QUESTIONS[0].turns[0]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": QUESTIONS[0].turns[1]},
    ]
    assert plain[1].prompt_tokens == len(model().tokens(messages))


@pytest.mark.parametrize("method", ["ngram", "suffix@4", "sam_recycling", "draft_model"])
def test_lossless_methods_answer_as_plain_decoding_and_are_counted_correctly(method: str) -> None:
    plain, mine = (own(m).answer(QUESTIONS[0], None) for m in ("autoregressive", method))
    assert first_divergence(result_of(mine), result_of(plain), QUESTIONS[0], model()) is None
    for t in mine:
        assert sum(t.arrival_counts) == len(t.tokens) and len(t.arrival_seconds) == t.passes
        assert sum(t.accepted_per_position) + t.passes >= len(t.tokens)
        assert all(a <= n for a, n in zip(t.accepted_per_position, t.tested_per_position, strict=False)) and len(
            t.accepted_per_position
        ) <= len(t.tested_per_position)


def test_a_divergence_is_found_with_its_margin() -> None:
    plain = own("autoregressive").answer(QUESTIONS[0], None)
    tokens = [*plain[1].tokens]
    tokens[4] = (tokens[4] + 1) % 256
    other = (plain[0], plain[1].model_copy(update={"tokens": tuple(tokens)}))
    found = first_divergence(result_of(other), result_of(plain), QUESTIONS[0], model())
    assert found is not None and (found.turn, found.position, found.plain_token) == (1, 4, plain[1].tokens[4])
    assert found.margin is not None and found.margin > 0


def test_a_shorter_answer_diverges_where_it_ends() -> None:
    plain = own("autoregressive").answer(QUESTIONS[0], None)
    short = (plain[0].model_copy(update={"tokens": plain[0].tokens[:5]}), plain[1])
    found = first_divergence(result_of(short), result_of(plain), QUESTIONS[0], model())
    assert found is not None and (found.position, found.margin) == (5, None)


def test_acceptance_is_counted_by_depth() -> None:
    runner = TracingRunner(model().runner())
    tree = tree_from_lists([[1, 2, 3, 4]], [[-1, 0, 1, 1]])
    kept = [(0,), (0, 1), (0, 1, 3)]
    runner.passes = [TracedPass(0, tree, 0, path) for path in kept] + [TracedPass(1, tree, 0, (0, 2))]
    assert runner.count_acceptance(1) == ((1,), (1,))
    assert runner.count_acceptance(0) == ((3, 2), (2, 1)) and runner.count_acceptance() == ((4, 2), (3, 1))


def test_a_method_keeps_its_state_only_with_remember() -> None:
    for remember, same in ((False, True), (True, False)):
        competitor = own("recycling", GenerationSettings(24, remember=remember))
        first, again = (competitor.answer(QUESTIONS[0], None) for _ in range(2))
        assert [t.tokens for t in first] == [t.tokens for t in again]
        assert ([t.passes for t in first] == [t.passes for t in again]) is same


def test_what_passes_take_is_known_to_the_next_question() -> None:
    target = model()
    before, competitor = target.pass_times.passes, own("ngram")
    for _ in range(2):
        competitor.answer(QUESTIONS[0], None)
    assert competitor._build_engine().budget.times is target.pass_times
    assert target.pass_times.passes > before + 2


def test_questions_answered_together_get_the_answers_of_single_ones() -> None:
    one, two = own("ngram", GenerationSettings(24)), own("ngram", GenerationSettings(24, batch=2))
    together = two.answer_together(QUESTIONS, [None] * len(QUESTIONS))
    for question, answers in zip(QUESTIONS, together, strict=True):
        alone = one.answer(question, None)
        assert [t.tokens for t in answers] == [t.tokens for t in alone]
        assert [t.accepted_per_position for t in answers] == [t.accepted_per_position for t in alone]
        assert all(sum(t.arrival_counts) == len(t.tokens) and t.read_per_pass >= 1 for t in answers)
        assert all(t.requests_per_pass == 1 for t in alone)
    assert max(t.requests_per_pass for answers in together for t in answers) > 1


def test_peers_get_the_prompts_and_the_lengths_of_plain_decoding() -> None:
    plain, peer = own("autoregressive").answer(QUESTIONS[0], None), ConstantPeer()
    turns = PeerCompetitor(peer, model()).answer(QUESTIONS[0], result_of(plain))
    assert [len(p) for p, _ in peer.calls] == [t.prompt_tokens for t in plain]
    assert [n for _, n in peer.calls] == [len(t.tokens) for t in plain] == [len(t.tokens) for t in turns]


SETTINGS = BenchSettings(
    model="m", tasks="t", digest="d", max_new_tokens=12, temperature=0, seed=0, threads=1, dtypes=("float32",)
)


def run(folder: Path, competitors: Sequence[Competitor], repeats: int = 2) -> list[QuestionResult]:
    with RunStore(folder, SETTINGS, QuestionResult) as store:
        BenchRun(competitors, {"float32": model()}, repeats).run(QUESTIONS, store, lambda _: None)
        return store.records


def test_an_interrupted_run_continues_without_answering_anything_twice(tmp_path: Path) -> None:
    plain, spec = own("autoregressive"), MethodSpec.parse("ngram")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [plain, Interrupted(model(), spec, GENERATION)])
    with RunStore(tmp_path, SETTINGS, QuestionResult) as store:
        before = list(store.records)
    assert 0 < len(before) < 8
    after = run(tmp_path, [plain, MethodCompetitor(model(), spec, GENERATION)])
    assert after[: len(before)] == before
    assert len({(r.question, r.competitor, r.repeat) for r in after}) == len(after) == 8
    assert all(r.divergence is None for r in after) and sum(r.compared for r in after) == 2


def test_a_question_that_does_not_fit_is_an_error_of_that_question_only(tmp_path: Path) -> None:
    results = run(tmp_path, [own("autoregressive"), Failing(model(), MethodSpec.parse("ngram"), GENERATION)], repeats=1)
    assert [r.error for r in results if r.competitor == "ngram/float32"] == ["too long", None]


def test_wrong_method_specs_are_explained() -> None:
    assert MethodSpec.parse("pld@6").label == "ngram@6"
    for text, words in (
        ("ngrams", "did you mean 'ngram'"),
        ("ngram@x", "number of drafted tokens"),
        ("ngram@999", "0 to 256"),
    ):
        with pytest.raises(ValueError, match=words):
            MethodSpec.parse(text)


def test_the_folder_of_an_older_run_is_refused(tmp_path: Path) -> None:
    old = SETTINGS.model_dump(mode="json")
    del old["format"]
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"another format .* choose another folder"):
        run(tmp_path, [own("autoregressive")])
