"""A folder to which a run appends records, so that an interruption loses no finished record."""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from foretell.utils.paths import replace_file
from foretell.utils.validation import read_json, validate, validate_json

SETTINGS_FILE, RECORDS_FILE, LOCK_FILE = "settings.json", "records.jsonl", ".lock"
_DAMAGED = "remove the folder or choose another one"
R = TypeVar("R", bound=BaseModel)


class RunStore(Generic[R]):
    """Settings and an append-only file of records in a folder, locked by one process at a time.

    A folder that has records already is continued; an incomplete last line, left by an interruption, is removed.

    Raises:
        ValueError: it is a file, another process is writing there, the folder belongs to a run with other settings, or
            a record is damaged.
    """

    def __init__(self, folder: Path, settings: BaseModel, kind: type[R]) -> None:
        self.folder, self._kind = folder, kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ValueError(f"{folder}: a file is where a run keeps its records; choose another --out") from error
        self._lock = (folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                f"{folder}: another run is writing into this folder; wait for it, or choose another one with --out"
            ) from error
        try:
            self._check_settings(settings)
            self.records = list(read_records(folder, kind, repair=True))
            self._file = (folder / RECORDS_FILE).open("a", encoding="utf-8")
        except BaseException:
            self._lock.close()
            raise

    def _check_settings(self, settings: BaseModel) -> None:
        """Write the settings, or check that they are those of the folder."""
        path, wanted = self.folder / SETTINGS_FILE, settings.model_dump(mode="json")
        if not path.is_file():
            replace_file(path, json.dumps(wanted, indent=1))
            return
        saved = read_json(path, _DAMAGED)
        for key in {**wanted, **saved}:
            if saved.get(key) != wanted.get(key):
                raise ValueError(
                    f"{self.folder}: this folder holds a run with another {key} ({saved.get(key)!r}, now "
                    f"{wanted.get(key)!r}); "
                    "choose another folder with --out, or repeat the settings to go on with it"
                )

    def append(self, record: R) -> None:
        """Append a record; it is handed to the operating system as one line before this returns."""
        self._file.write(record.model_dump_json() + "\n")
        self._file.flush()
        self.records.append(record)

    def clear(self) -> None:
        """Remove all records, after the caller has moved them elsewhere."""
        self._file.truncate(0)
        self.records = []

    def close(self) -> None:
        """Close the file, and release the lock even if what it still held cannot be written."""
        try:
            self._file.close()
        finally:
            self._lock.close()

    def __enter__(self) -> "RunStore[R]":
        """The store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def read_settings(folder: Path, kind: type[R]) -> R:
    """The settings of the run in a folder.

    Raises:
        ValueError: the folder holds no run of this kind.
    """
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no {SETTINGS_FILE} here, so this folder holds no run")
    return validate(kind, read_json(path, _DAMAGED), f"{path}: not the settings of such a run")


def read_records(folder: Path, kind: type[R], repair: bool = False) -> Iterator[R]:
    """The records of a folder in the order of writing.

    An incomplete last line is left out, and with `repair` removed from the file.

    Raises:
        ValueError: a complete line is no such record.
    """
    path = folder / RECORDS_FILE
    if not path.is_file():
        return
    raw = path.read_bytes()
    complete = raw[: raw.rfind(b"\n") + 1]
    if repair and len(complete) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    for number, line in enumerate(complete.splitlines(), 1):
        yield validate_json(
            kind, line, f"{path}, line {number}: a damaged record", "delete that line to measure it again"
        )


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
