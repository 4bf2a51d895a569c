"""The draft models of a method: those that were named, trained or not, else the installed one."""

from pathlib import Path

import pytest
import torch

from foretell.catalogue import BuildContext, build, speculators
from foretell.catalogue.speculators import (
    find_draft_models,
    require_draft_model,
    require_draft_models,
    trained_speculator,
)
from foretell.draft import DrafterUnion, DraftModel, HeadsDrafter, HybridDrafter, OnlineDrafter
from foretell.engine.request import Request
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.transforms import DecoderTransform
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.vocabulary import ReducedVocabulary
from foretell.testing import TINY, RandomWeights
from helpers import VOCAB, generate, naive, random_tokens, sibling, speculator, target


def build_context(*kinds: str, drafts: tuple[DecoderRunner, ...] = ()) -> BuildContext:
    return BuildContext(VOCAB, target(), drafts, speculators=tuple(speculator(k) for k in kinds))


def test_a_trained_draft_model_has_a_reduced_vocabulary() -> None:
    (runner,) = require_draft_models(build_context("draft_model"))
    assert isinstance(runner, DecoderRunner) and isinstance(runner.network, ReducedVocabulary) and runner.vocab == VOCAB
    assert isinstance(require_draft_model(build_context("draft_model")), DraftModel)


def test_trees_of_checkpoints_and_several_trained_drafts_are_merged_and_stay_lossless() -> None:
    both = build_context("draft_model", "draft_model", drafts=(DecoderRunner(sibling()),))
    method = build("specinfer", both)
    assert isinstance(method.draft, DrafterUnion) and len(method.draft.drafters) == 3
    requests = [Request(random_tokens(5 + i, seed=i), max_new_tokens=9) for i in range(3)]
    assert generate(method, requests) == [naive(target(), r) for r in requests]


@pytest.mark.parametrize("name", ["draft_model", "dynamic_tree", "bild_lossy", "hybrid_model"])
def test_methods_with_one_draft_model_refuse_several(name: str) -> None:
    with pytest.raises(ValueError, match=r"one draft model, and 2 were named: name one, or use specinfer"):
        build(name, build_context("draft_model", drafts=(DecoderRunner(sibling()),)))


def test_a_speculator_of_another_kind_and_one_too_many_are_refused() -> None:
    with pytest.raises(ValueError, match="drafts with draft models, and a speculator of another kind was named"):
        build("draft_model", build_context("medusa"))
    with pytest.raises(ValueError, match=r"several trained speculators were named .* drafts with one; name one"):
        build("online", build_context("draft_model", "draft_model"))
    with pytest.raises(
        ValueError, match=r"train one with `foretell train draft_model`, or name one with --draft-model DIR; layer_skip"
    ):
        build("draft_model", build_context())


def test_what_one_method_learns_changes_no_other_one_of_the_same_draft_model() -> None:
    context = build_context("draft_model")
    one, other = (build("online", context).draft for _ in range(2))
    assert isinstance(one, OnlineDrafter) and isinstance(other, OnlineDrafter)
    known = trained_speculator(context, "draft_model")
    for parameter in one.network.parameters():
        parameter.data += 1
    for network in (other.network, known):
        pairs = zip(network.parameters(), one.network.parameters(), strict=True)
        assert not any(torch.equal(a.float(), b.float()) for a, b in pairs)


def test_blockwise_lossy_drafts_with_heads_or_draft_models() -> None:
    assert isinstance(build("blockwise_lossy", build_context("blockwise")).draft, HeadsDrafter)
    assert isinstance(build("blockwise_lossy", build_context("draft_model")).draft, DraftModel)


class RandomCheckpoint(Checkpoint):
    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        return change(self.decoder(torch.float32))


def test_the_installed_draft_is_taken_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomCheckpoint(target().config, RandomWeights(), torch.device("cpu"))
    asked = BuildContext(VOCAB, target(), checkpoint=source)
    assert find_draft_models(asked) == () and target().config.hidden == TINY.hidden

    def installed(kind: str, fingerprint: str) -> Path | None:
        return speculator(kind) if fingerprint == source.fingerprint() else None

    monkeypatch.setattr(speculators, "find_installed", installed)
    assert len(find_draft_models(asked)) == 1
    hybrid = build("hybrid_model", asked).draft
    assert isinstance(hybrid, HybridDrafter)
    named = BuildContext(VOCAB, target(), (DecoderRunner(sibling()),), checkpoint=source)
    assert find_draft_models(named) == named.drafts
