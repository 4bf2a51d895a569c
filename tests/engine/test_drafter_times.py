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
from foretell.engine.acceptance import RUNGS
from foretell.engine.budget import Budget
from foretell.engine.draft_account import DraftAccount
from foretell.engine.draft_source import DraftSource
from foretell.engine.engine import Engine
from foretell.engine.pass_times import PassTimes, load_key
from foretell.engine.request import Request
from foretell.engine.step_costs import DraftedStep, StepCosts, StepLoad
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
    known["drafts"][name] = {"0": {"0": MINUTES}}
    file.write_text(json.dumps(known), "utf-8")
    # The dear one drafts in a trial alone.
    assert drafted(model, cheap, passes(file)) > 2 * drafted(model, dear, passes(file))


def test_a_file_whose_names_say_no_draft_model_is_read(model: Model, tmp_path: Path) -> None:
    draft, file = str(tiny_target()), tmp_path / "times"
    known = kept(model, draft, file)
    known["drafts"] |= {"dynamic_tree 0": {"0": {"0": MINUTES}}, "ngram 0": {"0": {"0": MINUTES}}}
    file.write_text(json.dumps(known), "utf-8")
    times, without = passes(file), passes(tmp_path / "none")
    assert drafted(model, draft, times) == drafted(model, draft, without) > 0
    assert times.draft_seconds("ngram 0", 1, 0.0) == 60


def test_what_was_accepted_is_known_at_the_next_start(tmp_path: Path) -> None:
    """A drafter whose confident drafts were wrong is not asked for many again; its own probabilities are the prior."""
    file, name = tmp_path / "times", "eagle3 0"
    first = passes(file)
    acceptance, rungs = first.source(name).acceptance(True), list(range(RUNGS))
    prior = acceptance.chance[0]
    for _ in range(200):
        acceptance.count_offer(rungs, 8)
        acceptance.count(rungs, [], 8)
    first.source(name).count(3)
    first.save()
    again = passes(file).source(name)
    assert again.acceptance(True).chance[0] < 0.2 < 0.9 < prior == again.acceptance(False).chance[0]
    assert again.acceptance(True).promised < 0.5 < 1 == again.acceptance(False).promised
    assert (again.steps, again.levels) == (1, 3.0)
    # It weighs less than it did: another text may soon show something else.
    for _ in range(200):
        again.acceptance(True).count(rungs, rungs, 8)
    assert again.acceptance(True).chance[0] > 0.7


