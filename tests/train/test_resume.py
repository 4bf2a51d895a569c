"""Resuming is exact for all recipes: a resumed training ends with the weights of an uninterrupted one."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from training_helpers import check_resume, settings, trained, trainer

from foretell.train.loop.settings import TrainingSettings
from foretell.train.recipe import RECIPES
from helpers import unchecked

STEPS, STOP = 12, 5
CASES: Mapping[str, tuple[str, dict[str, str]]] = {
    "mlp_speculator": ("mlp_speculator", {"inner": "16"}),
    "eagle": ("eagle", {"positions": "20"}),
    "eagle3": ("eagle3", {"positions": "20", "steps": "2"}),
    "medusa": ("medusa", {"heads": "2", "positions": "32"}),
    "medusa, target tuned too": ("medusa", {"heads": "2", "tune": "self", "rank": "2", "joint_from": "0.25"}),
    "blockwise": ("blockwise", {"heads": "2", "inner": "16", "draw": "one"}),
    "dflash": ("dflash", {"anchors": "6", "markov_rank": "4", "confidence": "true", "block_size": "4"}),
    "draft_model": ("draft_model", {"layers": "1"}),
    "draft_model, written by the draft": (
        "draft_model",
        {"layers": "1", "writer": "draft", "refresh": "4", "written": "6"},
    ),
    "draft_model, written by the target": ("draft_model", {"layers": "1", "writer": "target", "written": "6"}),
    "masked_diffusion": ("masked_diffusion", {"mask_token": "5"}),
    "pass": ("pass", {"ahead": "2", "cuts": "4"}),
    "mtp": ("mtp", {"layers": "2"}),
    "p_eagle": ("p_eagle", {"anchors": "6", "depth": "3"}),
    "pard": ("pard", {"layers": "1", "anchors": "6", "mask_token": "5"}),
    "pard, with states": ("pard", {"layers": "1", "anchors": "6", "mask_token": "5", "states": "1"}),
    "redrafter": ("redrafter", {"inner": "16"}),
    "uno": ("uno", {"rank": "2", "depth": "3", "anchors": "6"}),
}


def test_every_recipe_is_tried() -> None:
    assert {recipe for recipe, _ in CASES.values()} == set(RECIPES) - {"apar", "assistant"}, "in files of their own"


REPRESENTATIVES = "eagle3", "medusa, target tuned too", "dflash", "draft_model, written by the draft", "redrafter"
"""Each keeps other things between steps than what all keep; the others are among the exhaustive tests."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in REPRESENTATIVES else pytest.mark.exhaustive) for c in CASES]
)
def test_a_resumed_training_ends_with_the_same_weights(case: str, tmp_path: Path) -> None:
    recipe, options = CASES[case]

    def wanted(name: str) -> TrainingSettings:
        return settings(
            tmp_path / name, recipe=recipe, options=options, steps=STEPS, batch_tokens=128, measure_every=0,
            measure_prompts=2, measure_tokens=6, features="stream",
        )  # fmt: skip

    check_resume(tmp_path, wanted, STOP)


@pytest.mark.parametrize("lost", ["weight/", "buffer/tree", "optimizer/exp_avg/", "recipe/counts"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_in_a_sentence(lost: str, tmp_path: Path) -> None:
    wanted = settings(tmp_path, recipe="medusa", options={"heads": "2"}, steps=2, measure_every=0)
    done = trainer(wanted)
    with unchecked(), pytest.raises(KeyboardInterrupt):
        done.run(lambda: True)
    file = next(tmp_path.glob("checkpoint/step-*/tensors-0.safetensors"))
    kept = load_file(file)
    gone = next(name for name in kept if name.startswith(lost))
    save_file({name: tensor for name, tensor in kept.items() if name != gone}, file)
    with pytest.raises(ValueError, match=r"step-000000001: damaged, or written by another version \(.* delete it"):
        trained(wanted)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("curve", [], "the curve does not have 1 steps"),
        ("best", "high", "best: input should be a valid number"),
        ("step", 10**9, "the curve does not have"),
    ],
)
def test_a_damaged_state_is_refused_in_a_sentence(key: str, value: object, words: str, tmp_path: Path) -> None:
    wanted = settings(tmp_path, steps=2, measure_every=0)
    done = trainer(wanted)
    with unchecked(), pytest.raises(KeyboardInterrupt):
        done.run(lambda: True)
    file = next(tmp_path.glob("checkpoint/step-*/state.json"))
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"state.json: {words}.*; delete"):
        trained(wanted)
