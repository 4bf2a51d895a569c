"""What every method must fulfil: greedy tokens, the target's distribution, batch independence, correct caches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from foretell.catalogue import BUILT_IN
from foretell.core.sampling import SamplingParams
from foretell.draft import Drafter, DrafterUnion, DraftModel
from foretell.engine.method import AnyMethod
from foretell.engine.request import Request
from foretell.model.cache.kv_cache import KVCache
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.runner import Runner
from helpers import (
    FAMILIES,
    REPRESENTATIVES,
    VARIANTS,
    VOCAB,
    Choice,
    Phrases,
    Variant,
    all_logits,
    chain_tree,
    draft_tokens,
    engine_for,
    exact_distribution,
    generate,
    is_complete,
    letters,
    may_follow,
    methods_by_kind,
    naive,
    p_value,
    random_tokens,
    run,
    target,
    tokens_of,
    unchecked,
)

SMALL = 4
"""Vocabulary of the tests of distributions."""
START = [1, 0, 2]
FLAT = SamplingParams(temperature=2.5)
PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 40, 9, 1, 25)]

PLAIN = VARIANTS[0]

every_lossless = pytest.mark.parametrize(
    "variant", methods_by_kind([v for v in VARIANTS if v.lossless], pytest.mark.exhaustive_types)
)
kinds_of_lossless = pytest.mark.parametrize("variant", methods_by_kind([v for v in VARIANTS if v.lossless]))
every_lossy = pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.lossless], ids=str)
KINDS = (
    "draft_model", "block_verification", "specinfer", "spectr", "confident_block", "independent", "fixed_sampled",
    "greedy_block", "traversal",
)  # fmt: skip
every_kind_of_rejection = pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in KINDS], ids=str)
kinds_of_matching = pytest.mark.parametrize("variant", methods_by_kind([v for v in VARIANTS if v.same_seed]))
families_of_matching = pytest.mark.parametrize(
    "variant", methods_by_kind([v for v in VARIANTS if v.same_seed], of=FAMILIES)
)
kinds_of_rejecting = pytest.mark.parametrize(
    "variant", methods_by_kind([v for v in VARIANTS if v.lossless and not v.same_seed])
)
few_samples = pytest.mark.parametrize("samples", [200, pytest.param(2000, marks=pytest.mark.exhaustive)])

PARAMETERS: dict[str, dict[str, float]] = {
    "nothing": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
}


def forbidden_ends(end: int) -> dict[str, dict[str, Any]]:
    """What forbids the end-of-sequence token of an answer that its constraint has completed."""
    return {
        "nothing": {},
        "min_tokens": {"min_tokens": 14},
        "bias": {"logit_bias": {end: -float("inf")}},
        "bad words": {"bad_words": ((end,),)},
        "allowed tokens": {"allowed_token_ids": tuple(t for t in range(VOCAB) if t != end)},
    }


def requests_of(temperature: float, eos: tuple[int, ...] = ()) -> list[Request]:
    return [
        Request(
            p, SamplingParams(temperature=temperature, seed=i, top_k=9 * (i % 2)), max_new_tokens=10 + 2 * i, eos=eos
        )
        for i, p in enumerate(PROMPTS)
    ]


@cache
def matrix(temperature: float) -> tuple[tuple[str, Request, list[int]], ...]:
    """A request for every sampling parameter at this temperature, with the tokens of naive decoding."""
    prompt = PROMPTS[3]
    plain = Request(prompt, SamplingParams(temperature=temperature, seed=7), max_new_tokens=14)
    start = naive(target(), plain)
    end = min({*range(VOCAB)} - {*start[:5], 7, 9})
    requests = (
        {
            name: replace(plain, sampling_params=replace(plain.sampling_params, **values))  # type: ignore[arg-type]
            for name, values in PARAMETERS.items()
        }
        | {
            "bias": replace(
                plain, sampling_params=replace(plain.sampling_params, logit_bias={start[0]: -float("inf"), 5: 3.0})
            ),
            "drafts forbidden": replace(
                plain,
                sampling_params=replace(plain.sampling_params, logit_bias=dict.fromkeys(draft_tokens(), -float("inf"))),
            ),
            "bad words": replace(
                plain,
                sampling_params=replace(
                    plain.sampling_params, bad_words=((start[2],), tuple(start[4:6]), tuple(start[5:9]))
                ),
            ),
            "allowed": replace(
                plain, sampling_params=replace(plain.sampling_params, allowed_token_ids=tuple(range(3, 17)))
            ),
            "min tokens": replace(
                plain,
                sampling_params=replace(plain.sampling_params, min_tokens=9),
                eos=(start[3],),
                stop_token_ids=(start[6],),
                stop=(letters(start[1:3]),),
            ),
            "ignore eos": replace(plain, eos=(start[3],), ignore_eos=True),
            "stop token": replace(plain, stop_token_ids=(start[6],)),
            "constraint": replace(plain, constraint=Phrases()),
            "constraint and more": replace(
                plain,
                constraint=Phrases(),
                sampling_params=replace(
                    plain.sampling_params, bad_words=((12, 4), (12, 6)), repetition_penalty=1.3, min_p=0.01, top_k=3
                ),
            ),
            **{
                f"complete, no end by {name}": replace(
                    plain,
                    constraint=Choice((start[:5], start[:3], (start[0], 7, 9)), (end,)),
                    eos=(end,),
                    sampling_params=replace(plain.sampling_params, **values),
                )
                for name, values in forbidden_ends(end).items()
            },
            "stop where nothing may follow": replace(
                plain, constraint=Choice((start[:5],), (end,), final=False), stop=(letters(start[:5]),)
            ),
            "stop": replace(plain, stop=("zzz", "".join(chr(ord("a") + t) for t in start[4:6]))),
            "eos": replace(plain, eos=(start[6],)),
            "one token": replace(plain, max_new_tokens=1),
            "two tokens": replace(plain, max_new_tokens=2),
            "logprobs": replace(plain, logprobs=True),
        }
    )
    return tuple((name, request, naive(target(), request)) for name, request in requests.items())


@every_lossless
def test_greedy_tokens_are_those_of_naive_decoding(variant: Variant) -> None:
    assert generate(variant.make(VOCAB), requests_of(0, eos=(3,))[1:5]) == greedy_texts()


def best(p: np.ndarray) -> np.ndarray:
    token: np.ndarray = p == p.max()
    return token


def _default(option: str) -> Any:
    """The default of an option of the lossy methods."""
    return next(e.options.model_fields[option].default for e in BUILT_IN if option in e.options.model_fields)


GREEDY_RULES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "lenience_lossy": lambda p: p >= _default("lenience") * p.max(),
    "blockwise_lossy": lambda p: p >= np.sort(p)[-_default("accept_top_k")],
    "bild_lossy": lambda p: best(p) | (p >= np.exp(-_default("rollback_threshold"))),
    "early_exit_lossy": lambda p: p >= 0,
    "skip_decode_lossy": lambda p: p >= 0,
    "synthetic_lossy": lambda p: p >= 0,
    "medusa_lossy": best,
    "typical_lossy": best,
    "typical_tree": best,
}
"""Tokens that each lossy variant may give at temperature 0, by the target's softmax."""


