"""Question files in every format, and broken ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_helpers import refused

from foretell.bench.questions import load_questions


def write(path: Path, *lines: object) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(path)


def test_the_built_in_questions_cover_the_six_categories() -> None:
    tasks = load_questions("builtin")
    assert tasks.categories == ("conversation", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert len(tasks.questions) == 24 and not tasks.problems
    assert {len(q.turns) for q in tasks.questions if q.category == "conversation"} == {2}
    assert {q.group for q in tasks.questions} == {"mt_bench", *tasks.categories[1:]}


def test_every_format_of_line_is_read(tmp_path: Path) -> None:
    source = write(
        tmp_path / "q.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "…"},
        {"prompt": "three", "id": "x", "category": "mine"},
        "",
        json.dumps("four"),
    )
    a, b, c, d = load_questions(source).questions
    assert (a.id, a.category, a.group, a.turns) == ("81", "writing", "mt_bench", ("one", "two"))
    assert b.id == "HumanEval/0" and b.category == "humaneval" and b.turns[0].endswith("def f():\n")
    assert (c.id, c.category, c.turns) == ("x", "mine", ("three",))
    assert (d.id, d.category, d.turns) == ("5", "prompts", ("four",))


SPEED_BENCH: list[dict[str, Any]] = [
    {"question_id": "a1", "category": "writing", "sub_category": "essay", "turns": ["one", "two"], "source": "s",
     "src_id": "1", "difficulty": "easy", "multiturn": True},
    {"question_id": "a2", "category": "low_entropy", "sub_category": "code", "turns": ["three"], "source": "s",
     "src_id": "2", "difficulty": "", "multiturn": False},
    {"question_id": "a3", "category": "qa", "sub_category": "code", "source": "s", "src_id": "2", "difficulty": "",
     "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\nyou are {role}"],
     "multiturn": False},
]  # fmt: skip
"""Rows with the columns of nvidia/SPEED-Bench, of its qualitative and its throughput files; the last is withheld."""


@pytest.mark.parametrize("form", ["turns", "messages", "parquet"])
def test_files_of_speed_bench_are_read(form: str, tmp_path: Path) -> None:
    """`messages` is what NVIDIA's script for JSONL writes, parquet what the hub has and the other script writes."""
    path = tmp_path / ("q.parquet" if form == "parquet" else "q.jsonl")
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(SPEED_BENCH), path)
    elif form == "turns":
        write(path, *SPEED_BENCH)
    else:
        rows = [
            {**row, "messages": [{"role": "user", "content": turn} for turn in row["turns"]]} for row in SPEED_BENCH
        ]
        write(path, *({k: v for k, v in row.items() if k != "turns"} for row in rows))
    tasks = load_questions(str(path))
    assert [(q.id, q.category, q.group, q.turns) for q in tasks.questions] == [
        ("a1", "writing", "writing", ("one", "two")), ("a2", "low_entropy", "low_entropy", ("three",)),
    ]  # fmt: skip
    (problem,) = tasks.problems
    assert "3: SPEED-Bench's file on the hub has no text here" in problem
    assert [q.id for q in tasks.select(None, ["low_entropy"]).questions] == ["a2"]


def test_messages_of_others_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "q.jsonl", {"messages": [{"role": "system", "content": "be brief"}]}, {"prompt": "x"})
    assert "those of the user alone" in load_questions(source).problems[0]


def test_parquet_without_its_reader_or_broken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        load_questions(str(tmp_path / "q.parquet"))
    monkeypatch.undo()
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="not a parquet file"):
        load_questions(str(tmp_path / "q.parquet"))


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    tasks = load_questions(write(tmp_path / "q.txt", "first", "", "second"))
    assert [q.turns for q in tasks.questions] == [("first",), ("second",)]


def test_broken_lines_are_named_and_the_others_read(tmp_path: Path) -> None:
    source = write(
        tmp_path / "q.jsonl",
        {"prompt": "good"},
        '{"prompt": ',
        {"turns": []},
        {"prompt": " "},
        7,
        {"prompt": "x", "id": 1},
    )
    tasks = load_questions(source)
    assert [q.turns for q in tasks.questions] == [("good",)]
    assert [int(p.split("line ")[1].split(":")[0]) for p in tasks.problems] == [2, 3, 4, 5, 6]
    assert "not valid JSON" in tasks.problems[0] and "appears twice" in tasks.problems[-1]


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "no question"), ("{", "line 1"), (None, "no such question file")],
    ids=["empty", "all broken", "missing"],
)
def test_a_file_without_questions_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "q.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=words):
        load_questions(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        load_questions(str(tmp_path / "q.jsonl"))


def test_selection_takes_the_first_of_each_category() -> None:
    tasks = load_questions("builtin").select(2, ["rag", "qa"])
    assert [q.id for q in tasks.questions] == ["qa-1", "qa-2", "rag-1", "rag-2"]


def test_an_unknown_category_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'summarization'"):
        load_questions("builtin").select(None, ["summarisation"])
    assert "did you mean 'rag'" in refused("run", "--out", tmp_path / "o", "--categories", "rags")
