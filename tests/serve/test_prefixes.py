"""Which replica a request is routed to."""

import json
from typing import Any

import pytest

from foretell.serve.replicas.prefixes import BLOCK_BYTES, BLOCKS_PER_REQUEST, MAX_BLOCKS, Prefix, PrefixIndex, prefix_of

MOST = 4.0


def prefix(api_key: int | None = None, **fields: Any) -> Prefix:
    return prefix_of(json.dumps(fields).encode(), api_key)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def common(one: Prefix, other: Prefix) -> int:
    return sum(a == b for a, b in zip(one.blocks, other.blocks, strict=False))


def test_prompts_share_the_blocks_of_their_common_beginning() -> None:
    system = "s" * 4 * BLOCK_BYTES
    first, longer = prefix(messages=said(system, "a")), prefix(messages=said(system, "a", "b" * 3 * BLOCK_BYTES))
    other = prefix(messages=said(system, "c" * BLOCK_BYTES))
    assert common(first, longer) == len(first.blocks) == 4
    assert common(first, other) == 4 < len(other.blocks)
    assert common(first, prefix(messages=said("t" + system, "a"))) == 0
    assert prefix(prompt="short").blocks == ()


def test_prompts_of_other_clients_and_other_models_share_nothing() -> None:
    text = "s" * 1000
    one = prefix(prompt=text)
    assert len(one.blocks) == 3
    for other in (prefix(1, prompt=text), prefix(prompt=text, cache_salt="x"), prefix(prompt=text, model="y")):
        assert common(one, other) == 0
    assert (
        prefix(prompt="a", cache_salt="x") == prefix(prompt="b", cache_salt="x") != prefix(prompt="a", cache_salt="z")
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": 3}', b'{"messages": [{"content": null}]}', b"\xff"])
def test_a_body_without_a_prompt_has_no_prefix(body: bytes) -> None:
    assert prefix_of(body) == Prefix()


def test_a_long_prompt_is_compared_up_to_a_limit() -> None:
    assert len(prefix(prompt="x" * 10 * MAX_BLOCKS * BLOCK_BYTES).blocks) == MAX_BLOCKS
    assert len(prefix(prompt=list(range(5000))).blocks) > 50


def test_a_known_prefix_is_worth_some_load_and_not_more() -> None:
    index: PrefixIndex[str] = PrefixIndex(MOST)
    long = prefix(prompt="x" * BLOCK_BYTES * BLOCKS_PER_REQUEST * 2 + "x")
    index.record(long, "a")
    assert len(long.blocks) == 2 * BLOCKS_PER_REQUEST
    assert index.rank(long, {"a": 1, "b": 0}) == ["a", "b"]
    assert index.rank(long, {"a": 3, "b": 0}) == ["b", "a"]
    assert index.rank(Prefix(), {"a": 1, "b": 0}) == ["b", "a"]
    short = Prefix(long.blocks[:1])
    assert index.rank(short, {"a": 0, "b": 0})[0] == "a" and index.rank(short, {"a": 1, "b": 0})[0] == "b"
    longest = prefix(prompt="x" * BLOCK_BYTES * MAX_BLOCKS * 2)
    index.record(longest, "a")
    assert index.rank(longest, {"a": int(MOST) - 1, "b": 0})[0] == "a"
    assert index.rank(longest, {"a": int(MOST) + 1, "b": 0})[0] == "b"


def test_a_key_of_the_client_keeps_requests_together() -> None:
    index: PrefixIndex[str] = PrefixIndex(MOST)
    index.record(prefix(prompt="one", prompt_cache_key="k"), "b")
    asked = prefix(prompt="another", prompt_cache_key="k")
    assert index.rank(asked, {"a": 0, "b": int(MOST) - 1})[0] == "b"
    assert index.rank(asked, {"a": 0, "b": int(MOST) + 1})[0] == "a"


def test_new_prompts_take_turns() -> None:
    index: PrefixIndex[str] = PrefixIndex(MOST)
    chosen = []
    for number in range(6):
        asked = prefix(prompt=f"{number}" * 1000)
        chosen.append(index.rank(asked, {"a": 0, "b": 0, "c": 0})[0])
        index.record(asked, chosen[-1])
    assert chosen == ["a", "b", "c"] * 2


def test_only_the_whole_beginning_counts() -> None:
    index: PrefixIndex[str] = PrefixIndex(MOST)
    asked = prefix(prompt="x" * BLOCK_BYTES * 40)
    index.record(Prefix(asked.blocks[:8]), "a")
    index.record(Prefix(asked.blocks[4:]), "b")
    assert index.rank(asked, {"b": 0, "a": 0})[0] == "a"


def test_what_was_not_used_is_forgotten_and_so_is_a_replica() -> None:
    index: PrefixIndex[str] = PrefixIndex(MOST, max_entries=30)
    old, kept = prefix(prompt="o" * BLOCK_BYTES * 20), prefix(prompt="k" * BLOCK_BYTES * 20)
    index.record(old, "a")
    index.record(kept, "a")
    assert index.rank(kept, {"b": 1, "a": 2})[0] == "a" and index.rank(old, {"b": 1, "a": 2})[0] == "b"
    index.forget("a")
    assert index.rank(kept, {"b": 1, "a": 2})[0] == "b"