@every_lossy
def test_lossy_greedy_tokens_follow_the_rule_and_changes_are_counted(variant: Variant) -> None:
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=20) for n in range(1, 25, 2)]
    rule = GREEDY_RULES[variant.name]
    changes = []
    for request, completion in zip(requests, engine_for(variant.make(VOCAB)).complete(requests), strict=True):
        tokens = completion.tokens
        assert len(tokens) == request.max_new_tokens
        logits = all_logits(target(), [*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        assert all(rule(row)[token] for row, token in zip(p, tokens, strict=True))
        changes.append(int(sum(row.argmax() != token for row, token in zip(p, tokens, strict=True))))
        assert completion.statistics.fidelity.changed == changes[-1]
    assert any(changes) is (rule is not best)


@cache
def greedy_texts() -> list[list[int]]:
    return [naive(target(), r) for r in requests_of(0, eos=(3,))[1:5]]


@cache
def texts_to_the_end() -> tuple[list[Request], list[list[int]]]:
    """Greedy requests that end at the context's end, and one that does not."""
    requests = [Request(random_tokens(n, seed=n), max_new_tokens=25) for n in (246, 255, 9, 241)]
    naive_texts = [naive(target(), replace(r, max_new_tokens=min(25, 256 - len(r.prompt)))) for r in requests]
    return requests, naive_texts


@pytest.mark.parametrize("variant", methods_by_kind([v for v in VARIANTS if v.lossless], of=FAMILIES))
def test_sequences_grow_up_to_the_end_of_the_context(variant: Variant) -> None:
    requests, expected = texts_to_the_end()
    with unchecked():
        assert generate(variant.make(VOCAB), requests, rows=4, chunk=512) == expected


def sampled(variant: Variant, sampling: SamplingParams, number: int) -> list[list[int]]:
    """Three tokens after the same prompt for each of `number` seeds."""
    requests = [Request(START, replace(sampling, seed=i), max_new_tokens=3) for i in range(number)]
    with unchecked():
        return generate(variant.make(SMALL), requests, rows=512, chunk=1 << 14, vocab=SMALL)


def fit(variant: Variant, sampling: SamplingParams, number: int) -> float:
    """p-value of the answers of `number` seeds under the target's distribution."""
    where = np.ravel_multi_index(np.array(sampled(variant, sampling, number)).T, (SMALL,) * 3)
    return p_value(np.bincount(where, minlength=SMALL**3), exact_distribution(target(SMALL), START, 3, sampling))


def sample_sizes() -> list[Any]:
    """The sampled methods with numbers of samples: many among the exhaustive tests. Of the others, representatives have
    enough to find an acceptor or drafter that is a little wrong, or to tell a lossy method, and the rest enough to find
    one that is very wrong.
    """
    counted = [PLAIN, *(v for v in VARIANTS if not v.same_seed)]
    well = [v for v in counted if v is PLAIN or v.name in {*KINDS, *REPRESENTATIVES}]
    few = [v for v in counted if v.lossless and v not in well]
    sizes = [(v, 200 if v.lossless else 400) for v in well] + [(v, 100) for v in few]
    return [pytest.param(v, number, id=f"{v}-{number}") for v, number in sizes] + [
        pytest.param(v, 3000, id=f"{v}-3000", marks=pytest.mark.exhaustive) for v in counted
    ]


@pytest.mark.parametrize(("variant", "samples"), sample_sizes())
def test_samples_follow_the_distribution_of_the_target_and_only_lossy_methods_fail(
    variant: Variant, samples: int
) -> None:
    assert fit(variant, FLAT, samples) > 1e-3 if variant.lossless else fit(variant, FLAT, samples) < 1e-6


@cache
def plain_texts() -> list[list[int]]:
    return sampled(PLAIN, FLAT, 100)


@kinds_of_matching
def test_every_seed_gives_the_tokens_of_plain_decoding(variant: Variant) -> None:
    assert sampled(variant, FLAT, 100) == plain_texts()


@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS, of=FAMILIES))
def test_answers_do_not_depend_on_batch_order_rows_or_chunks(variant: Variant) -> None:
    requests = requests_of(1.0)[1:3]
    with unchecked():
        # The answers of one seed are those of naive decoding, so one request alone is enough.
        apart = requests[-1:] if variant.same_seed else requests
        alone = [generate(variant.make(VOCAB), [r], rows=1, chunk=512)[0] for r in apart]
        if variant.same_seed:
            alone = [*sampled_texts()[:-1], *alone]
            assert alone == sampled_texts()
        assert generate(variant.make(VOCAB), requests[::-1], rows=4, chunk=7)[::-1] == alone


