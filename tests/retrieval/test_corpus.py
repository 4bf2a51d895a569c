"""Documents of files, and their tokens, which do not depend on pieces and batches."""

from pathlib import Path

import pytest

from foretell.retrieval.corpus import NotTextError, find_files, read_documents, tokenize_documents
from word_codec import word_codec


def test_files_are_documents_and_lines_of_json_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "id": "x"}\n\n{"turns": ["two", {"answer": "three", "n": 4}]}\n')
    assert list(read_documents(tmp_path / "a.txt")) == ["one\ntwo"]
    assert list(read_documents(tmp_path / "b.jsonl")) == ["one", "two\nthree"]


def test_directories_are_searched_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", ".git/x", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".named").write_text("x")
    found = [str(f.relative_to(tmp_path)) for f in find_files([tmp_path, tmp_path / ".named"])]
    assert found == ["a/c.txt", "b.txt", ".named"]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ok \xff")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(NotTextError, match=r"a\.bin: not UTF-8 text \(byte 3\)"):
        list(read_documents(tmp_path / "a.bin"))
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: not valid JSON"):
        list(read_documents(tmp_path / "b.jsonl"))
    with pytest.raises(ValueError, match="no such file"):
        find_files([tmp_path / "c"])


def test_documents_stay_whole_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretell.retrieval.corpus._PIECE_CHARACTERS", 20)
    monkeypatch.setattr("foretell.retrieval.corpus._BATCH_PIECES", 3)
    codec = word_codec("a", "b", "c")
    texts = ["a b\n" * 30, "", "c", "b " * 25, *["a c"] * 9]
    assert [d.tolist() for d in tokenize_documents(texts, codec)] == [codec.encode(t) for t in texts]
