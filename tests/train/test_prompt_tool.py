"""tools/prompts.py: prompts of all kinds, distinct, and equal for equal seeds."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from foretell.cli.prompts import parse_line
from foretell.load import load
from foretell.model.load.reference import DEFAULT_MODEL
from foretell.retrieval.datastore import tokenizer_fingerprint
from foretell.train.data.dataset import DatasetManifest, DatasetWriter, DocumentRecord

TOOL = Path(__file__).parents[2] / "tools" / "prompts.py"
FILES = (
    "03", "04", "05", "06", "07", "08", "09", "10", "11", "13",
    "14", "15", "17", "18", "19", "20", "21", "22", "26", "27",
)  # fmt: skip
"""Of WordNet's lexicographers, all that the tool draws from."""


def wordnet(path: Path) -> Path:
    lines = ["  1 a licence comes first  "]
    for number in FILES:
        lines.append(f"00001740 {number} n 01 thing_{number} 0 001 @ 00001930 n 0000 | what it is")
        lines.append(f"00001741 {number} n 02 N{number} 0 Name_{number} 0 001 @i 00001930 n 0000 | who it is")
    path.write_text("\n".join(lines))
    return path


def talks(folder: Path) -> Path:
    model = load(DEFAULT_MODEL)
    known = DatasetManifest(
        model=model.name,
        fingerprint="",
        tokenizer=tokenizer_fingerprint(model.codec),
        vocab=model.config.vocab,
        kind="self",
    )
    prompt = model.codec.chat([{"role": "user", "content": "Why is the sky blue?"}])
    answer = [*model.codec.encode("It scatters light.", add_special_tokens=False), model.eos[0]]
    with DatasetWriter(folder, known) as collection:
        collection.add(DocumentRecord(number=0, tokens=[*prompt, *answer], start=len(prompt)))
    return folder


def asked(folder: Path) -> list[str]:
    """A call of the tool that writes `out.jsonl`."""
    for name, text in (
        ("english", "A passage about the town of Springfield, where little happens. " * 9),
        ("german", "Der Hund schläft den ganzen Tag im Garten."),
    ):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(text)
    command: list[str | Path] = [TOOL, folder / "out.jsonl", "--count", "300", "--seed", "3"]
    command += ["--wordnet", wordnet(folder / "data.noun"), "--talks", talks(folder / "talks")]
    command += ["--passages", folder / "english", "--german", folder / "german"]
    return [str(part) for part in command]


def written(command: list[str], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What the tool writes in this process."""
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOL), run_name="__main__")
    return Path(command[1]).read_bytes()


@pytest.mark.exhaustive
def test_processes_that_order_sets_differently_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = asked(tmp_path)
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    assert (tmp_path / "out.jsonl").read_bytes() == written(command, monkeypatch)


def test_prompts_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(asked(tmp_path), monkeypatch).splitlines()
    assert len(set(lines)) == len(lines) == 300
    turns = [parse_line(line).messages or [] for line in lines]
    texts = [t[-1].content for t in turns]
    talked = [t for t in turns if len(t) == 3]
    assert talked and {(t[0].content, t[1].content) for t in talked} == {("Why is the sky blue?", "It scatters light.")}
    for sign in (
        "Name 18",
        "thing 06",
        "Springfield",
        "Der Hund",
        "Write a Python function",
        "How many",
        "You are a thing 18",
    ):
        assert any(sign in text for text in texts), sign
    assert not any(re.search(r"\{\w+\}", text) for text in texts)
