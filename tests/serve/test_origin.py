"""Hosts and origins: web pages that want to reach a server on the same machine; and TLS."""

import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import trustme
from serving import SECONDS, SETTINGS, Server, read_until, running_server

from foretell.serve.origin import is_local
from foretell.serve.run import Address

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(replace(SETTINGS, allowed_hosts=("api.example",), cors_origins=("https://a.b",))) as found:
        yield found


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
        ("Foretell.localhost", 200),
        ("API.example.:443", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("api.example.evil", 403),
        ("evil.example:localhost", 403),
        ("[evil.example]", 403),
    ],
)
def test_a_page_cannot_reach_the_server_by_a_name_of_its_own(server: Server, host: str, status: int) -> None:
    """DNS rebinding: the name of a foreign page points to 127.0.0.1 on its second look-up."""
    for path in ("/v1/models", "/", "/health"):
        found = server.http.get(path, headers={"Host": host})
        assert found.status_code == status
        if status == 403:
            assert found.json()["error"]["type"] == "permission_error" and "--allowed-hosts" in found.text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("https://a.b", 200),
        ("https://api.example", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("https://api.example.evil", 403),
        ("https://api.example:81", 403),
    ],
)
def test_a_page_of_another_origin_cannot_send_requests(server: Server, origin: str | None, status: int) -> None:
    """A form or a script can send a body as text without asking first (CSRF)."""
    headers = {"Host": "api.example", "Content-Type": "text/plain"} | ({} if origin is None else {"Origin": origin})
    found = server.post("/v1/completions", BODY, headers=headers)
    assert found.status_code == status
    assert server.http.get("/v1/models", headers=headers).status_code == 200


def test_several_hosts_are_refused(server: Server) -> None:
    with socket.create_connection(server.address, SECONDS) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b"403 Forbidden" in read_until(connection, b"\r\n")


def test_what_is_local() -> None:
    assert [is_local(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_local(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


def test_tls_with_a_certificate_of_our_own(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for i, part in enumerate(certificate.cert_chain_pems):
        part.write_to_path(tmp_path / "certificate.pem", append=i > 0)
    address = Address(port=0, ssl_certfile=tmp_path / "certificate.pem", ssl_keyfile=tmp_path / "key.pem")
    with running_server(address=address) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting, doubting = (ssl.create_default_context() for _ in range(2))
        authority.configure_trust(trusting)
        other.configure_trust(doubting)
        with httpx2.Client(base_url=server.url, verify=trusting) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream:
                assert "[DONE]" in "".join(stream.iter_text())
        with httpx2.Client(base_url=server.url, verify=doubting) as http, pytest.raises(httpx2.ConnectError):
            http.get("/live")
        with httpx2.Client(base_url=server.url.replace("https", "http")) as http, pytest.raises(httpx2.HTTPError):
            http.get("/live")


@pytest.mark.parametrize("missing", ["certificate", "key", "both wrong"])
def test_a_wrong_certificate_is_one_sentence(tmp_path: Path, missing: str) -> None:
    from command import expect_error

    (tmp_path / "x").write_text("no certificate")
    given: dict[str, list[str]] = {
        "certificate": ["--ssl-keyfile", str(tmp_path / "x")],
        "key": ["--ssl-certfile", str(tmp_path / "nothing")],
        "both wrong": ["--ssl-certfile", str(tmp_path / "x"), "--ssl-keyfile", str(tmp_path / "x")],
    }
    assert "ssl" in expect_error("serve", "--port", "0", *given[missing])
