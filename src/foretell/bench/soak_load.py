"""The requests of a soak test: good ones of every kind, bad ones, and clients that leave, read slowly or do nothing."""

import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException

from foretell.bench.soak_client import BUSY, CHAT, WORDS, Json, SoakClient, SoakError, expect

_FIXED = tuple(f"Write {n} sentences about a {word}." for n, word in enumerate(WORDS[:12], 2))
"""Prompts that are asked again and again: their answers must stay the same."""
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_COMPLETIONS = "/v1/completions"


def act(client: SoakClient) -> str:
    """Do one thing at random; its name.

    Raises:
        SoakError: the server did something wrong. BusyError: it refused because of load.
    """
    (name,) = client.rng.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])
    try:
        _KINDS[name][1](client)
    except (OSError, HTTPException, ValueError) as error:
        raise SoakError(f"{name}: {type(error).__name__}: {error}") from error
    except SoakError as error:
        raise SoakError(f"{name}: {error}") from error
    return name


def _stream_greedy(client: SoakClient) -> None:
    prompt = client.rng.choice(_FIXED)
    client.known.check(prompt, client.stream(client.chat(prompt, temperature=0)))


def _sample_with_a_seed(client: SoakClient) -> None:
    prompt, seed = client.rng.choice(_FIXED), client.rng.randrange(3)
    answer = client.post(CHAT, client.chat(prompt, temperature=1, seed=seed))
    client.known.check(f"{prompt} {seed}", answer["choices"][0]["message"]["content"])


def _several_choices(client: SoakClient) -> None:
    body = {
        "prompt": [client.text(20), client.text(9)],
        "n": 2,
        "max_tokens": 8,
        "logprobs": 3,
        "stop": [" the", "."],
    }
    answer = client.post(_COMPLETIONS, body)
    expect(len(answer["choices"]) == 4, f"4 choices, found {len(answer['choices'])}")


def _structured_output(client: SoakClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    choice = client.post(CHAT, client.chat(client.text(5), response_format=schema))["choices"][0]
    if choice["finish_reason"] == "stop":
        expect(set(json.loads(choice["message"]["content"])) == {"name", "count"}, "an answer that fits the schema")


def _long_prompt(client: SoakClient) -> None:
    most = max(32, min(2000, (client.target.context - client.target.max_tokens) // 2))
    text = client.long_text(client.rng.randrange(16, most))
    client.stream(client.chat(f"{text} {client.text(10)}", cache_salt=client.rng.choice(("a", "b"))))


def _drafts_of_its_own(client: SoakClient) -> None:
    options: Json = {"method": "ngram"} if client.rng.random() < 0.5 else {"max_drafts": client.rng.randrange(4)}
    client.post(CHAT, client.chat(client.text(40), speculative=options, return_drafts=True))


def _other_endpoints(client: SoakClient) -> None:
    text = client.text(10)
    messages = [{"role": "user", "content": text}]
    path, body = client.rng.choice((
        ("/tokenize", {"prompt": text}),
        ("/v1/messages", {"messages": messages, "max_tokens": 8}),
        ("/v1/messages/count_tokens", {"messages": messages}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
    ))  # fmt: skip
    client.post(path, body)


def _leave_at_once(client: SoakClient) -> None:
    with client.send(client.chat(client.text(50), stream=True)):
        pass


def _leave_while_it_waits(client: SoakClient) -> None:
    with client.send(client.chat(client.text(200))):
        time.sleep(client.rng.random() / 2)


def _leave_in_the_stream(client: SoakClient) -> None:
    with client.send(client.chat(client.text(20), stream=True)) as connection:
        for _ in range(client.rng.randrange(1, 12)):
            if not connection.recv(1 << 12):
                return


def _leave_in_the_body(client: SoakClient) -> None:
    data = json.dumps(client.chat(client.text(100))).encode()
    with client.open() as connection:
        connection.sendall(client.target.head(CHAT, len(data)) + data[: client.rng.randrange(len(data))])


def _read_slowly(client: SoakClient) -> None:
    with client.send(client.chat(client.text(20), stream=True, logprobs=True, top_logprobs=5)) as connection:
        received = b""
        while new := connection.recv(1 << 11):
            received = (received + new)[-1000:]
            time.sleep(0.01)
        expect(
            b"[DONE]" in received or b" 429 " in received or b" 503 " in received, f"[DONE], found {received[-60:]!r}"
        )


def _stay_idle(client: SoakClient) -> None:
    with client.open():
        time.sleep(client.rng.uniform(0.5, 2))


def _send_nonsense(client: SoakClient) -> None:
    path, body, expected = client.rng.choice(_BAD)
    status, data = client.exchange(path, body)
    if status not in BUSY:
        expect(status in expected, f"status {expected}, found {status}: {data[:100]!r}")


_LONG = json.dumps({"prompt": "x" * 3_000_000}).encode()
_BAD: tuple[tuple[str, bytes, tuple[int, ...]], ...] = (
    (CHAT, b"", (400,)),
    (CHAT, b"{", (400,)),
    (CHAT, b"[" * 10_000, (400,)),
    (CHAT, b'{"messages": []}', (400,)),
    (CHAT, b'{"messages": [{"role": "user", "content": 7}]}', (400,)),
    (_COMPLETIONS, b'{"prompt": "x", "temperature": -1}', (400,)),
    (_COMPLETIONS, b'{"prompt": "x", "n": 100000}', (400,)),
    (_COMPLETIONS, b'{"prompt": [999999999]}', (400,)),
    (_COMPLETIONS, b'{"prompt": "x", "model": "no such model"}', (404,)),
    (_COMPLETIONS, b'{"prompt": "x", "structured_outputs": {"regex": "("}}', (400,)),
    (_COMPLETIONS, b'{"prompt": "\\ud800"}', (400,)),
    (_COMPLETIONS, _LONG, (400,)),
    ("/v1/models", b"{}", (405,)),
    ("/nothing", b"{}", (404,)),
)
_KINDS: Mapping[str, tuple[int, Callable[[SoakClient], None]]] = {
    "stream greedy": (10, _stream_greedy),
    "sample with a seed": (8, _sample_with_a_seed),
    "several choices": (4, _several_choices),
    "structured output": (4, _structured_output),
    "long prompt": (5, _long_prompt),
    "drafts of its own": (4, _drafts_of_its_own),
    "other endpoints": (4, _other_endpoints),
    "leave at once": (3, _leave_at_once),
    "leave while it waits": (3, _leave_while_it_waits),
    "leave in the stream": (4, _leave_in_the_stream),
    "leave in the body": (3, _leave_in_the_body),
    "read slowly": (2, _read_slowly),
    "stay idle": (2, _stay_idle),
    "send nonsense": (8, _send_nonsense),
}
"""How often each thing is done, relative to the others."""
