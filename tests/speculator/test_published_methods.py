"""Every published format drafts under its method and changes no answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import LAYERS, D, V, authors_medusa, eagle1, eagle3, ibm_mlp, put, speculators_eagle3, vllm_medusa
from test_dflash_formats import dflash
from test_one_pass_formats import p_eagle
from test_redrafter_format import redrafter

from foretell.catalogue import BuildContext, build
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.config.model import ModelConfig
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import letter_codec, tiny_decoder
from helpers import naive, random_tokens, run, statistics_of, tokens_of

CONFIG = ModelConfig("llama", vocab=V, hidden=D, layers=LAYERS, heads=2, kv_heads=1, head_dim=4, ffn=12, context=256)
REQUESTS = [Request(random_tokens(n, V, seed=n), max_new_tokens=12) for n in (3, 9)]


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (authors_medusa, "medusa"),
        (vllm_medusa, "medusa"),
        (ibm_mlp, "mlp_speculator"),
        (eagle1, "eagle"),
        (eagle1, "eagle2"),
        (eagle3, "eagle3"),
        (speculators_eagle3, "eagle3"),
        (dflash, "dflash"),
        (p_eagle, "p_eagle"),
        (redrafter, "redrafter"),
    ],
)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["torch", "kernels"])
def test_greedy_answers_are_those_of_plain_decoding(
    tmp_path: Path, make: Callable[[], Any], method: str, dtype: torch.dtype
) -> None:
    """Networks for float32 targets draft on the CPU kernels, where there are some; those for float64 do not."""
    target = tiny_decoder(CONFIG, dtype=dtype)
    parts = BuildContext(V, target, codec=letter_codec(V), speculators=(put(tmp_path, *make()),))
    engine = Engine(DecoderRunner(target), build(method, parts), rows=2)
    updates = run(engine, REQUESTS)
    assert [tokens_of(u) for u in updates] == [naive(target, r) for r in REQUESTS]
    assert all(statistics_of(u).drafted > 0 for u in updates)
