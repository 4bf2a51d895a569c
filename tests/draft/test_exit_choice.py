"""Which exit drafts, and which tokens: by what was measured of it, and by what it costs."""

from dataclasses import replace

import pytest
import torch

from foretell.catalogue.exit_choice import ExitCosts, best_exit, exit_costs, expected_gain, least_probability
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.model.config.model import ModelConfig
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.exits import DRAFT_PROBABILITY, DraftQuality, Exits, ExitsConfig

SMOLLM2 = ModelConfig(
    "llama", vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536, context=2048
)


def measured_exits(drafting: dict[int, tuple[float, float]], draft_vocab: int | None = 8192) -> Exits:
    """Exits with a measured quality, in the shape of SmolLM2-135M but for the width of what is stored."""
    info = TargetInfo(name="shape", hidden=8, vocab=64, layers=SMOLLM2.layers)
    quality = tuple(DraftQuality(drafts=d, right=r) for d, r in drafting.values())
    config = ExitsConfig(target=info, layers=tuple(drafting), draft_vocab=64, drafting=quality)
    exits = Exits(config, EmbeddingAndHead(torch.zeros(64, 8), torch.zeros(64, 8)))
    exits.config = config.model_copy(update={"draft_vocab": draft_vocab})
    return exits


def test_the_default_exit_pays_for_its_head_and_for_the_layers_of_what_it_drafts() -> None:
    # The exits of docs/early-exit.md, of which those after 24 and 27 layers were measured to be the fastest.
    known = {9: (0.10, 0.80), 15: (0.15, 0.82), 21: (0.35, 0.86), 24: (0.50, 0.90), 27: (0.62, 0.92)}
    assert best_exit(measured_exits(known), SMOLLM2) in (24, 27)
    # Without measured drafts every token is one, with the agreement: what is seldom right costs more than it gives.
    exits = measured_exits(known)
    exits.config = exits.config.model_copy(update={"drafting": ()})
    exits.agreement.copy_(torch.tensor([0.05, 0.1, 0.3, 0.5, 0.9]))
    assert best_exit(exits, SMOLLM2) == 27
    exits.agreement.copy_(torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9]))
    assert best_exit(exits, SMOLLM2) == 9


def test_cheap_exits_draft_less_likely_tokens() -> None:
    exits = measured_exits({3: (0.3, 0.9), 27: (0.6, 0.9)})
    shallow, deep = (least_probability(exits, SMOLLM2, layer) for layer in (3, 27))
    assert 0.3 <= shallow < 0.4 < deep == DRAFT_PROBABILITY
    plain = exit_costs(SMOLLM2, exits)
    exits.config = exits.config.model_copy(update={"blocks": replace(SMOLLM2, layers=2)})
    assert exit_costs(SMOLLM2, exits).exit == pytest.approx(plain.exit + 2 * plain.layer), "its blocks count"


def test_the_expected_gain_counts_tests_and_drafted_tokens() -> None:
    costs, quality = ExitCosts(layer=10e6, head=100e6, exit=20e6), DraftQuality(drafts=0.5, right=0.8)
    # A chain of two: tests after the root, and after half of the first tokens; half a token, and a quarter of one.
    step = 10 * 10e6 + 100e6 + 15e6 + 1.5 * 20e6 + 0.75 * 4 * 10e6
    assert expected_gain(quality, 4, 10, costs, 2) == pytest.approx((1 + 0.4 + 0.16) * 200e6 / step)
    never = DraftQuality(drafts=0.0, right=0.0)
    assert expected_gain(never, 4, 10, costs, 2) == pytest.approx(200e6 / (200e6 + 15e6 + 20e6)), "the test costs"
    shallow = DraftQuality(drafts=0.3, right=0.9)
    for head, pays in ((1e6, True), (400e6, False)):
        gain = max(expected_gain(shallow, 2, 10, ExitCosts(10e6, 100e6, head), n) for n in range(1, 9))
        assert (gain > 1) == pays, "a head that costs more than the model leaves no gain"
