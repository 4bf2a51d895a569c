"""Fields that the engine answers, sent through the server."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import Server, running_server, wait_for

from foretell.engine.prompt_chunks import PromptChunks


def test_a_method_and_a_cap_per_request(server: Server) -> None:
    wanted = server.chat("abcabc", max_tokens=30).json()["choices"]
    for speculative, name in (
        ({"method": "ngram"}, "ngram"),
        ({"method": "pld", "max_drafts": 1}, "ngram"),
        ({"max_drafts": 0}, "autoregressive"),
        ({}, "suffix"),
    ):
        found = server.chat("abcabc", max_tokens=30, speculative=speculative, priority=1, deadline_ms=1e4).json()
        assert found["choices"] == wanted and found["foretell"]["method"] == name
        assert (found["timings"]["draft_n"] == 0) is (name == "autoregressive")
    for refused, reason in (
        ("layer_skip", "start it with --request-method layer_skip"),
        ("sufix", "'suffix'? Known: "),
    ):
        response = server.chat(speculative={"method": refused})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "speculative.method" and reason in error["message"]
        assert "eagle" not in error["message"], "the methods of this server alone are named"


def test_log_probabilities_of_the_prompt_as_lm_evaluation_harness_reads_them(server: Server) -> None:
    body = {"prompt": [[71, 72, 73]], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {4}
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    for name, logprob, top in list(
        zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
    )[1:]:
        assert top[name] == logprob <= max(top.values()) < 0
    whole = server.chat(prompt_logprobs=2, max_tokens=1).json()["prompt_logprobs"]
    assert whole[0] is None and len(whole) == len("u:hello\na:") and all(len(entry) >= 2 for entry in whole[1:])


def test_the_likeliest_tokens(server: Server) -> None:
    content = server.chat(logprobs=True, top_logprobs=3, max_tokens=4).json()["choices"][0]["logprobs"]["content"]
    for entry in content:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3 and best == sorted(best, reverse=True) and entry["logprob"] == best[0]


def test_tokens_that_are_allowed_forbidden_or_end_an_answer(server: Server) -> None:
    def ids(**fields: Any) -> Any:
        return server.chat(return_token_ids=True, **fields).json()["choices"][0]["token_ids"]

    plain = ids()
    assert set(ids(allowed_token_ids=[71, 72])) <= {71, 72}
    assert ids(stop_token_ids=[plain[2]])[-1] == plain[2] and len(ids(stop_token_ids=[plain[2]])) <= 3
    assert plain[0] not in ids(bad_words=[server.service.loaded.model.codec.decode([plain[0]])])
    response = server.chat(allowed_token_ids=[9999])
    assert response.status_code == 400 and response.json()["error"]["param"] == "allowed_token_ids"


def test_what_stopped_an_answer(server: Server) -> None:
    text = server.chat(max_tokens=20).json()["choices"][0]["message"]["content"]
    stop = text[3:5]
    for include in (False, True):
        (choice,) = server.chat(max_tokens=20, stop=stop, include_stop_str_in_output=include).json()["choices"]
        assert choice["stop_reason"] == stop and choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == text[: text.index(stop) + include * len(stop)]


@pytest.mark.parametrize("drafts", [0, 8])
def test_an_answer_that_repeats_itself_ends(server: Server, drafts: int) -> None:
    detection = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}
    fields: dict[str, Any] = {"repetition_detection": detection, "logit_bias": {"70": 100}, "max_tokens": 30}
    answer = server.chat(**fields, speculative={"max_drafts": drafts}, return_token_ids=True)
    (choice,) = answer.json()["choices"]
    assert choice["token_ids"] == [70] * 4 and "x-foretell-warning" not in answer.headers
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    for wrong in ({"max_pattern_size": 2, "min_count": 1}, {"max_pattern_size": 1, "min_pattern_size": 2}):
        response = server.chat(repetition_detection=wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "repetition_detection"


def test_a_predicted_output(server: Server) -> None:
    plain = server.chat(max_tokens=20).json()
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text}]):
        found = server.chat(max_tokens=20, prediction={"type": "content", "content": content}).json()
        details = found["usage"]["completion_tokens_details"]
        assert found["choices"][0]["message"]["content"] == text
        assert details["accepted_prediction_tokens"] > 0
    body: dict[str, Any] = {
        "prediction": {"type": "content", "content": text},
        "speculative": {"max_drafts": 8, "method": "ngram"},
    }
    origins = server.chat(max_tokens=20, return_drafts=True, **body).json()["foretell"]["origins"]
    assert origins["prediction"] > 0 and sum(origins.values()) == 20
    response = server.chat(prediction={"type": "content", "content": 3})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prediction"


def test_drafts_are_returned_with_their_origins(server: Server) -> None:
    plain = server.chat("abcabcabc", max_tokens=40).json()
    found = server.chat("abcabcabc", max_tokens=40, return_drafts=True).json()
    own, metrics = found["foretell"], found["metrics"]["speculative_decoding"]
    assert found["choices"] == plain["choices"] and "passes" not in plain["foretell"]
    assert own["method"] == "suffix" and sum(own["origins"].values()) == 40
    assert (
        own["origins"]["suffix"] == metrics["num_accepted_draft_tokens"]
        and len(own["passes"]) == own["origins"]["target"]
    )
    assert sum(own["refused"].values()) == metrics["num_draft_tokens"] - own["origins"]["suffix"]
    assert "".join(t["token"] for p in own["passes"] for t in p["tokens"]) == found["choices"][0]["message"]["content"]
    for one in own["passes"]:
        assert one["verify_ms"] > 0 and all(d["parent"] < i for i, d in enumerate(one["drafted"]))
    body = {"prompt": "abcabcabc", "max_tokens": 20, "temperature": 0, "stream": True, "return_drafts": True}
    lines = server.post("/v1/completions", body).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    *pieces, last = [c["foretell"] for c in chunks]
    passes = [one for piece in pieces for one in piece["passes"]]
    assert sum(len(p["tokens"]) for p in passes) == sum(last["origins"].values()) > 8
    assert last["seed"] is not None and chunks[-1]["choices"] == [] and "usage" not in chunks[-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_length_by_llama_cpp_s_name(server: Server, path: str) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    body.pop("messages" if path == "/v1/completions" else "prompt")

    def count(**fields: Any) -> int:
        usage: dict[str, int] = server.post(path, body | fields).json()["usage"]
        return usage["completion_tokens"]

    assert count(n_predict=5) == 5 and count(n_predict=5, max_tokens=3) == 3
    assert count(n_predict=-1, ignore_eos=True) > 200
    error = server.post(path, body | {"n_predict": 0}).json()["error"]
    assert error["param"] == "n_predict"


def test_the_timings_in_every_chunk(server: Server) -> None:
    body = {"prompt": "abcabcabc", "max_tokens": 20, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"timings_per_token": True, "stream_interval": 4}
    lines = server.post("/v1/completions", body).text.split("\n\n")[:-2]
    timings = [json.loads(line.removeprefix("data: "))["timings"] for line in lines]
    counts = [t["predicted_n"] for t in timings]
    assert len(counts) > 1 and counts == sorted(counts) and counts[-1] == 20
    assert all(0 <= t["draft_n_accepted"] <= t["draft_n"] for t in timings)
    assert timings[-1]["draft_n"] >= timings[-2]["draft_n"] and timings[-1]["prompt_n"] + timings[-1]["cache_n"] == 9


@pytest.mark.parametrize(("seconds", "pings"), [(0.05, True), (-1, False)])
def test_the_pings_of_a_silent_stream(server: Server, seconds: float, pings: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "stream": True, "sse_ping_interval": seconds}
    server.engine.delay = 0.2
    text = server.post("/v1/completions", body).text
    server.engine.delay = 0.0
    assert (": ping" in text) is pings and text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_progress_of_a_prompt(server: Server, wanted: bool) -> None:
    server.engine.delay, chunks = 0.25, server.engine._scheduler.chunks
    server.engine._scheduler.chunks = PromptChunks(50)
    body = {"prompt": "xy"[:: 1 if wanted else -1] * 60, "max_tokens": 2, "stream": True, "return_progress": wanted}
    lines = server.post("/v1/completions", body).text.split("\n\n")[:-2]
    server.engine.delay, server.engine._scheduler.chunks = 0.0, chunks
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    found = [e["prompt_progress"] for e in events if "prompt_progress" in e]
    assert [(p["processed"], p["total"], p["cache"]) for p in found] == [(n, 120, 0) for n in (0, 50, 100)] * wanted
    assert len({e["id"] for e in events}) == 1
    assert all("prompt_progress" in e for e in events[: len(found)]) and events[-1]["choices"][0]["finish_reason"]


def test_log_probabilities_of_the_whole_vocabulary_are_refused_with_what_is_allowed(server: Server) -> None:
    error = server.chat(prompt_logprobs=-1).json()["error"]
    assert error["param"] == "prompt_logprobs" and "at most 20 here" in error["message"]
    error = server.post("/v1/completions", {"prompt": "a", "suffix": "b"}).json()["error"]
    assert error["param"] == "suffix" and "infill" in error["message"]


@pytest.mark.parametrize(("deadline", "order"), [(1, ["late", "early"]), (None, ["early", "late"])])
def test_a_late_request_is_served_before_those_that_came_earlier(deadline: float | None, order: list[str]) -> None:
    with running_server(rows=1) as server, ThreadPoolExecutor(3) as threads:
        server.engine.delay = 0.02
        ended = list[str]()

        def answer(name: str, fields: dict[str, Any]) -> None:
            assert server.chat(name, ignore_eos=True, **fields).status_code == 200
            ended.append(name)

        def ask(name: str, **fields: Any) -> None:
            waiting = server.service.jobs.live
            threads.submit(answer, name, fields)
            wait_for(lambda: server.service.jobs.live > waiting)

        ask("long", max_tokens=100, speculative={"max_drafts": 0})
        wait_for(lambda: bool(server.engine._scheduler.running))
        ask("early")
        ask("late", deadline_ms=deadline)
        threads.shutdown()
        assert ended == ["long", *order]
