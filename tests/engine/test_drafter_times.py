"""Times of drafters: kept for each draft model and speculator, and told apart from those of others."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import foretell
from command import save_tiny_model, tiny_draft, tiny_target
from foretell.api import Model
from foretell.core.sampling import SamplingParams
from foretell.engine.budget import Budget
from foretell.engine.engine import Engine
from foretell.engine.pass_times import PassTimes
from foretell.engine.request import Request
from foretell.testing import letter_codec
from helpers import VOCAB, random_tokens, speculator, target

MINUTES = [60.0] * 8
"""Times of a drafter that never pays."""


class Clock:
    """Advances by a millisecond at every call."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(scope="module")
def model() -> Model:
    return foretell.load(str(tiny_target()), dtype="float32")


def drafted(model: Model, draft: str, times: PassTimes) -> int:
    """Drafts of an answer that are verified, of a method that drafts with a model."""
    method = model.method("dynamic_tree", drafts=[foretell.load(draft, dtype="float32")])
    engine = Engine(model.runner(), method, 1, clock=Clock(), budget=Budget(times))
    return engine.complete([Request(random_tokens(6), SamplingParams(), 60)])[0].statistics.drafted


def passes(file: Path) -> PassTimes:
    """Drafts cost nothing beside their drafting; of that, what the file says."""
    return PassTimes({1: 1.0, 128: 1.01}, file=file)


def kept(model: Model, draft: str, file: Path) -> Any:
    """What an answer with a draft model leaves in a file of times."""
    times = passes(file)
    drafted(model, draft, times)
    times.save()
    return json.loads(file.read_text("utf-8"))


def test_another_draft_model_does_not_begin_with_the_times_of_the_one_before(model: Model, tmp_path: Path) -> None:
    dear, cheap, file = str(tiny_target()), str(save_tiny_model(tmp_path / "cheap", context=256)), tmp_path / "times"
    known = kept(model, dear, file)
    (name,) = (name for name in known["drafts"] if name.startswith("dynamic_tree"))
    known["drafts"][name] = {"0": MINUTES}
    file.write_text(json.dumps(known), "utf-8")
    # The dear one drafts in a trial alone.
    assert drafted(model, cheap, passes(file)) > 2 * drafted(model, dear, passes(file))


def test_a_file_whose_names_say_no_draft_model_is_read(model: Model, tmp_path: Path) -> None:
    draft, file = str(tiny_target()), tmp_path / "times"
    known = kept(model, draft, file)
    known["drafts"] |= {"dynamic_tree 0": {"0": MINUTES}, "ngram 0": {"0": MINUTES}}
    file.write_text(json.dumps(known), "utf-8")
    times, without = passes(file), passes(tmp_path / "none")
    assert drafted(model, draft, times) == drafted(model, draft, without) > 0
    assert times.draft_seconds("ngram 0", (0, 0), 1, 0.0) == 60


def test_only_what_a_method_drafts_with_is_in_its_key(model: Model) -> None:
    first, again, whole = (
        foretell.load(str(path()), dtype="float32") for path in (tiny_draft, tiny_draft, tiny_target)
    )
    rounded = foretell.load(str(tiny_draft()), dtype="bfloat16")

    def key(name: str, *used: Model) -> str:
        return model.method(name, drafts=used, shared=True).drafter_key

    assert key("ngram", first) == "" != key("draft_model", first) == key("draft_model", again)
    assert len({key("draft_model", *used) for used in ([first], [whole], [rounded], [first, whole])}) == 4


def test_a_speculator_that_was_written_anew_is_another_one(tmp_path: Path) -> None:
    """A retrained speculator has the same sizes and the same place."""
    model, folder = Model("tiny", target().config, letter_codec(VOCAB), target(), "float64", ()), tmp_path / "medusa"
    shutil.copytree(speculator("medusa"), folder)
    keys = [model.method("medusa", drafts=[folder]).drafter_key for _ in range(2)]
    os.utime(folder / "model.safetensors", (1, 1))
    keys.append(model.method("medusa", drafts=[folder]).drafter_key)
    assert keys[0] == keys[1] != keys[2] and all(keys)
