"""Events of the engine are gathered on their way to the event loop, and none is lost or late for a begin or an end."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from serving import SETTINGS, running_server

from foretell.engine.request import Update
from foretell.serve.event_buffer import Event, EventBuffer


def event(ticket: int, reason: str | None = None) -> Event:
    return Event(ticket, 0.0, Update(1, (5,), "x", 0, finish_reason=reason))


def test_begins_and_ends_are_delivered_at_once_and_take_along_what_is_held() -> None:
    delivered = list[list[int]]()
    buffer = EventBuffer(lambda events: delivered.append([e.ticket for e in events]), 60.0)
    for given in ([event(1)], [event(1)], [event(1)], [event(1), event(2)], [event(2)], [event(1, "stop")], [event(2)]):
        buffer.put(given)
    assert delivered == [[1], [1, 1, 1, 2], [2, 1]]
    buffer.put([Event(3, 0.0, error=ValueError("refused"))])
    assert delivered[3:] == [[2, 3]]
    buffer.flush()
    assert len(delivered) == 4


def test_further_events_are_delivered_once_the_interval_is_over() -> None:
    delivered = list[int]()
    buffer = EventBuffer(lambda events: delivered.append(len(events)), 0.02)
    for _ in range(3):
        buffer.put([event(1)])
    time.sleep(0.03)
    buffer.put([event(1)])
    assert delivered == [1, 3]


@pytest.mark.parametrize(("interval", "tokens", "fewer"), [(0.0, 1, False), (10.0, 1, True), (0.0, 12, True)])
def test_a_stream_has_the_same_text_in_fewer_pieces(interval: float, tokens: int, fewer: bool) -> None:
    with running_server(replace(SETTINGS, stream_interval=interval)) as server:
        fields: dict[str, Any] = {"max_tokens": 30, "stream": True, "stream_interval": tokens, "ignore_eos": True}
        fields["speculative"] = {"max_drafts": 0}
        whole = server.chat(**fields | {"stream": False}).json()["choices"][0]["message"]["content"]
        lines = server.chat(**fields).text.split("\n\n")
        assert lines[-2] == "data: [DONE]"
        assert (len(lines) < 8) is fewer
        chunks = [json.loads(line[6:]) for line in lines[:-2]]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
