"""The reported drafts of a pass: which part of a method made each token, and what was refused."""

from dataclasses import replace

import pytest

import foretell
from command import tiny_draft, tiny_target
from foretell.core.sampling import SamplingParams
from foretell.engine.provenance import TARGET
from foretell.engine.request import Completion, Request
from helpers import random_tokens

PROMPT = random_tokens(12, seed=1) * 3
REQUEST = Request(PROMPT, SamplingParams(temperature=20.0, seed=5), max_new_tokens=40, return_drafts=True)


def check(found: Completion) -> set[str]:
    """Check that the passes tell the answer; the origins of its tokens."""
    passes, statistics = found.passes, found.statistics
    assert tuple(t for p in passes for t in p.tokens) == found.tokens
    assert sum(len(p.drafted) for p in passes) == statistics.drafted
    assert len(passes) == statistics.target_passes
    for one in passes:
        kept, place = [d for d in one.drafted if d.accepted], -1
        assert one.origins == (*(d.origin for d in kept), TARGET)[: len(one.tokens)]
        for node in kept:
            assert node.parent == place
            place = one.drafted.index(node)
        assert [d.token for d in kept][: len(one.tokens)] == list(one.tokens[: len(kept)])
        assert one.time.total > 0
    return {o for p in passes for o in p.origins}


@pytest.mark.parametrize("method", ["autoregressive", "ngram", "sam_recycling", "hybrid_model"])
def test_passes_tell_the_answer_and_change_nothing(method: str) -> None:
    model, drafts = foretell.load(str(tiny_target()), dtype="float32"), [foretell.load(str(tiny_draft()))]
    engine = model.engine(model.method(method, drafts=drafts, shared=True), rows=2)
    asked, plain = engine.complete([REQUEST, replace(REQUEST, return_drafts=False)])
    assert asked.tokens == plain.tokens and not plain.passes
    names = {"ngram": {"prompt-lookup"}, "sam_recycling": {"suffix", "token-recycling"}, "autoregressive": set()}
    names |= {"hybrid_model": {"suffix", "token-recycling", "draft-model"}}
    drafted = {d.origin for p in asked.passes for d in p.drafted}
    assert check(asked) <= names[method] | {TARGET} and drafted <= names[method]
    assert drafted or not names[method]


def test_forced_tokens_are_the_grammar_s() -> None:
    pytest.importorskip("llguidance")
    from foretell.structured.compiler import ConstraintCompiler
    from foretell.structured.outputs import StructuredOutputs

    model = foretell.load(str(tiny_target()), dtype="float32")
    constraint = ConstraintCompiler(model.codec, model.eos).compile(StructuredOutputs(regex="(no|maybe) thank you"))
    (found,) = model.engine("ngram").complete([replace(REQUEST, constraint=constraint, eos=model.eos)])
    assert check(found) >= {"grammar", TARGET} and found.text.endswith(" thank you")


def test_queue_time_and_step_times_are_known() -> None:
    engine = foretell.load(str(tiny_target()), dtype="float32").engine("ngram", rows=1)
    first, second = engine.complete([replace(REQUEST, prompt=[1, 2, 3])] * 2)
    assert 0 < first.statistics.queue_seconds < second.statistics.queue_seconds
    step = engine.last_step
    assert 0 < step.verify < step.total and 0 < step.sample < step.total
    assert engine.load == (0, 0)
