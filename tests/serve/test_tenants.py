"""No tenant can find out by time what another one sent: nothing that is remembered is shared between API keys or
cache salts, so that a request takes the same steps whoever asked before.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serving import SETTINGS, Server, running_server

import foretell
from command import tiny_target
from foretell.draft import OnlineDrafter
from foretell.serve.loaded import MAX_SALTED, Methods
from foretell.structured.outputs import StructuredOutputs

KEYS = tuple(f"key-{i}" for i in range(6))
PROMPT = "abcabd" * 12


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(replace(SETTINGS, api_keys=KEYS), method="recycling") as found:
        yield found


def observed(server: Server, key: int, **fields: Any) -> tuple[int, int, Any]:
    """What a client can see of the server's memory: tokens from the cache, steps of the engine, and drafts."""
    before, headers = server.engine.steps, {"x-api-key": KEYS[key]}
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_drafts": True} | fields
    found = server.post("/v1/completions", body, headers=headers).json()
    for one in found["foretell"]["passes"]:
        for name in ("draft_ms", "verify_ms", "step_ms"):
            del one[name]
    return found["usage"]["prompt_tokens_details"]["cached_tokens"], server.engine.steps - before, found["foretell"]


def without_seed(found: tuple[int, int, Any]) -> tuple[int, int, Any]:
    return *found[:2], {k: v for k, v in found[2].items() if k != "seed"}


def test_keys_and_salts_share_nothing(server: Server) -> None:
    fresh = without_seed(observed(server, 0))
    warm = without_seed(observed(server, 0))
    assert fresh[0] == 0 and warm[0] > 50 and warm[2] != fresh[2]
    assert without_seed(observed(server, 1)) == fresh
    assert without_seed(observed(server, 1, cache_salt="x")) == fresh
    assert without_seed(observed(server, 2, cache_salt="x")) == fresh
    assert without_seed(observed(server, 2, cache_salt="x"))[0] == warm[0]
    assert without_seed(observed(server, 0, cache_salt="key 1")) == fresh


@pytest.mark.parametrize("salt", ["", "a/b", "a@b", "a\\b", "a\0b", "x" * 129, 7])
def test_a_wrong_salt_is_named(server: Server, salt: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1, "cache_salt": salt}
    refused = server.post("/v1/completions", body, headers={"x-api-key": KEYS[0]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_grammars_are_compiled_for_each_tenant() -> None:
    model, outputs = foretell.load(str(tiny_target()), dtype="float32"), StructuredOutputs(regex="[ab]{3}")
    one = model.constraint(outputs, "a")
    assert model.constraint(outputs, "a") is one and model.constraint(outputs, "b") is not one


def test_a_drafter_that_is_trained_learns_from_each_salt_apart(monkeypatch: Any) -> None:
    model = foretell.load(str(tiny_target()), dtype="float32")
    methods = Methods(model.method, "suffix", {"ngram"})
    assert methods.for_salt(None, "a") is None
    assert methods.for_salt(methods.get("ngram"), "a") is methods.get("ngram")
    monkeypatch.setattr(type(methods.get("suffix").draft), "learns", True, raising=False)
    own = methods.for_salt(None, "a")
    assert own is not None and own is not methods.get("suffix") and methods.for_salt(None, "") is None
    assert methods.for_salt(None, "a") is own and methods.for_salt(methods.get("suffix"), "a") is own
    assert methods.for_salt(None, "b") is not own
    for i in range(MAX_SALTED):
        methods.for_salt(None, str(i))
    assert methods.for_salt(None, "a") is not own, "the least recently used is forgotten"
    assert OnlineDrafter.learns
