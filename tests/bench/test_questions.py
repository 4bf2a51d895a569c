"""Question files in every format, and broken ones."""

import json
from pathlib import Path

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
