"""Phrase retrieval: keys are the target's own states, the search is exact, and no answer changes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from foretell.accept import Match, Rejection
from foretell.catalogue import BuildContext, build
from foretell.core.context import Context, StepResult
from foretell.core.sampling import SamplingParams
from foretell.draft import CombinedRetriever, PhraseRetriever, SuffixRetriever
from foretell.draft.phrases import PhraseIndex, encode_documents
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Trie
from foretell.testing import TINY
from helpers import VOCAB, chain_tree, engine_for, generate, naive, random_tokens, target

TAP = TINY.layers + 1
REQUESTS = [
    Request(random_tokens(n, seed=n), SamplingParams(temperature=t, seed=n), 14)
    for n, t in ((3, 0.0), (17, 1.0), (40, 0.0))
]
DOCUMENTS = [random_tokens(50, seed=1), [], random_tokens(1, seed=2), random_tokens(30, seed=3)]


def states(tokens: list[int], hidden_layer: int = TAP) -> torch.Tensor:
    """Unit states of a text read in one pass."""
    output = DecoderRunner(target()).forward([0], chain_tree(tokens), hidden_layers=(hidden_layer,))
    return F.normalize(output.hidden_states[0].float(), dim=-1)


@pytest.mark.parametrize("hidden_layer", [0, 1, TINY.layers, TAP])
def test_every_token_of_a_document_has_its_state(hidden_layer: int) -> None:
    index = encode_documents(DecoderRunner(target()), DOCUMENTS, hidden_layer, chunk=16)
    assert len(index.tokens) == len(index.states)
    borders = [-1, *np.flatnonzero(index.tokens < 0)[1:].tolist()]
    parts = [
        (index.tokens[a + 1 : b], index.states[a + 1 : b]) for a, b in zip([0, *borders[1:]], borders[1:], strict=False)
    ]
    for document, (tokens, found) in zip([d for d in DOCUMENTS if d], parts, strict=True):
        assert tokens.tolist() == document
        torch.testing.assert_close(found, states(document, hidden_layer), rtol=0, atol=1e-5)


def test_documents_longer_than_the_context_are_read_in_parts() -> None:
    document = random_tokens(TINY.context + 9, seed=1)
    index = encode_documents(DecoderRunner(target()), [document], TAP)
    cut = TINY.context
    assert index.tokens.tolist() == [-1, *document[:cut], -1, *document[cut:], -1]
    torch.testing.assert_close(index.states[cut + 2 : -1], states(document[cut:]), rtol=0, atol=1e-5)
    assert encode_documents(DecoderRunner(target()), [], TAP).find(torch.zeros(0), 1, 4) == []


def test_the_search_is_exact() -> None:
    index = encode_documents(DecoderRunner(target()), DOCUMENTS, TAP)
    query = states(random_tokens(5, seed=7))[-1]
    for token in range(VOCAB):
        places = [j for j in range(1, len(index.tokens)) if index.tokens[j] == token]
        scored = sorted(((float(index.states[j - 1] @ query), j) for j in places), reverse=True)
        found = index.find(query, token, 3)
        assert [j for _, j in found] == [j for _, j in scored[:3]]
        assert [s for s, _ in found] == pytest.approx([s for s, _ in scored[:3]], abs=1e-5)


def test_copies_end_with_their_document() -> None:
    index = PhraseIndex(np.array([-1, 1, 2, 3, -1, 4, -1]), torch.zeros(7, 2))
    assert [index.copy(at, 2) for at in (1, 2, 3, 5)] == [(2, 3), (3,), (), ()]


def test_the_text_itself_is_found_aligned_and_accepted_at_full_length() -> None:
    request = Request(random_tokens(17, seed=5), max_new_tokens=44)
    text = [*request.prompt, *naive(target(), request)]
    index = encode_documents(DecoderRunner(target()), [random_tokens(60, seed=8), text], TAP)
    score, place = index.find(states(text[:30])[-1], text[30], 1)[0]
    assert score == pytest.approx(1, abs=1e-5) and index.copy(place, 5) == tuple(text[31:36])
    draft = PhraseRetriever(TAP, index, best=1, search_own=False)
    engine = engine_for(Method(draft, Trie(10), Match()), chunk=64)
    (done,) = engine.complete([request])
    assert list(done.tokens) == text[17:]
    assert done.statistics.target_passes == 5


def test_the_own_text_has_the_states_of_a_fresh_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, retrieve = list[tuple[list[int], torch.Tensor]](), PhraseRetriever._phrases

    def spy(self: PhraseRetriever, sources: list[PhraseIndex], query: torch.Tensor, token: int, most: int) -> object:
        seen.append(([*sources[-1].tokens.tolist(), token], sources[-1].states.clone()))
        return retrieve(self, sources, query, token, most)

    monkeypatch.setattr(PhraseRetriever, "_phrases", spy)
    request = REQUESTS[2]
    assert generate(Method(PhraseRetriever(TAP), Trie(8), Match()), [request], chunk=7) == [naive(target(), request)]
    assert len(seen) > 3
    for text, own in seen:
        torch.testing.assert_close(own, states(text[:-1]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("accept", [Match(), Rejection()], ids=["match", "rejection"])
def test_documents_never_change_an_answer(accept: Match | Rejection) -> None:
    texts = [naive(target(), r) for r in REQUESTS]
    for documents in (DOCUMENTS, [[*r.prompt, *t] for r, t in zip(REQUESTS, texts, strict=True)]):
        for own in (True, False):
            draft = PhraseRetriever(1, encode_documents(DecoderRunner(target()), documents, 1), search_own=own)
            assert generate(Method(draft, Trie(12), accept), REQUESTS) == texts


def test_together_each_sees_the_layers_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, keep = set[tuple[tuple[int, ...], int]](), PhraseRetriever.observe
    truth: dict[int, torch.Tensor] = {
        hidden_layer: states(list(REQUESTS[0].prompt), hidden_layer) for hidden_layer in (1, TAP)
    }

    def spy(self: PhraseRetriever, step: StepResult) -> None:
        widths.add((self.hidden_layers, len(step.output.hidden_states)))
        if step.context.sequences[0].length == 4:
            wanted = truth[self.hidden_layers[0]]
            torch.testing.assert_close(
                F.normalize(step.output.hidden_states[0].float(), dim=-1), wanted, rtol=0, atol=1e-5
            )
        keep(self, step)

    monkeypatch.setattr(PhraseRetriever, "observe", spy)
    draft = CombinedRetriever([PhraseRetriever(TAP), SuffixRetriever(), PhraseRetriever(1)])
    assert draft.hidden_layers == (1, TAP)
    assert generate(Method(draft, Trie(12), Match()), REQUESTS[:1]) == [naive(target(), REQUESTS[0])]
    assert widths == {((TAP,), 1), ((1,), 1)}


def test_forgets_a_row() -> None:
    draft = PhraseRetriever(TAP)
    generate(Method(draft, Trie(8), Match()), REQUESTS)
    assert not draft._rows
    empty = Context((0,), (), (), (), np.zeros(0, np.int64))
    assert draft.retrieve(Context((), (), (), (), empty.max_depth), 8) == []


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to search"):
        PhraseRetriever(TAP, search_own=False)
    with pytest.raises(ValueError, match="at least one phrase"):
        PhraseRetriever(TAP, copy=0)
    with pytest.raises(ValueError, match="hidden states"):
        build("phrases", BuildContext(VOCAB, None))
