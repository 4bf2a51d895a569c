"""Shadow verification: equal answers, an engine that errs, requests that come first, methods that promise nothing."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from serving import SETTINGS, Server, running_server, wait_for

import foretell
from command import tiny_target
from foretell.core.sampling import SamplingParams
from foretell.engine.request import Request
from foretell.serve.shadow import ShadowVerifier, promises_the_same_text

CHECKED = replace(SETTINGS, shadow_rate=1.0)


def checks(server: Server) -> dict[str, int]:
    lines = server.service.metrics.text().decode().splitlines()
    found = [line.split('"') for line in lines if line.startswith("foretell:shadow_checks_total")]
    return {parts[1]: int(float(parts[2].removeprefix("} "))) for parts in found}


def test_answers_are_decoded_again_once_the_engine_is_idle(monkeypatch: Any, caplog: Any) -> None:
    with running_server(CHECKED) as server:
        for fields in ({}, {"temperature": 1.5, "seed": 3}, {"stop": ["zz"], "logprobs": True}):
            server.chat("abcabc", max_tokens=20, **fields)
        server.chat("abcabc", speculative={"max_drafts": 0})
        wait_for(lambda: checks(server)["equal"] == 3)
        assert checks(server) == {"equal": 3, "mismatch": 0, "skipped": 0, "failed": 0}
        updated = ShadowVerifier.updated

        def corrupted(self: Any, ticket: int, at: float, update: Any) -> None:
            updated(self, ticket, at, replace(update, tokens=(*update.tokens[:-1], 5)))

        monkeypatch.setattr(ShadowVerifier, "updated", corrupted)
        with caplog.at_level(logging.ERROR, "foretell.serve"):
            server.chat("abcabc", max_tokens=3)
            wait_for(lambda: checks(server)["mismatch"] == 1)
        (record,) = [r for r in caplog.records if r.getMessage() == "shadow mismatch"]
        assert record.fields["method"] == "suffix" and record.fields["token"] == [5]


def test_a_check_makes_way_for_requests_and_goes_on_later() -> None:
    with running_server(CHECKED) as server:
        server.engine.delay = 0.01
        server.chat("abcabc", max_tokens=30)
        wait_for(lambda: server.engine.busy)
        server.chat("abcabc", max_tokens=2)
        server.engine.delay = 0.0
        wait_for(lambda: checks(server)["equal"] == 2)
        server.wait_until_idle()
        assert sum(checks(server).values()) == 2


@pytest.mark.parametrize(
    ("method", "temperature", "promised"),
    [("suffix", 1.0, True), ("speculative_sampling", 1.0, False), ("speculative_sampling", 0.0, True)],
)
def test_only_what_promises_the_same_text_is_checked(method: str, temperature: float, promised: bool) -> None:
    model = foretell.load(str(tiny_target()), dtype="float32")
    found = model.method(method, drafts=[foretell.load(str(tiny_target()), dtype="float32")], shared=True)
    request = Request([1, 2], SamplingParams(temperature=temperature))
    assert promises_the_same_text(found, request) is promised
    assert not promises_the_same_text(found, replace(request, max_drafts=0))
