"""The proposer for vLLM beside a stand-in for vLLM's batch: requests come, go and change places."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretell.catalogue import other_engines
from foretell.core.context import Context, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.draft.base import Continuation, Retriever
from foretell.engine.budget import Budget
from foretell.engine.pass_times import PassTimes
from foretell_vllm import BestChain, ForetellProposer
from helpers import unchecked

VOCAB, LONGEST, LENGTH = 64, 96, 6


def proposer(**options: Any) -> ForetellProposer:
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=LONGEST, tokenizer="nowhere")
    made = ForetellProposer(
        SimpleNamespace(
            model_config=model,
            speculative_config=SimpleNamespace(num_speculative_tokens=LENGTH),
            additional_config={"foretell": options} if options else {},
        )
    )
    # Of a machine on which further tokens of a pass cost nothing, so that everything likely is drafted.
    made._budget = Budget(PassTimes({1: 1.0, 256: 1.001}))
    return made


@dataclass
class Batch:
    """A target whose next token follows from the last one by a rule of each request, in vLLM's arrays."""

    drafter: ForetellProposer
    texts: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    rules: list[tuple[int, int, int]] = field(default_factory=list)
    accepted = drafted = passes = 0

    def add(self, prompt: list[int], factor: int = 3, size: int = 10, first: int = 0) -> None:
        self.texts.append(prompt)
        self.drafts.append([])
        self.rules.append((factor, size, first))

    def drop(self, i: int) -> None:
        """Remove a request; the last one moves to its place, as in vLLM."""
        lists: tuple[list[Any], ...] = self.texts, self.drafts, self.rules
        for values in lists:
            moved = values.pop()
            if i < len(values):
                values[i] = moved

    def step(self, logits: bool = True) -> list[list[int]]:
        sampled, rows = [], []
        for text, draft, (factor, size, first) in zip(self.texts, self.drafts, self.rules, strict=True):
            last, new = text[-1], list[int]()
            for token in (*draft, None):
                last = (last * factor + 1) % size + first
                new.append(last)
                if token != last:
                    break
            self.accepted, self.drafted = self.accepted + len(new) - 1, self.drafted + len(draft)
            for token in (text[-1], *draft):
                following = torch.tensor((token * factor + 1) % size + first)
                rows.append(torch.nn.functional.one_hot(following, VOCAB).float())
            text += new
            sampled.append(new)
        self.passes += len(sampled)
        tokens = np.zeros((len(self.texts), LONGEST + LENGTH + 1), np.int32)
        for i, text in enumerate(self.texts):
            tokens[i, : len(text)] = text
        self.drafter._logits = torch.stack(rows) if logits else torch.zeros(40, VOCAB)
        self.drafts = self.drafter.propose(sampled, np.array([len(text) for text in self.texts]), tokens)
        return self.drafts


@pytest.mark.parametrize("method", ["sam_recycling", "suffix", "recycling", "ngram", "hybrid"])
def test_requests_are_known_wherever_they_stand(method: str) -> None:
    batch = Batch(proposer(method=method))
    rng = np.random.default_rng(0)
    for n in range(60):
        if len(batch.texts) < 5:
            batch.add([int(rng.integers(10)) for _ in range(4)], *((3, 10, 0) if n % 2 else (7, 9, 20)))
        drafts = batch.step()
        rows = [request.row for request in batch.drafter._requests]
        assert len(set(rows)) == len(rows) <= 5 and max(rows) <= 6
        assert all(len(draft) <= LENGTH and all(0 <= t < VOCAB for t in draft) for draft in drafts)
        for i in reversed(range(len(batch.texts))):
            if len(batch.texts[i]) > 40:
                batch.drop(i)
    # Texts repeat after four to six tokens, so most of a draft of a text that is known again is right.
    assert batch.accepted > 0.5 * batch.drafted > 0 and batch.accepted > batch.passes


def test_requests_with_the_same_tokens_are_two() -> None:
    batch = Batch(proposer())
    for _ in range(2):
        batch.add([1, 2, 3])
    for _ in range(8):
        batch.step()
    assert len({request.row for request in batch.drafter._requests}) == 2
    assert batch.texts[0] == batch.texts[1] and batch.accepted


def test_a_prompt_that_is_read_in_parts_gets_no_drafts_and_disturbs_no_other() -> None:
    batch = Batch(proposer())
    batch.add([1, 2, 3])
    for _ in range(6):
        batch.step()
    text = batch.texts[0]
    tokens = np.zeros((2, 200), np.int32)
    new = [(text[-1] * 3 + 1) % 10]
    tokens[0, : len(text) + 1] = text + new
    drafts = batch.drafter.propose([new, []], np.array([len(text) + 1, 5]), tokens)
    assert drafts[1] == [] and len(drafts[0]) > 0


def test_no_draft_exceeds_the_longest_text() -> None:
    batch = Batch(proposer())
    batch.add([1, 2, 3])
    while len(batch.texts[0]) < LONGEST:
        batch.step()
        assert len(batch.texts[0]) + len(batch.drafts[0]) < LONGEST or not batch.drafts[0]


def test_logits_of_another_number_of_rows_teach_nothing() -> None:
    learned = []
    for logits in (True, False):
        batch = Batch(proposer(method="recycling"))
        batch.add([1, 2, 3])
        for _ in range(4):
            batch.step(logits)
        drafter: Any = batch.drafter._bound.method.draft
        learned.append(int((drafter.successors() >= 0).sum()))
    assert learned[0] > 0 == learned[1]


def test_references_are_read_with_the_tokenizer_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SimpleNamespace(encode=lambda text, special: [int(t) for t in text.split()])
    monkeypatch.setattr(other_engines, "resolve_reference", Path)
    monkeypatch.setattr(other_engines, "from_directory", lambda path: codec)
    (tmp_path / "text").write_text("50 51 52 53 54")
    with unchecked():
        batch = Batch(proposer(method="llma", references=[str(tmp_path / "text")], prompt_lookup_min=2))
    batch.add([1, 50, 51], factor=1, size=VOCAB)
    assert batch.step() == [[53, 54]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "nothing"}, "nothing"),
        ({"method": "eagle3"}, "does not draft by retrieval"),
        ({"method": "phrases"}, "own decoder only"),
        ({"method": "autoregressive"}, "beside another engine ngram"),
        ({"method": "suffix", "speed": 3}, "speed"),
        ({"method": "llma"}, "reference"),
    ],
)
def test_what_cannot_draft_there_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        proposer(**options)


class Given(Retriever):
    def __init__(self, *continuations: Continuation) -> None:
        self.continuations = list(continuations)

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        return [self.continuations for _ in context.rows]


def test_the_best_chain_has_the_most_expected_tokens_within_its_depth() -> None:
    sure, long = Continuation((1, 2), (0.9, 0.6)), Continuation((3, 4, 5, 6), (0.5, 0.5, 0.4, 0.3))
    for depth, expected in ((1, [1]), (2, [1, 2]), (4, [3, 4, 5, 6])):
        context = Context((0,), (TokenBuffer([7]),), (SamplingParams(),), (CounterRNG(0),), np.array([depth]))
        assert BestChain(8).grow(Given(sure, long), context).token[0].tolist() == [7, *expected]
