"""A target that drafts for itself and leaves nothing out is always right, whatever it leaves out otherwise."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.accept import Rejection
from foretell.catalogue import BUILT_IN, BuildContext, build
from foretell.core.sampling import SamplingParams
from foretell.draft import DraftModel
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import SkipSet
from foretell.model.offload.sparsity_file import SparsityFile
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain
from foretell.testing import TINY, tiny_decoder
from helpers import VOCAB, naive, random_tokens

LAYERS, LONGEST = 3, 4
NETWORK = tiny_decoder(replace(TINY, vocab=VOCAB, layers=LAYERS, ffn=200))
PROMPTS = [random_tokens(n, seed=n) for n in (3, 17, 40)]
KEYS = 256
"""More than any of the texts."""


def of_catalogue(name: str, **options: object) -> AnyMethod:
    context = BuildContext(VOCAB, NETWORK, (DecoderRunner(NETWORK),))
    chain = {"num_speculative_tokens": LONGEST, "confidence_threshold": 0.0}
    return build(name, context, {**chain, **options})


def all_neurons(folder: Path) -> str:
    SparsityFile(method="cats", model="", layers=LAYERS, sparsity=0, thresholds=((-1.0,),) * LAYERS).save(folder)
    return str(folder)


NOTHING_LEFT_OUT: Mapping[str, Callable[[Path], AnyMethod]] = {
    "layer_skip": lambda _: of_catalogue("layer_skip", exit_layer=LAYERS),
    "self_speculative": lambda _: Method(
        DraftModel(DecoderRunner(NETWORK.without_sublayers(SkipSet()))), Chain(LONGEST), Rejection()
    ),
    "pruned_draft": lambda _: of_catalogue("pruned_draft", pruned_layers=0),
    "sparse_kv_draft": lambda _: of_catalogue("sparse_kv_draft", cache_budget=KEYS),
    "triforce": lambda _: of_catalogue("triforce", cache_budget=KEYS, draft_model_tokens=2),
    "sparse_mlp_draft": lambda folder: of_catalogue("sparse_mlp_draft", sparsity=all_neurons(folder)),
    "matformer_draft": lambda _: of_catalogue("matformer_draft", neuron_share=1.0),
}
"""`self_speculative` reads what it leaves out from a file of a search."""


def test_every_target_that_drafts_for_itself_is_here() -> None:
    """But `quantised_draft`, whose copies have 8 bits at most: `tests/model/test_compress.py` has those of 16."""
    others = {entry.name for entry in BUILT_IN if entry.family == "self-drafting"} - {"quantised_draft"}
    assert set(NOTHING_LEFT_OUT) == others


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NOTHING_LEFT_OUT)
def test_a_draft_that_leaves_out_nothing_is_always_accepted(
    name: str, rows: int, temperature: float, tmp_path: Path
) -> None:
    requests = [Request(p, SamplingParams(temperature, seed=3), max_new_tokens=20) for p in PROMPTS]
    for request, c in zip(
        requests,
        Engine(DecoderRunner(NETWORK), NOTHING_LEFT_OUT[name](tmp_path), rows).complete(requests),
        strict=True,
    ):
        assert sum(c.statistics.accepted_per_position) == c.statistics.drafted > 0
        if not temperature:
            assert list(c.tokens) == naive(NETWORK, request)
