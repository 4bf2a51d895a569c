"""What the tests of the bench share: a tiny random Llama in a directory, loaded, and records written by hand."""

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

import tempfile

from typer.testing import CliRunner, Result

from command import ENVIRONMENT, save_tiny_model
from foretell.api import Model
from foretell.bench.schema import Record, Turn
from foretell.bench.tasks import Question
from foretell.cli.bench import app
from foretell.load import load

QUESTIONS = (
    Question("talk", "conversation", ("abcabcab", "again abcabc")),
    Question("sum", "math_reasoning", ("1 2 3 1 2 3 1 2",)),
)


@cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def target() -> Path:
    """A target that reads long prompts."""
    return save_tiny_model(Path(_home().name, "target"), context=4096)


@cache
def draft() -> Path:
    """A draft model with the target's tokenizer."""
    return save_tiny_model(Path(_home().name, "draft"), seed=3, layers=1, context=4096)


@cache
def model(dtype: str = "float32") -> Model:
    """The target, loaded."""
    return load(str(target()), dtype)


def bench(*arguments: object) -> Result:
    """Run a command of `foretell bench` in this process."""
    return CliRunner(env=ENVIRONMENT).invoke(app, [str(a) for a in arguments])


def refused(*arguments: object) -> str:
    """Run a command that must end in one sentence; the sentence."""
    result = bench(*arguments)
    assert result.exit_code == 1, (result.exit_code, result.output, result.exception)
    lines = [x for x in result.stderr.splitlines() if x.startswith("foretell: ")]
    assert len(lines) == 1 and "Traceback" not in result.output, result.output
    return lines[0]


def turn(tokens: int, passes: int, at: tuple[float, ...], count: tuple[int, ...]) -> Turn:
    """An answer with these arrivals."""
    assert sum(count) == tokens
    return Turn(
        prompt_tokens=3, tokens=tuple(range(tokens)), at=at, count=count, retokenized=tokens, passes=passes,
        tested=(passes - 1, 2), accepted=(2, 1), drafted=4, draft_seconds=0.1, verify_seconds=0.6, step_seconds=1.0,
    )  # fmt: skip


def record(question: str, contender: str, turns: tuple[Turn, ...], category: str = "qa", repeat: int = 0) -> Record:
    """One contender's answer."""
    return Record(question=question, category=category, group=category, contender=contender, repeat=repeat, turns=turns)