@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS, of=FAMILIES))
def test_requests_that_join_late_get_the_answers_they_get_alone(variant: Variant) -> None:
    requests = requests_of(1.0)[1:3]
    with unchecked():
        if variant.same_seed:
            alone = sampled_texts()
        else:
            alone = [generate(variant.make(VOCAB), [r], rows=1, chunk=512)[0] for r in requests]
        assert late_joiners(variant.make(VOCAB), requests) == alone


@cache
def sampled_texts() -> list[list[int]]:
    return [naive(target(), r) for r in requests_of(1.0)[1:3]]


def late_joiners(method: AnyMethod, requests: Sequence[Request]) -> list[list[int]]:
    """Answers when each request joins two steps after the one before."""
    engine, texts = engine_for(method, rows=2), dict[int, list[int]]()
    for request in requests:
        texts[engine.submit(request)] = []
        for _ in range(2):
            for update in engine.step():
                texts[update.request] += update.tokens
    for update in engine.run():
        texts[update.request] += update.tokens
    return list(texts.values())


@pytest.mark.parametrize("variant", methods_by_kind(VARIANTS))
def test_caches_equal_those_of_a_fresh_pass(variant: Variant) -> None:
    method = variant.make(VOCAB)
    prompts = PROMPTS[1:5]
    engine = engine_for(method, rows=len(prompts), chunk=64)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(prompt, SamplingParams(temperature=i % 2, seed=i), max_new_tokens=210))
    texts = [list(p) for p in prompts]
    for _ in range(12):
        for update in engine.step():
            texts[update.request - 1] += update.tokens
    for row, text in enumerate(texts):
        assert engine.runner.length(row) == len(text) - 1
        for runner in [engine.runner, *draft_runners(method.draft)]:
            exact = method.draft.exact_keys or runner is not engine.runner
            assert_fresh(runner, row, text, None if exact else len(prompts[row]))


def draft_runners(drafter: Drafter) -> list[Runner]:
    if isinstance(drafter, DrafterUnion):
        return [r for d in drafter.drafters for r in draft_runners(d)]
    return [drafter.runner] if isinstance(drafter, DraftModel) else []


def assert_fresh(runner: Runner, row: int, text: Sequence[int], first: int | None = None) -> None:
    """The row's keys and values are those of one pass over the tokens that it has read, or the `first` of them."""
    assert isinstance(runner, DecoderRunner)
    length = runner.length(row)
    assert length > len(text) - 8
    length = length if first is None else first
    fresh = DecoderRunner(runner.network)
    fresh.forward([0], chain_tree(text[:length]))
    found, expected = runner.cache, fresh.cache
    assert isinstance(found, KVCache) and isinstance(expected, KVCache)
    for layer in range(runner.network.config.layers):
        kept, wanted = (c.read(layer, torch.tensor([r]), length) for c, r in ((found, row), (expected, 0)))
        torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-10)


