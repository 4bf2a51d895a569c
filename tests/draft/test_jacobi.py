"""Jacobi decoding: the iterates of a naive fixed-point iteration, whose fixed point is the answer of plain decoding."""

import pytest

from foretell.accept import Match
from foretell.core.context import Context
from foretell.core.sampling import CounterRNG, SamplingParams
from foretell.draft import Continuation, JacobiDrafter
from foretell.draft.jacobi import InitialGuess
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.shape import Trie
from helpers import all_logits, engine_for, generate, gumbel_max, naive, process, random_tokens, target

GREEDY = Request(random_tokens(17, seed=4), max_new_tokens=24)
SAMPLED = Request(random_tokens(9, seed=5), SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.3), 24)


def updated(request: Request, text: list[int], guesses: list[int]) -> list[int]:
    """One iteration by separate passes: what the target says at the end of the text and after every guess, each with
    its position's own number.
    """
    out, noise = [], CounterRNG(request.sampling_params.seed)
    for known in range(len(guesses) + 1):
        before = [*text, *guesses[:known]]
        distribution = process(all_logits(target(), before)[-1], before, len(request.prompt), request.sampling_params)
        out.append(gumbel_max(distribution, noise.key(len(before))))
    return out


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("slide", [True, False])
def test_iterates_are_those_of_separate_passes(request_: Request, slide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    offered, retrieve = list[list[int]](), JacobiDrafter.retrieve

    def spy(self: JacobiDrafter, context: Context, budget: int) -> list[list[Continuation]]:
        out = retrieve(self, context, budget)
        offered.append(list(out[0][0].tokens) if out[0] else [])
        return out

    monkeypatch.setattr(JacobiDrafter, "retrieve", spy)
    engine = engine_for(Method(JacobiDrafter(6, slide), Trie(6), Match()))
    engine.submit(request_)
    text, expected, moves = list(request_.prompt), list[int](), list[int]()
    while engine.busy:
        before = list(text)
        text += [t for u in engine.step() for t in u.tokens]
        if len(text) == len(before):
            continue
        guesses = offered.pop()
        fresh = [before[-1]] * len(guesses)
        assert guesses == [*expected, *fresh][: len(guesses)]
        new = updated(request_, before, guesses)
        moves.append(len(text) - len(before))
        assert text[len(before) :] == new[: moves[-1]]
        expected = new[moves[-1] :]
    assert max(moves) > 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("fresh", ["last", "random"])
@pytest.mark.parametrize("slide", [True, False])
@pytest.mark.parametrize("width", [1, 2, 3, 8, 30])
def test_the_fixed_point_is_the_answer_of_plain_decoding(width: int, slide: bool, fresh: InitialGuess) -> None:
    method = Method(JacobiDrafter(width, slide, fresh), Trie(width), Match())
    assert generate(method, [GREEDY, SAMPLED]) == [naive(target(), GREEDY), naive(target(), SAMPLED)]


def passes(method: Method[JacobiDrafter], request: Request) -> int:
    engine = engine_for(method, chunk=512)
    (done,) = engine.complete([request])
    assert list(done.tokens) == naive(target(), request)
    return done.statistics.target_passes


def test_a_block_takes_no_more_passes_than_tokens() -> None:
    for width in (3, 5):
        assert passes(Method(JacobiDrafter(width, slide=False), Trie(width), Match()), GREEDY) <= 24
    one = engine_for(Method(JacobiDrafter(1, slide=False), Trie(5), Match()))
    (done,) = one.complete([GREEDY])
    assert done.statistics.target_passes == 24 and done.statistics.drafted == 0


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_from_the_solution_every_block_takes_one_pass(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = [*request_.prompt, *naive(target(), request_), *[0] * 40]
    monkeypatch.setattr(
        JacobiDrafter, "_guess", lambda self, context, i, ahead: truth[context.sequences[i].length + ahead]
    )
    assert passes(Method(JacobiDrafter(4, slide=False), Trie(4), Match()), request_) == 6
    assert passes(Method(JacobiDrafter(5), Trie(5), Match()), request_) == 4


def test_a_trie_that_cuts_the_iterate_loses_nothing() -> None:
    assert generate(Method(JacobiDrafter(8), Trie(3), Match()), [GREEDY]) == [naive(target(), GREEDY)]


def test_an_end_of_sequence_that_is_not_settled_does_not_stop() -> None:
    end = naive(target(), GREEDY)[-1]
    request = Request([*GREEDY.prompt[:-1], end], max_new_tokens=24, eos=(end,))
    assert generate(Method(JacobiDrafter(6), Trie(6), Match()), [request]) == [naive(target(), request)]


def test_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        JacobiDrafter(0)
