"""`foretell demo`: what it says of drafters and of the machine."""

import os

import pytest

from command import tiny_draft, tiny_target
from foretell.bench import machine
from foretell.catalogue import speculators
from foretell.cli.demo import METHOD, demo_prompts, measured_on, missing_speculator
from foretell.load import load
from foretell.model.kernels import build
from foretell.speculator import installed
from foretell.speculator.installed import InstalledSpeculator, InstalledSpeculators


def test_a_missing_speculator_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(str(tiny_target()), "float32")
    message = missing_speculator(model)
    assert (
        "no trained speculator is installed for" in message and "beside it the target's first blocks, which" in message
    )
    assert "train one with `foretell train eagle3`" in message and "\n" not in message
    found = InstalledSpeculator("tiny", "eagle3", model.checkpoint.fingerprint(), tiny_target())
    monkeypatch.setattr(installed, "find_all_installed", lambda: InstalledSpeculators((found,), ()))
    assert missing_speculator(model) == ""


def test_an_answer_of_the_method_names_its_drafter() -> None:
    model, draft = load(str(tiny_target()), "float32"), load(str(tiny_draft()), "float32")
    assert speculators.find_draft_models(model._build_context()) == ()
    for drafts, label in (((), "the target's first blocks"), ((draft,), "a draft model")):
        method = model.method(METHOD, drafts=drafts)
        assert model.generate("hello", method, max_new_tokens=2)[0].drafter == f"retrieval, and beside it {label}"


def test_the_picture_names_the_processor_and_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_processor", lambda: "Some CPU")
    kernels = build.library().foretell_instructions().decode() if build.available() else "no kernels"
    assert measured_on() == f"{os.cpu_count()} cores, Some CPU, {kernels}"
    monkeypatch.setenv("FORETELL_NATIVE", "0")
    assert measured_on().endswith("Some CPU, no kernels")


def test_the_prompts_are_complete() -> None:
    assert "Skerry Point" in {p.title: p.text for p in demo_prompts()}["summary"]