@pytest.mark.covering(1)
@families_of_matching
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_sampling_parameter_gives_the_naive_tokens(variant: Variant, temperature: float) -> None:
    assert_naive(variant, temperature)


@kinds_of_rejecting
def test_every_sampling_parameter_gives_the_naive_greedy_tokens(variant: Variant) -> None:
    assert_naive(variant, 0.0)


def assert_naive(variant: Variant, temperature: float) -> None:
    names, requests, texts = zip(*matrix(temperature), strict=True)
    with unchecked():
        updates = run(engine_for(variant.make(VOCAB), rows=5), requests)
    assert dict(zip(names, map(tokens_of, updates), strict=True)) == dict(zip(names, texts, strict=True))
    reasons = {name: u[-1].finish_reason for name, u in zip(names, updates, strict=True)}
    assert reasons == {
        name: "stop" if len(text) < r.max_new_tokens else "length" for name, r, text in matrix(temperature)
    }
    found = [p for u in updates[-1] for p in u.logprobs]
    logits = torch.from_numpy(all_logits(target(), [*requests[-1].prompt, *texts[-1]])[-len(texts[-1]) - 1 : -1])
    assert found == pytest.approx(torch.log_softmax(logits, -1)[range(len(texts[-1])), texts[-1]].tolist(), abs=1e-9)


@pytest.mark.parametrize("variant", methods_by_kind([v for v in VARIANTS if not v.same_seed]))
def test_sampled_drafts_and_lossy_rules_never_break_the_rules(variant: Variant) -> None:
    sampling = SamplingParams(temperature=3.0, bad_words=((12, 4), (8,)), min_tokens=3)
    requests = [
        Request(PROMPTS[i], replace(sampling, seed=i), 14, eos=(6,), constraint=Phrases() if i < 3 else None)
        for i in range(5)
    ]
    with unchecked():
        answers = generate(variant.make(VOCAB), requests)
    for request, answer in zip(requests, answers, strict=True):
        assert all(may_follow(request, answer[: i + 1]) for i in range(len(answer)))
        assert len(answer) == 14 or answer[-1] == 6 or is_complete(request, answer)


@pytest.mark.covering(1)
@every_kind_of_rejection
@pytest.mark.parametrize(
    "sampling",
    [
        replace(FLAT, top_k=3, top_p=0.9, min_p=0.12),
        replace(FLAT, repetition_penalty=1.5, presence_penalty=0.9, frequency_penalty=0.8, logit_bias={0: 1.5}),
        replace(FLAT, bad_words=((3,), (0, 2), (2, 1, 0)), top_k=3),
    ],
    ids=["truncated", "penalised", "ruled"],
)
@few_samples
def test_every_sampling_parameter_keeps_the_distribution(
    variant: Variant, sampling: SamplingParams, samples: int
) -> None:
    assert fit(variant, sampling, samples) > 1e-3


TEXTS = ((0, 1), (0, 2, 1), (2, 2), (2, 1, 1, 0), (1, 1, 1), (1, 0))
"""The texts of a choice over the small vocabulary; token 3 ends an answer."""


@few_samples
@kinds_of_rejecting
def test_a_choice_whose_end_is_forbidden_keeps_its_distribution(variant: Variant, samples: int) -> None:
    """Drafts reach the ends of answers, where no token may follow: the law is that of the texts, by enumeration."""
    sampling = replace(FLAT, min_tokens=9)
    choice = Choice(TEXTS, (3,))
    request = Request(START, sampling, 9, eos=(3,), constraint=choice)
    with unchecked():
        answers = generate(
            variant.make(SMALL),
            [replace(request, sampling_params=replace(sampling, seed=i)) for i in range(samples)],
            rows=512, chunk=1 << 14, vocab=SMALL,
        )  # fmt: skip

    def chance(text: tuple[int, ...]) -> float:
        product = 1.0
        for i, token in enumerate(text):
            logits = all_logits(target(SMALL), [*START, *text[:i]])[-1].astype(np.float64)
            logits[[not may_follow(request, [*text[:i], each]) for each in range(SMALL)]] = -np.inf
            p = np.exp((logits - logits.max()) / sampling.temperature)
            product *= p[token] / p.sum()
        return float(product)

    counts = np.bincount([TEXTS.index(tuple(answer)) for answer in answers], minlength=len(TEXTS))
    chances = np.array([chance(text) for text in TEXTS])
    assert chances.sum() == pytest.approx(1) and p_value(counts, chances) > 1e-3
