"""`foretell env`, also where something is broken."""

import json
import sys

import pytest

from command import run_foretell
from foretell.cli import env
from foretell.model.kernels import build, instruction_sets

SECTIONS = {
    "machine", "threads", "instruction sets", "kernels", "GPUs", "GPU attention", "versions", "paths", "environment",
}  # fmt: skip


def test_the_report_names_what_was_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_foretell("env", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and set(report) == SECTIONS
    assert not [name for name, section in report.items() if "error" in section], report
    assert report["kernels"]["chosen"] == "none" and "FORETELL_NATIVE=0" in report["kernels"]["reason"]
    assert report["environment"]["FORETELL_NATIVE"] == "0"
    assert report["GPU attention"]["torch"] == "usable" and report["GPU attention"]["asked for"] == "auto"
    names = {entry.name for entry in instruction_sets.of_machine()}
    assert set(report["instruction sets"]) == {*names, "AMX permission"}
    monkeypatch.delenv("FORETELL_NATIVE", raising=False)
    if build.available():
        kernels = env.SECTIONS["kernels"]()
        assert kernels["chosen"] == build.library().foretell_instructions().decode() and kernels["origin"]


def test_the_report_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(env.SECTIONS, "GPUs", dict)
    lines = run_foretell("env").stdout.splitlines()
    assert {line.split(":")[0] for line in lines if not line.startswith(" ")} == SECTIONS
    assert "GPUs: none" in lines
    assert any(line.startswith("  foretell: ") for line in lines)


def test_the_report_comes_out_where_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_ISA", "nonsense")
    monkeypatch.setitem(sys.modules, "foretell.speculator.installed", None)
    monkeypatch.delenv("FORETELL_NATIVE", raising=False)
    assert "FORETELL_ISA=nonsense" in str(env._guarded(env._kernels)["error"])
    assert "foretell.speculator.installed" in str(env._guarded(env._paths)["error"])
