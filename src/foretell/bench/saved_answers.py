"""Answers of one server in a file, so that another one, or the same after a restart, can be compared with them."""

import json
from collections.abc import Sequence
from pathlib import Path

from foretell.bench.identity import IdentityRequest
from foretell.utils.validation import parse_json


def save_answers(path: Path, requests: Sequence[IdentityRequest], answers: Sequence[str], max_tokens: int) -> None:
    """Write one JSON object per line: prompt, seed (null: greedy), longest answer in tokens, text.

    Raises:
        ValueError: the file cannot be written.
    """
    lines = (
        json.dumps(_key(request, max_tokens) | {"text": text}, ensure_ascii=False)
        for request, text in zip(requests, answers, strict=True)
    )
    try:
        path.write_text("".join(line + "\n" for line in lines), "utf-8")
    except OSError as error:
        raise ValueError(f"{path}: the answers cannot be written: {error.strerror}") from error


def read_answers(path: Path, requests: Sequence[IdentityRequest], max_tokens: int) -> list[str]:
    """The saved texts of these requests.

    Raises:
        ValueError: the file cannot be read, is damaged, or lacks a request.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no answers can be read: {getattr(error, 'strerror', None) or error}") from error
    texts = dict[str, str]()
    for number, line in enumerate(lines, 1):
        entry = parse_json(line, f"{path}, line {number}")
        text = entry.pop("text", None) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: an object with a text was expected, found {line!r:.80}")
        texts[json.dumps(entry, sort_keys=True)] = text
    keys = [json.dumps(_key(request, max_tokens), sort_keys=True) for request in requests]
    if missing := sum(key not in texts for key in keys):
        raise ValueError(
            f"{path} lacks {missing} of the {len(keys)} requests: give the --tasks, --requests and --max-new-tokens "
            "with which it was saved"
        )
    return [texts[key] for key in keys]


def _key(request: IdentityRequest, max_tokens: int) -> dict[str, object]:
    return {"prompt": request.prompt, "seed": request.seed, "max_tokens": max_tokens}
