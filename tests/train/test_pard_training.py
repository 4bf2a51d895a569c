"""Training PARD: the loss falls, drafts of one pass are accepted, and it may start from a draft model."""

from pathlib import Path

from training_helpers import losses, settings, trained

OPTIONS = {"layers": "1", "depth": "4", "hard": "1"}


def test_it_starts_from_a_draft_model_and_more_than_one_token_is_accepted(tmp_path: Path) -> None:
    draft = settings(tmp_path / "draft", recipe="draft_model", options={"layers": "1"}, steps=30, measure_every=0)
    trained(draft)
    wanted = settings(
        tmp_path / "pard", recipe="pard", options=OPTIONS, steps=70, lr=1e-2, measure_every=0, draft_vocab=None,
        init_from=str(tmp_path / "draft"),
    )  # fmt: skip
    done = trained(wanted)
    found = losses(done)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    assert done.best > 1.15
    assert done.job.recipe.network.token_of is not None
