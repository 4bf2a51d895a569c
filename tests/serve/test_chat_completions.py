"""`/v1/chat/completions` and `/v1/completions`: answers, streams and errors, also with OpenAI's client."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from serving import NAME, Server

from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.serve.fields import choice_seed
from foretell.serve.protocol.chat import ChatCompletion
from foretell.serve.protocol.completions import Completion

QUESTION: Any = [{"role": "user", "content": "hello"}]


def model_of(server: Server) -> Model:
    return server.service.loaded.model


def expected(server: Server, text: str, n: int = 8, **sampling: Any) -> str:
    """The answer without a server."""
    (answer,) = model_of(server).generate(text, sampling=SamplingParams(**sampling), max_new_tokens=n)
    return answer.text


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream; the last one is not JSON."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = response.read().decode().split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_chat_gives_the_library_s_answer(server: Server, client: Any) -> None:
    found = client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=8, temperature=0)
    assert found.choices[0].message.content == expected(server, "hello")
    assert found.choices[0].finish_reason == "length" and found.system_fingerprint == "fp_test"
    assert found.usage.completion_tokens == 8 and found.usage.prompt_tokens == len("u:hello\na:")
    assert found._request_id
    ChatCompletion.model_validate(found.to_dict(), strict=True)


def test_a_stream_has_openai_s_shape_and_the_same_text(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, "stream_options": {"include_usage": True}}
    chunks = events(server, "/v1/chat/completions", body)
    assert len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *middle, last = chunks[1:]
    assert all(len(c["choices"]) == 1 and c["usage"] is None for c in [chunks[0], *middle])
    assert [c["choices"][0]["finish_reason"] for c in middle[:-1]] == [None] * (len(middle) - 1)
    assert middle[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in middle) == expected(server, "hello")
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    assert set(last["metrics"]) >= {"time_to_first_token_ms", "tokens_per_second", "speculative_decoding"}
    assert last["timings"]["predicted_n"] == 8
    assert "usage" not in events(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2})[0]


def test_speculation_is_reported(server: Server) -> None:
    found = server.chat("abcabcabcabc", max_tokens=60).json()
    metrics = found["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == metrics["num_spec_steps"]
    accepted = sum(depth * passes for depth, passes in enumerate(histogram))
    assert accepted == metrics["num_accepted_draft_tokens"] == found["timings"]["draft_n_accepted"]
    assert found["timings"]["draft_n"] == metrics["num_draft_tokens"] >= accepted


def test_choices_draw_with_the_seed_and_their_number(server: Server, client: Any) -> None:
    found = client.chat.completions.create(model="alias", messages=QUESTION, n=3, seed=5, max_tokens=8)
    wanted = [expected(server, "hello", temperature=1.0, seed=choice_seed(5, k)) for k in range(3)]
    assert [c.message.content for c in found.choices] == wanted and len(set(wanted)) == 3
    assert found.usage.prompt_tokens == 10 and found.usage.completion_tokens == 24
    chunks = events(server, "/v1/chat/completions", {"messages": QUESTION, "n": 3, "seed": 5, "max_tokens": 8})
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == wanted


def test_the_drawn_seed_repeats_the_answer(server: Server) -> None:
    first = server.chat(temperature=None).json()
    again = server.chat(temperature=None, seed=first["foretell"]["seed"]).json()
    assert first["choices"] == again["choices"]


def test_logprobs_of_a_chat(server: Server, client: Any) -> None:
    found = client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True)
    (answer,) = model_of(server).generate("hello", max_new_tokens=4, logprobs=True)
    entries = found.choices[0].logprobs.content
    assert [e.logprob for e in entries] == pytest.approx(answer.logprobs)
    assert b"".join(bytes(e.bytes) for e in entries).decode("utf-8", "replace") == answer.text


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"], [104, 105], [[104, 105], [97]]])
def test_prompts_of_every_kind(server: Server, client: Any, prompt: Any) -> None:
    found = client.completions.create(model=NAME, prompt=prompt, max_tokens=3, temperature=0, n=2)
    Completion.model_validate(found.to_dict(), strict=True)
    count = 2 if prompt in (["hi", "you"], [[104, 105], [97]]) else 1
    assert [c.index for c in found.choices] == list(range(2 * count))
    assert [c.text for c in found.choices[::2]] == [c.text for c in found.choices[1::2]]


def test_echo_and_logprobs_of_a_completion(server: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
    plain, echoed = (server.post("/v1/completions", body | {"echo": e}).json()["choices"][0] for e in (False, True))
    assert echoed["text"] == "hi" + plain["text"]
    found = server.post("/v1/completions", body | {"logprobs": 0, "return_tokens_as_token_ids": True}).json()
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 2] and len(logprobs["token_logprobs"]) == 3
    assert all(name.startswith("token_id:") for name in logprobs["tokens"])
    chunks = events(server, "/v1/completions", body | {"echo": True})
    assert "".join(c["choices"][0]["text"] for c in chunks) == echoed["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hällo", "a"])
def test_an_echoed_prompt_without_new_tokens_is_scored(server: Server, prompt: str, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0, "stream": stream}

    def answer(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if not stream:
            whole = server.post("/v1/completions", body | fields).json()
            return whole["choices"][0], whole["usage"]
        chunks = events(server, "/v1/completions", body | fields | {"stream_options": {"include_usage": True}})
        pieces = [c["choices"][0] for c in chunks if c["choices"]]
        shown = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        together = {name: [value for one in shown for value in one[name]] for name in shown[0]}
        text = "".join(piece["text"] for piece in pieces)
        return pieces[-1] | {"text": text, "logprobs": together}, chunks[-1]["usage"]

    count = len(prompt.encode())
    longer, _ = answer(max_tokens=1)
    for field in ("max_tokens", "n_predict"):
        scored, usage = answer(**{field: 0})
        assert scored["text"] == prompt and scored["finish_reason"] == "length"
        assert scored["logprobs"] == {name: values[:count] for name, values in longer["logprobs"].items()}
        assert scored["logprobs"]["token_logprobs"][0] is None and len(scored["logprobs"]["tokens"]) == count
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 0, count)


def test_prompts_that_are_only_echoed(server: Server, client: Any) -> None:
    options: dict[str, Any] = {"model": NAME, "max_tokens": 0, "echo": True, "n": 2}
    scored = client.completions.create(prompt=["hi", "you"], **options)
    assert [choice.text for choice in scored.choices] == ["hi", "hi", "you", "you"] and not scored.choices[0].logprobs
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, or 0 with echo, found 0"):
        client.completions.create(prompt="hi", **options | {"echo": False})


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_tokens_are_the_same_in_streams_where_text_is_held_back(server: Server, echo: bool) -> None:
    body: dict[str, Any] = {"prompt": "hällo 😀", "max_tokens": 24, "temperature": 0, "logprobs": 0, "echo": echo}
    plain = server.post("/v1/completions", body).json()["choices"][0]
    held = body | {"stop": [plain["text"][-6:-2] + "never"]}
    whole = server.post("/v1/completions", held).json()["choices"][0]
    pieces = [c["choices"][0] for c in events(server, "/v1/completions", held) if c["choices"]]
    places = [place for piece in pieces if piece["logprobs"] for place in piece["logprobs"]["text_offset"]]
    assert places == whole["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    assert "".join(piece["text"] for piece in pieces) == whole["text"] == plain["text"]
    assert places == sorted(places) and max(places) <= len(plain["text"])
    if echo:
        # One token per byte: the two of the umlaut and the four of the emoji begin with their character.
        assert places[:12] == [0, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7] and places[11] == len(body["prompt"])


def test_a_stop_string_and_ids(server: Server) -> None:
    text = expected(server, "hello", 20)
    found = server.chat(max_tokens=20, stop=[text[3:5]], return_token_ids=True).json()
    choice = found["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == text[: text.index(text[3:5])]
    assert len(choice["token_ids"]) == found["usage"]["completion_tokens"] < 20
    assert bytes(found["prompt_token_ids"][:1]) is not None


def test_the_final_message_is_continued(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "well"}]
    path, options = "/v1/chat/completions", {"max_tokens": 4, "temperature": 0}
    found = server.post(path, {"messages": messages, "continue_final_message": True, **options}).json()
    raw = server.post("/v1/completions", {"prompt": "u:hello\na:well", **options}).json()
    assert found["choices"][0]["message"]["content"] == raw["choices"][0]["text"]
    assert found["usage"]["prompt_tokens"] == len("u:hello\na:well")


def test_content_parts_and_roles(server: Server) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    found = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert found["usage"]["prompt_tokens"] == len("s:be kind\nu:hel\nlo\na:")


def test_the_same_bytes_alone_and_among_others(server: Server) -> None:
    def ask(i: int) -> Any:
        return server.chat(f"{'ab' * i} {i}", max_tokens=5, temperature=i % 2, seed=i).json()["choices"]

    alone = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_errors_of_the_client(server: Server, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert missing.value.code == "model_not_found" and "tiny" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a" * 600}])
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"


def test_models_tokens_and_state(server: Server, client: Any) -> None:
    assert [m.id for m in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve(NAME).to_dict()["max_model_len"] == 512
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").json() == server.http.get("/live").json() == {"status": "ok"}
    assert "version" in server.http.get("/version").json()
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models/{model}"} <= paths.keys()
    found = server.post("/tokenize", {"prompt": "hello"}).json()
    assert found["count"] == 5 and server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == "hello"
    chat = server.post("/tokenize", {"messages": QUESTION, "return_token_strs": True}).json()
    assert "".join(chat["token_strs"]) == "u:hello\na:" and server.post("/tokenize", {}).status_code == 400
