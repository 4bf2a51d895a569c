"""Questions of a benchmark: files of Spec-Bench, SPEED-Bench and HumanEval, JSONL of prompts, plain text, and a small
built-in set.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from foretell.utils.names import unknown
from foretell.utils.validation import parse_json

BUILT_IN = "builtin"
"""Name of the questions that come with the package, written for it, in Spec-Bench's six categories."""
_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Begins turns of SPEED-Bench that its files on the hub do not have; its scripts put them in."""
_Entry = TypeVar("_Entry")
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "conversation")


@dataclass(frozen=True)
class Question:
    """One conversation: the user's turns. Each is sent with the model's answers to the earlier ones."""

    id: str
    category: str
    turns: tuple[str, ...]
    is_speed_bench: bool = False
    """Whether it is one of SPEED-Bench (arXiv 2604.09557), whose categories have names of MT-bench's."""

    @property
    def group(self) -> str:
        """Column of Spec-Bench's table: the categories of MT-bench are one."""
        return "mt_bench" if self.category in _MT_BENCH and not self.is_speed_bench else self.category


@dataclass(frozen=True)
class QuestionSet:
    """Questions of a file, and one sentence per broken line."""

    source: str
    questions: tuple[Question, ...]
    problems: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """In order of first appearance."""
        return tuple(dict.fromkeys(q.category for q in self.questions))

    @property
    def digest(self) -> str:
        """Hash of all questions."""
        return sha256(json.dumps([[q.id, q.category, *q.turns] for q in self.questions]).encode()).hexdigest()[:16]

    def select(self, per_category: int | None = None, categories: Sequence[str] = ()) -> "QuestionSet":
        """The first `per_category` questions of the named categories (none named: of all).

        Raises:
            ValueError: a category that the file does not have, or nothing is left.
        """
        for name in categories:
            if name not in self.categories:
                raise unknown("category", name, self.categories)
        if per_category is not None and per_category < 1:
            raise ValueError(f"at least one question per category is needed, found {per_category}")
        taken: dict[str, int] = defaultdict(int)
        kept = []
        for q in self.questions:
            if (not categories or q.category in categories) and (
                per_category is None or taken[q.category] < per_category
            ):
                taken[q.category] += 1
                kept.append(q)
        return QuestionSet(self.source, tuple(kept), self.problems)


def in_turns(questions: Sequence[Question]) -> list[Question]:
    """The first question of every category, then the second of every category, and so on."""
    numbers: dict[str, int] = defaultdict(int)
    rounds = list[int]()
    for question in questions:
        rounds.append(numbers[question.category])
        numbers[question.category] += 1
    return [q for _, q in sorted(zip(rounds, questions, strict=True), key=lambda pair: pair[0])]


def load_questions(source: str) -> QuestionSet:
    """Read questions: `builtin`, or a file.

    JSONL, one object per line: Spec-Bench and MT-bench (`question_id`, `category`, `turns`), SPEED-Bench (the same, or
    `messages` in place of `turns`, with `sub_category`), HumanEval (`task_id`, `prompt`), or a `prompt` with optional
    `id` and `category`; a line may also be a bare JSON string. Parquet: the same objects, one per row. Any other file
    is plain text, one prompt per line. Broken lines are reported in `problems` and left out.

    Raises:
        ValueError: there is no such file, or no question in it; or pyarrow, which reads parquet, is not installed.
    """
    if source == BUILT_IN:
        return _parse(source, files("foretell.bench").joinpath("builtin.jsonl").read_text("utf-8"), _json_line)
    path = Path(source).expanduser()
    if not path.is_file():
        raise ValueError(
            f"{source}: no such question file; give a path, or {BUILT_IN!r} for the questions that come with foretell"
        )
    if path.suffix == ".parquet":
        return _collect(source, "row", enumerate(_parquet_rows(path), 1), _question)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: not a UTF-8 text file (byte {error.start}); questions are JSONL or plain text"
        ) from error
    return _parse(source, text, _json_line if path.suffix in (".jsonl", ".json") else _text_line)


def _parse(source: str, text: str, read: Callable[[str, int], Question]) -> QuestionSet:
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return _collect(source, "line", lines, read)


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{path}: pyarrow reads parquet files: pip install pyarrow, or write JSONL") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from error
    return rows


def _collect(
    source: str, unit: str, entries: Iterable[tuple[int, _Entry]], read: Callable[[_Entry, int], Question]
) -> QuestionSet:
    """The questions of numbered lines or rows."""
    questions: dict[str, Question] = {}
    problems = []
    for number, entry in entries:
        try:
            question = read(entry, number)
            if question.id in questions:
                raise ValueError(f"question {question.id!r} appears twice")
            questions[question.id] = question
        except ValueError as error:
            problems.append(f"{source}, {unit} {number}: {error}; the {unit} is left out")
    if not questions:
        detail = f" ({problems[0]})" if problems else ""
        raise ValueError(f"{source}: there is no question in this file{detail}")
    return QuestionSet(source, tuple(questions.values()), tuple(problems))


def _text_line(line: str, number: int) -> Question:
    return Question(str(number), "text", (line.strip(),))


def _json_line(line: str, number: int) -> Question:
    value = parse_json(line)
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError("a JSON object or a string was expected")
    return _question(value, number)


def _question(value: dict[str, Any], number: int) -> Question:
    turns, category = _turns(value)
    if not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("a question needs `turns` (a list of texts) or a `prompt`, and none may be empty")
    if any(turn.startswith(_WITHHELD) for turn in turns):
        raise ValueError("SPEED-Bench's file on the hub has no text here; its prepare_data.py writes a file that has")
    name = next((value[k] for k in ("question_id", "task_id", "id") if k in value), number)
    return Question(str(name), str(value.get("category", category)), tuple(turns), "sub_category" in value)


def _turns(value: dict[str, Any]) -> tuple[list[Any], str]:
    """The user's turns and the category of such a file where none is given."""
    if isinstance(value.get("turns"), list):
        return value["turns"], "questions"
    if isinstance(messages := value.get("messages"), list):
        if not all(isinstance(m, dict) and m.get("role") == "user" for m in messages):
            raise ValueError("`messages` may be those of the user alone, one for each turn")
        return [m.get("content") for m in messages], "questions"
    if "task_id" in value and isinstance(value.get("prompt"), str):
        return ["Complete the following Python function.\n\n" + value["prompt"]], "humaneval"
    return [value["prompt"]] if "prompt" in value else [], "prompts"
