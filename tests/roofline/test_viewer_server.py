"""What the server of the page answers beside the page: HEAD, models from a config.json, and refusals."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from roofline_page import served_page

CONFIG = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}  # fmt: skip


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served_page() as found:
        yield found


def ask(
    address: str, path: str, method: str, body: bytes | None = None, kind: str = "application/json"
) -> tuple[int, bytes]:
    request = urllib.request.Request(address + path, body, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_head_has_no_body(address: str) -> None:
    assert ask(address, "", "HEAD") == (200, b"")


def test_a_configuration_becomes_graphs(address: str) -> None:
    status, body = ask(address, "model", "POST", json.dumps(CONFIG).encode())
    found = json.loads(body)
    assert status == 200 and found["model"]["vocab"] == 32000
    numbers = {number for graphs in found["model"]["graphs"].values() for g in graphs for number, _ in g["groups"]}
    assert max(numbers) < len(found["groups"])


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "says"),
    [
        ("model", b"{", "application/json", 400, "not JSON"),
        ("model", b"[" * 100_000, "application/json", 400, "not JSON"),
        ("model", b"\xff", "application/json", 400, "can't decode"),
        ("model", b"3", "application/json", 400, "one object"),
        ("model", b'{"model_type": "llama"}', "application/json", 400, "the configuration"),
        ("model", json.dumps(CONFIG | {"hidden_size": "abc"}).encode(), "application/json", 400, "hidden_size"),
        (
            "model",
            json.dumps(CONFIG | {"num_hidden_layers": -1}).encode(),
            "application/json",
            400,
            "num_hidden_layers",
        ),
        ("model", b" " * 1_000_001, "application/json", 413, "megabyte"),
        ("model", json.dumps(CONFIG).encode(), "text/plain", 404, "application/json"),
        ("other", json.dumps(CONFIG).encode(), "application/json", 404, "to /model"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_sentence(
    address: str, path: str, body: bytes, kind: str, status: int, says: str
) -> None:
    found, answer = ask(address, path, "POST", body, kind)
    assert found == status and says in json.loads(answer)["error"]
