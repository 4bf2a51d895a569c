"""What an answer reports and where it ends: log-probabilities, prompt log-probabilities, stop strings and tokens."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import PromptLookup
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request, Update
from foretell.model import kernels as native
from foretell.model.kernels.decoder import NativeDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Trie
from foretell.tokenizer.stream import Detokenizer
from helpers import VOCAB, all_logits, engine_for, letters, naive, random_tokens, target, wide_target

PROMPT = random_tokens(24, seed=2)
REQUEST = Request(PROMPT, SamplingParams(temperature=20.0, seed=5), max_new_tokens=24)


@cache
def answer() -> list[int]:
    return naive(target(), REQUEST)


def lookup() -> AnyMethod:
    """Drafts the answer itself."""
    return Method(PromptLookup(3, 1, 8, references=[[*PROMPT, *answer()]]), Trie(8), Match())


def reference_logprobs(tokens: list[int]) -> torch.Tensor:
    """After every token but the last."""
    return torch.log_softmax(torch.from_numpy(all_logits(target(), tokens)[-len(tokens) : -1]), -1)


def test_top_logprobs_are_the_most_probable_tokens_in_each_place() -> None:
    (completion,) = engine_for(lookup()).complete([replace(REQUEST, logprobs=3)])
    assert completion.statistics.tokens_per_pass > 1
    expected = reference_logprobs([*PROMPT, *completion.tokens])[len(PROMPT) - 1 :]
    values, ids = expected.topk(3)
    assert completion.logprobs == pytest.approx(expected[range(24), list(completion.tokens)].tolist(), abs=1e-9)
    assert [[t for t, _ in top] for top in completion.top_logprobs] == ids.tolist()
    assert [[p for _, p in top] for top in completion.top_logprobs] == pytest.approx(
        np.array(values.tolist()), abs=1e-9
    )
    (plain,) = engine_for(lookup()).complete([replace(REQUEST, logprobs=0)])
    assert plain.logprobs == completion.logprobs and plain.top_logprobs == ()


@pytest.mark.parametrize("chunk", [5, 512])
def test_prompt_logprobs_are_the_same_with_any_chunks_neighbours_and_cached_prefixes(chunk: int) -> None:
    engine = Engine(DecoderRunner(target()), lookup(), rows=2, chunk=chunk, prefix_caching=True)
    asked = replace(REQUEST, prompt_logprobs=2, max_new_tokens=3)
    found = [engine.complete([replace(asked, prompt_logprobs=None), *[asked] * n])[-1] for n in (1, 2)]
    expected = reference_logprobs(PROMPT)
    for completion in found:
        assert completion.prompt_logprobs == pytest.approx(expected[range(23), PROMPT[1:]].tolist(), abs=1e-9)
        assert [t for top in completion.prompt_top_logprobs for t, _ in top] == expected.topk(
            2
        ).indices.flatten().tolist()
        assert list(completion.tokens) == naive(target(), asked)


@pytest.mark.skipif(not native.available(), reason="the CPU kernels are not available")
def test_prompt_logprobs_have_the_same_bits_in_all_chunks_on_the_kernels() -> None:
    runners = [DecoderRunner(NativeDecoder(wide_target(), "float32")) for _ in range(3)]
    asked = replace(REQUEST, prompt_logprobs=1, logprobs=1)
    found = [Engine(r, lookup(), chunk=c).complete([asked])[0] for r, c in zip(runners, (1, 7, 512), strict=True)]
    assert len({(c.prompt_logprobs, c.prompt_top_logprobs, c.logprobs) for c in found}) == 1


def test_nothing_after_a_stop_string_inside_a_run_of_accepted_drafts_is_reported() -> None:
    updates, whole = list[Update](), engine_for(lookup()).complete([replace(REQUEST, logprobs=1)])[0]
    count = next(i for i in range(5, 24) if answer()[i - 1] not in answer()[: i - 1])
    stop = letters(answer()[count - 1 : count])
    (completion,) = engine_for(lookup()).complete([replace(REQUEST, stop=(stop,), logprobs=1)], updates.append)
    assert completion.finish_reason == "stop" and completion.stop_reason == stop
    assert completion.tokens == whole.tokens[:count] and completion.text == letters(answer()[: count - 1])
    assert completion.logprobs == whole.logprobs[:count] and completion.top_logprobs == whole.top_logprobs[:count]
    statistics = completion.statistics
    assert statistics.new_tokens == count < statistics.target_passes * 9
    accepted = sum(u.accepted for u in updates)
    assert sum(statistics.accepted_per_position) == accepted <= count - statistics.target_passes + 1


def test_the_text_leaves_out_what_ends_the_answer_unless_asked_for() -> None:
    tokens = answer()
    end = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    text = letters(tokens[: end + 1])
    for fields, reason in (
        ({"stop_token_ids": (tokens[end],)}, tokens[end]),
        ({"eos": (tokens[end],)}, None),
        ({"stop": (letters([tokens[end]]),)}, letters([tokens[end]])),
    ):
        for include in (False, True):
            asked = replace(REQUEST, include_stop_str_in_output=include, **fields)
            (completion,) = engine_for(lookup()).complete([asked])
            assert completion.text == (text if include else text[:-1])
            assert completion.finish_reason == "stop" and completion.stop_reason == reason
            assert list(completion.tokens) == tokens[: end + 1]


def test_special_tokens_are_shown_if_asked_for() -> None:
    def detokenizer(skip_special_tokens: bool = True) -> Detokenizer:
        return Detokenizer(lambda tokens: letters([t for t in tokens if t != 0 or not skip_special_tokens]))

    engine = Engine(DecoderRunner(target()), lookup(), detokenizer=detokenizer)
    only = SamplingParams(temperature=50.0, allowed_token_ids=(0, 1))
    shown, hidden = engine.complete(
        [replace(REQUEST, sampling_params=only, skip_special_tokens=s) for s in (False, True)]
    )
    assert shown.tokens == hidden.tokens and hidden.text == shown.text.replace("a", "") != shown.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"logprobs": -1}, "logprobs must be a number of tokens from 0"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be a number of tokens from 0"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids names a token outside"),
        ({"sampling_params": SamplingParams(allowed_token_ids=(1, VOCAB))}, "allowed_token_ids names a token outside"),
        ({"sampling_params": SamplingParams(bad_words=((1, -1),))}, "bad_words names a token outside"),
    ],
)
def test_impossible_fields_are_refused_with_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        engine_for(lookup()).submit(replace(REQUEST, **fields))  # type: ignore[arg-type]


def test_rules_that_leave_no_token_end_the_request_and_not_its_neighbours() -> None:
    impossible = SamplingParams(allowed_token_ids=(4,), bad_words=((4,),))
    good, bad = engine_for(lookup()).complete(
        [REQUEST, replace(REQUEST, sampling_params=impossible)], raise_errors=False
    )
    assert list(good.tokens) == answer()
    assert bad.finish_reason == "error" and "no token can be sampled" in str(bad.error)