@pytest.mark.parametrize("damage", [{"steps": "many"}, {"levels": float("nan")}, {"acceptance": [[True, True, {}]]}])
def test_damaged_counts_are_ignored(damage: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "times"
    times = passes(file)
    times.source("eagle3 0").count(3)
    times.save()
    known = json.loads(file.read_text("utf-8"))
    known["sources"]["eagle3 0"] |= damage
    file.write_text(json.dumps(known), "utf-8")
    assert passes(file).source("eagle3 0").steps == 0


def test_deeper_trees_take_longer() -> None:
    """The time of the usual tree is that of its levels, not that of the trees that are drafted fastest."""
    times = PassTimes()
    for i in range(60):
        levels = i % 4
        times.observe_draft("eagle3 0", 1, 1e-3 + 2e-4 * levels, 1e-3, levels)
    assert times.draft_seconds("eagle3 0", 1, 1.0, 1.5) == pytest.approx(1.3e-3, rel=0.01)
    assert times.level_seconds("eagle3 0", 1, 1.0) == pytest.approx(2e-4, rel=0.01)
    assert times.level_seconds("eagle3 0", 4, 1.0) > 2e-4
    assert times.level_seconds("medusa 0", 1, 7.0) == 7.0


def test_drafting_for_a_few_of_many_requests_is_not_taken_for_drafting_for_all() -> None:
    """Trials ask a drafter for two requests: of what it takes for sixteen, that is a part."""
    load = StepLoad(16, True, [1.0] * 16, [8] * 16, [8] * 16, [False] * 16, [DraftAccount() for _ in range(16)])
    times, source = PassTimes(), DraftSource("eagle3 0")
    times.observe_pass(load_key(16, 0), 16, 16, 0.03)
    for _ in range(20):
        StepCosts(times, load).learn_drafting([DraftedStep(source, 2, 0, 1)], 1e-3)
    costs = StepCosts(times, load)
    assert costs.drafting(source, 2) == pytest.approx(1e-3, rel=0.01)
    assert costs.drafting(source, 16) > 2e-3
    for _ in range(20):
        costs.learn_drafting([DraftedStep(source, 16, 0, 1)], 6e-3)
    assert costs.drafting(source, 16) == pytest.approx(6e-3, rel=0.01)
    assert costs.drafting(source, 2) == pytest.approx(1e-3, rel=0.01)


def test_a_step_that_does_not_follow_its_like_says_at_most() -> None:
    """Else single looks would never correct a time that is too long."""
    times, source = PassTimes({1: 0.004, 128: 0.005}), DraftSource("eagle3 0")
    costs = StepCosts(times, StepLoad(1, True, [1.0], [9], [600], [False], [DraftAccount()]))
    for _ in range(8):
        costs.learn_drafting([DraftedStep(source, 1, 0, 1)], 0.02)
    costs.learn_drafting([DraftedStep(source, 1, 0, 1)], 0.03, follows=False)
    assert costs.drafting(source, 1) == pytest.approx(0.02)
    for _ in range(5):
        costs.learn_drafting([DraftedStep(source, 1, 0, 1)], 0.001, follows=False)
    assert costs.drafting(source, 1) == pytest.approx(0.001)


def test_a_single_disturbed_reading_is_not_believed() -> None:
    times, source = PassTimes({1: 0.004, 128: 0.005}), DraftSource("eagle3 0")
    costs = StepCosts(times, StepLoad(1, True, [1.0], [9], [600], [False], [DraftAccount()]))
    costs.unread = {0: 50}
    before = costs.reading(source, [0])[0]
    costs.learn_drafting([DraftedStep(source, 1, 50, 3)], 1.0)
    assert costs.reading(source, [0])[0] == before
    for _ in range(6):
        costs.learn_drafting([DraftedStep(source, 1, 50, 3)], 0.1)
    assert costs.reading(source, [0])[0] > 5 * before


def test_a_step_that_came_late_says_nothing_about_drafting(model: Model) -> None:
    """Between two steps of an engine another program ran, or nothing did."""
    times, clock = PassTimes({1: 1.0, 128: 1.01}), Clock()
    method = model.method("dynamic_tree", drafts=[foretell.load(str(tiny_target()), dtype="float32")])
    engine = Engine(model.runner(), method, 1, clock=clock, budget=Budget(times))
    engine.submit(Request(random_tokens(6), SamplingParams(), 60))
    while engine.busy:
        engine.step()
        clock.now += 60.0
    # Nothing was learned: it takes what was expected.
    assert times.draft_seconds(f"dynamic_tree {method.drafter_key} 0", 1, 0.5) == 0.5


def test_only_what_a_method_drafts_with_is_in_its_key(model: Model) -> None:
    first, again, whole = (
        foretell.load(str(path()), dtype="float32") for path in (tiny_draft, tiny_draft, tiny_target)
    )
    rounded = foretell.load(str(tiny_draft()), dtype="bfloat16")

    def key(name: str, *used: Model, **options: object) -> str:
        return model.method(name, options, drafts=used, shared=True).drafter_key

    assert key("ngram", first) == "" != key("draft_model", first) == key("draft_model", again)
    assert len({key("draft_model", used) for used in (first, whole, rounded)} | {key("specinfer", first, whole)}) == 4
    assert len({key("ngram", num_speculative_tokens=n) for n in (2, 3)} | {""}) == 3


def test_a_speculator_that_was_written_anew_is_another_one(tmp_path: Path) -> None:
    """A retrained speculator has the same sizes and the same place."""
    model, folder = Model("tiny", target().config, letter_codec(VOCAB), target(), "float64", ()), tmp_path / "medusa"
    shutil.copytree(speculator("medusa"), folder)
    keys = [model.method("medusa", drafts=[folder]).drafter_key for _ in range(2)]
    os.utime(folder / "model.safetensors", (1, 1))
    keys.append(model.method("medusa", drafts=[folder]).drafter_key)
    assert keys[0] == keys[1] != keys[2] and all(keys)
