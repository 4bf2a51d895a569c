"""What `foretell train` makes by default can be exported, so that other engines can run it."""

from pathlib import Path

import pytest
import torch
from training_helpers import settings, target, task

from command import tiny_target
from foretell.speculator.export import export
from foretell.speculator.formats import EXPORTS
from foretell.speculator.formats.base import Verifier
from foretell.speculator.network.base import Speculator
from foretell.speculator.network.dflash import DFlash

KINDS = {
    f.kind: f.name
    for f in sorted(EXPORTS, key=lambda f: f.name == "speculators")
    if f.name != "gguf" and f.kind not in ("mtp", "assistant")
}
"""A format for every kind but those that are for some families of targets alone."""

BLOCKS = {"draft_model": {"layers": "1"}, "pard": {"layers": "1"}}
"""The target of these tests has fewer blocks than those keep."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_without_options_is_exported(tmp_path: Path, kind: str) -> None:
    job = task(settings(tmp_path / "out", recipe=kind, options=BLOCKS.get(kind, {})))
    network, model = job.recipe.network, target(str(tiny_target()))
    assert isinstance(network, Speculator) and network.kind == kind and network.token_of is not None
    export(network, Verifier("owner/target", model.config, model.codec), KINDS[kind], tmp_path / "exported")
    if KINDS[kind] == "hf":
        assert (tmp_path / "exported" / "model.safetensors").is_file()
    else:
        assert model.speculator(str(tmp_path / "exported")).kind == kind


@pytest.mark.parametrize("correction", ["selector", "domino", "refiner", "lattice"])
def test_trained_heads_of_dflash_are_exported(tmp_path: Path, correction: str) -> None:
    options = {"correction": correction, "markov_rank": "0", "convolution": str(correction == "selector")}
    job = task(settings(tmp_path / "out", recipe="dflash", options=options, draft_vocab=0))
    network, model = job.recipe.network, target(str(tiny_target()))
    assert isinstance(network, DFlash)
    name = "speculators" if correction == "refiner" else "dflash"
    export(network, Verifier("owner/target", model.config, model.codec), name, tmp_path / "exported")
    again = model.speculator(str(tmp_path / "exported"))
    assert isinstance(again, DFlash) and again.config.correction == network.config.correction
    assert network.correction is not None and again.correction is not None
    for one, other in zip(network.correction.parameters(), again.correction.parameters(), strict=True):
        assert torch.equal(one, other.to(one))
