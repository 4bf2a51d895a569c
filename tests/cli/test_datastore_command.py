"""`foretell datastore`: what is built is what `rest` opens; every refusal is a sentence."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretell.catalogue import BuildContext, build
from foretell.catalogue.config import SpeculativeConfig
from foretell.cli.datastore import app
from foretell.draft import DatastoreRetriever
from word_codec import word_codec

CODEC = word_codec("a", "b", "c")


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.cli.datastore.load_codec", lambda reference: CODEC)


def call(*arguments: str | Path) -> str:
    """Standard output of the command; what it raises is raised."""
    found = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_builds_what_rest_opens(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a b c a b")
    (tmp_path / "texts" / "b.bin").write_bytes(b"\xff")
    (tmp_path / "c.jsonl").write_text('{"text": "b b"}\n{"text": "c"}\n')
    message = call("build", tmp_path / "texts", tmp_path / "c.jsonl", "--tokenizer", "any", "--out", tmp_path / "store")
    assert "3 documents, 11 tokens" in message and "tokenizer of any" in message
    assert call("show", tmp_path / "store") == message
    config = SpeculativeConfig(datastore=str(tmp_path / "store"))
    draft = build("rest", BuildContext(4, None, codec=CODEC), config).draft
    assert isinstance(draft, DatastoreRetriever) and len(draft.store) == 11
    with pytest.raises(ValueError, match="not the target's"):
        build("rest", BuildContext(4, None, codec=word_codec("c")), config)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_text("")
    for file, message in (("a.bin", "not UTF-8"), ("b.txt", "no such file"), ("empty.txt", "nothing to index")):
        with pytest.raises(ValueError, match=message):
            call("build", tmp_path / file, "--tokenizer", "any", "--out", tmp_path / "store")
    with pytest.raises(ValueError, match="no datastore here"):
        call("show", tmp_path)
    with pytest.raises(ValueError, match="build one with"):
        build("rest", BuildContext(4, None))
    assert not (tmp_path / "store").exists()
