"""The host waits for a device once per step, and once for each pass of a drafter; the tokens are those of the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from covering import covering_parameters
from foretell.accept import Acceptor, BlockVerification, Match, Rejection, TraversalVerification
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel, PromptLookup
from foretell.draft.base import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import Decoder
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import BranchingTree, Chain, DynamicTree, Trie
from foretell.shape.base import RootOnly
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB
from stand_in_device import STAND_IN, moved, stand_in_device

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.3, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy with penalties": {"repetition_penalty": 1.4, "logit_bias": {3: 2.0}},
    "rules": {"temperature": 1.0, "top_p": 0.95, "bad_words": ((5,), (1, 2)), "min_tokens": 3, "logit_bias": {7: -9.0}},
    "greedy with rules": {"allowed_token_ids": (1, 2, 3, 9, 11, 20)},
}
HOST_DRAFTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "none": lambda: (NoDrafter(), RootOnly()),
    "lookup": lambda: (PromptLookup(3), Trie(10)),
}
ACCEPTORS: dict[str, Acceptor] = {"match": Match(), "rejection": Rejection(), "traversal": TraversalVerification()}
PROMPTS = [1, 2, 3, 4, 1, 2, 3], [9, 9, 8, 9, 9]
LENGTH = 8


def network(device: torch.device) -> Decoder:
    decoder = tiny_decoder(replace(TINY, vocab=VOCAB), dtype=torch.float32)
    return moved(decoder) if device == STAND_IN else decoder


def run(
    runner: DecoderRunner,
    method: AnyMethod,
    sampling: Sequence[SamplingParams],
    after: Callable[[], None],
    **fields: Any,
) -> list[list[int]]:
    """The tokens of every request; `after` is called after every step."""
    engine, tokens = Engine(runner, method), dict[int, list[int]]()
    for prompt, params in zip(PROMPTS, sampling, strict=True):
        engine.submit(Request(prompt, params, LENGTH, eos=(0,), **fields))
    while engine.busy:
        for update in engine.step():
            if update.error is not None:
                raise update.error
            tokens.setdefault(update.request, []).extend(update.tokens)
        after()
    return [tokens[number] for number in sorted(tokens)]


def compare(make: Callable[[Decoder], AnyMethod], names: Sequence[str], most: int, seed: int, **fields: Any) -> None:
    """A method on the stand-in and on the host: at most so many waits per step, and the same tokens."""
    sampling = [SamplingParams(seed=seed, **SAMPLING[name]) for name in names]
    host = network(torch.device("cpu"))
    expected = run(DecoderRunner(host), make(host), sampling, lambda: None, **fields)
    with stand_in_device() as waits:
        decoder = network(STAND_IN)

        def check() -> None:
            assert len(waits.at) <= most, waits.at
            waits.at.clear()

        runner, method = DecoderRunner(GraphedDecoder(decoder)), make(decoder)
        waits.at.clear()
        found = run(runner, method, sampling, check, **fields)
    assert found == expected and all(found)


CASES = list(product(HOST_DRAFTS, ACCEPTORS, SAMPLING, SAMPLING))


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[i], marks=marks) for i, marks in covering_parameters(CASES, 2).items()], ids=" ".join
)
def test_a_step_waits_once(case: tuple[str, str, str, str]) -> None:
    drafts, acceptor, *sampling = case
    compare(lambda _: Method(*HOST_DRAFTS[drafts](), ACCEPTORS[acceptor]), sampling, 1, seed=len(sampling[0]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("shape", "levels", "acceptor"),
    [
        (Chain(3), 3, Rejection()),
        (Chain(3), 3, BlockVerification()),
        (BranchingTree((2, 1)), 2, Rejection()),
        (BranchingTree((2, 1), distinct=False), 2, Rejection()),
        (BranchingTree((2, 1)), 2, TraversalVerification()),
        (DynamicTree(3, 3, 8), 3, Match()),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
@pytest.mark.parametrize("sampling", ["plain", "truncated", "rules", "greedy"])
def test_drafting_waits_once_for_every_pass(
    shape: Any, levels: int, acceptor: Acceptor, sampling: str, seed: int
) -> None:
    def method(decoder: Decoder) -> AnyMethod:
        return Method(DraftModel(DecoderRunner(decoder.first_layers(1))), shape, acceptor)

    compare(method, [sampling, "plain"], 1 + levels, seed)


def test_log_probabilities_wait_once_more_for_every_request() -> None:
    compare(lambda _: Method(NoDrafter(), RootOnly(), Match()), ["greedy", "plain"], 3, seed=1, logprobs=3)


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda x: x[0].item(), "item"),
        (lambda x: float(x[0]), "item"),
        (lambda x: x.tolist(), "read"),
        (lambda x: x.cpu(), "read"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "boolean index"),
        (lambda x: x[[0, 2]], "host index"),
        (lambda x: x.copy_(torch.zeros(3)), "upload"),
        (lambda x: torch.zeros(3).to(STAND_IN), "upload"),
        (lambda x: bool((x > 1).any()), "is_nonzero"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_stand_in_sees_every_wait(read: Callable[[torch.Tensor], object], operation: str, inference: bool) -> None:
    with stand_in_device() as waits, torch.inference_mode(inference):
        x = torch.arange(3.0).to(STAND_IN, non_blocking=True)
        y = torch.zeros(3).to(STAND_IN, non_blocking=True)
        y.copy_(x + x[torch.arange(3).to(STAND_IN, non_blocking=True)])
        assert waits.at == []
        read(y)
    assert len(waits.at) == 1 and waits.at[0].removeprefix("_local_scalar_dense").startswith((operation, " "))


def test_the_stand_in_refuses_tensors_of_two_devices() -> None:
    with stand_in_device(), pytest.raises(RuntimeError, match="add of tensors on the device and on the host"):
        torch.arange(3.0).to(STAND_IN) + torch.ones(3)
