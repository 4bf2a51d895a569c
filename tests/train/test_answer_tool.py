"""tools/answers.py: its batches answer as the engine does."""

import random
import runpy
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foretell.accept import Match
from foretell.draft import NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import Method
from foretell.engine.request import Request
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import RootOnly
from foretell.testing import TINY, tiny_decoder
from foretell.train.data.features import compute_hidden_states
from helpers import p_value

TOOL = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools" / "answers.py")))
WIDE = replace(TINY, vocab=200)
DECODER = tiny_decoder(WIDE, sharpness=0.3)
ENDS = tuple(range(8))
"""Several tokens end an answer, because a random model would rarely write a single one."""
LONGEST = 60


def answered(prompts: Sequence[list[int]], greedy: bool, longest: int = LONGEST) -> list[list[int]]:
    torch.manual_seed(0)
    asked = [TOOL.Asked(i, [], prompt, greedy) for i, prompt in enumerate(prompts)]
    writer = TOOL.Writer(DECODER, ENDS, 2.0, longest, time.monotonic() + 600)
    for batch in TOOL.batches(asked, longest, 12 * (longest + 100), 64):
        writer.answer(batch)
    return [a.answer for a in asked]


def test_greedy_answers_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOOL.batches.__globals__, "CHECKED", 2)
    draw = random.Random(0)
    prompts = [[draw.randrange(20, 200) for _ in range(draw.randint(1, 70))] for _ in range(40)]
    engine = Engine(DecoderRunner(DECODER), Method(NoDrafter(), RootOnly(), Match()), rows=8)
    expected = [
        list(c.tokens) for c in engine.complete([Request(p, max_new_tokens=LONGEST, eos=ENDS) for p in prompts])
    ]
    assert len({len(tokens) for tokens in expected}) > 3, "rows are taken out at several steps"
    assert answered(prompts, greedy=True) == expected


def test_sampled_answers_have_the_distribution_of_the_model() -> None:
    prompt = [30, 40, 50]
    (state,) = compute_hidden_states(DECODER, torch.tensor([prompt]), (WIDE.layers + 1,))
    distribution = torch.softmax(DECODER.logits(state[0, -1:])[0] / 2.0, -1).detach().numpy()
    first = [tokens[0] for tokens in answered([prompt] * 4000, greedy=False, longest=2)]
    assert p_value(np.bincount(first, minlength=WIDE.vocab), distribution) > 1e-4
