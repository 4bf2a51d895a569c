"""PARD: drafting is the forward pass of training in every step, and masks see what they should."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from foretell.accept import Match
from foretell.core.sampling import SamplingParams
from foretell.draft import PardDrafter
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.block.embedding_and_head import EmbeddingAndHead
from foretell.shape import Chain, DynamicTree
from foretell.speculator.network.base import TargetInfo
from foretell.speculator.network.pard import PardConfig, PardNetwork
from foretell.testing import TINY
from helpers import VOCAB, generate, random_tokens, target, unchecked

CARD = TargetInfo(name="tiny", hidden=TINY.hidden, vocab=VOCAB, layers=2)


def network_of(subset: int | None = 20, window: int = 0) -> PardNetwork:
    model = replace(TINY, vocab=VOCAB, window=window, window_layers=(1,) if window else ())
    values = {"target": CARD, "draft_vocab": subset, "model": model, "depth": 4, "mask_token": 28}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = PardNetwork(
            PardConfig.model_validate(values),
            EmbeddingAndHead(target().embedding.detach(), target().head.weight.detach()),
        )
        network.init_random()
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    if subset is not None:
        network.set_draft_vocab(torch.arange(VOCAB)[1 : 1 + subset])
    return network.double().requires_grad_(False)


def predictions(network: PardNetwork, text: Sequence[int], anchors: Sequence[int]) -> torch.Tensor:
    """Logits of all depths of rollouts after the positions `anchors` in the forward pass of training, [a p w]."""
    first = torch.zeros(1, len(text), dtype=torch.bool)
    first[0, list(anchors)] = True
    wanted = [first, *[torch.ones(1, len(anchors), dtype=torch.bool)] * (network.depth - 1)]
    states = network(torch.tensor([text]), torch.tensor([anchors]), wanted)
    return torch.stack([network.compute_logits(state) for state in states], 1)


class Recording(PardDrafter):
    """Notes the logits of every depth by the text before."""

    def __init__(self, network: PardNetwork) -> None:
        super().__init__(network.to_runner(), network.config.mask_token, network.depth)
        self.found: dict[tuple[int, ...], torch.Tensor] = {}

    def _predict(self, context):  # type: ignore[no-untyped-def]
        logits = super()._predict(context)
        active = [i for i, depth in enumerate(context.max_depth.tolist()) if depth]
        for place, i in enumerate(active):
            self.found[tuple(context.sequences[i].tokens.tolist())] = logits[:, place].clone()
        return logits


@pytest.mark.parametrize(
    ("shape", "window"), [(DynamicTree(9, 2, 12), 0), (Chain(3, draw=False), 0), (Chain(3, draw=False), 5)], ids=str
)
def test_drafting_is_the_forward_pass_of_training(shape: DynamicTree | Chain, window: int) -> None:
    """In every step of requests that end, begin and accept paths of all lengths: the same logits at every depth."""
    network = network_of(window=window)
    drafter = Recording(network)
    requests = [
        Request(random_tokens(n, seed=n), max_new_tokens=8, sampling_params=SamplingParams(1.0)) for n in (2, 21, 9, 1)
    ]
    with unchecked():
        texts = generate(Method(drafter, shape, Match()), requests, rows=3, chunk=8)
    assert [len(t) for t in texts] == [8] * 4 and len(drafter.found) > 12
    for text, logits in drafter.found.items():
        expected = network.to_target_vocab(predictions(network, text, [len(text) - 1])[0])
        torch.testing.assert_close(logits.float(), expected, atol=1e-5, rtol=0)


def test_a_rollout_sees_the_text_before_it_and_no_other_rollout() -> None:
    network, text = network_of(), random_tokens(15, seed=1)
    logits = predictions(network, text, [4, 9])
    for position, changed in ((4, [True, True]), (5, [False, True]), (9, [False, True]), (10, [False, False])):
        other = [*text[:position], (text[position] + 1) % VOCAB, *text[position + 1 :]]
        same = torch.isclose(predictions(network, other, [4, 9]), logits).all(-1).all(-1)
        assert same.tolist() == [not c for c in changed], position
    torch.testing.assert_close(torch.cat([predictions(network, text, [a]) for a in (4, 9)]), logits)


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    values = {"target": CARD, "model": TINY, "mask_token": VOCAB}
    with pytest.raises(ValueError, match=f"mask_token {VOCAB} is not among the target's {VOCAB} tokens"):
        PardConfig.model_validate(values)
    with pytest.raises(ValueError, match="PARD is not supported for targets with windows that begin at"):
        windows = replace(TINY, window=4, window_layers=(0,), chunked=True)
        PardConfig.model_validate(values | {"mask_token": 1, "model": windows})
