"""The engine with the Triton kernels on a GPU or in the interpreter, and passes of static shapes that a stand-in
records.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.catalogue import BUILT_IN
from foretell.core.sampling import SamplingParams
from foretell.core.tree import tree_from_lists
from foretell.engine.engine import Engine
from foretell.engine.request import Request
from foretell.model.block.attention_kinds import KINDS, VARIABLE, attention_kind
from foretell.model.block.cached_attention import CachedAttention
from foretell.model.block.decoder import Decoder
from foretell.model.block.paged_attention import PagedAttention
from foretell.model.config.model import ModelConfig
from foretell.model.run.cuda_graph import GraphedDecoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.testing import TINY, tiny_decoder, tiny_deepseek
from helpers import FAMILIES, VOCAB, chain_tree, naive, of_catalogue, random_tokens, run, speculator, tokens_of

CONFIG = replace(TINY, vocab=VOCAB, heads=2, kv_heads=1, head_dim=8, window=6, window_layers=(1,))
METHODS = {entry.name: entry for entry in BUILT_IN}
CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
without_gpu = pytest.mark.skipif(DEVICE == "cuda", reason="it records passes in the interpreter")


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(VARIABLE, "triton")


def decoder() -> Decoder:
    return tiny_decoder(CONFIG, dtype=torch.float32, device=DEVICE)


def answers(method: str, sampling: SamplingParams, graphed: bool) -> list[list[int]]:
    network, draft = decoder(), tiny_decoder(replace(CONFIG, layers=1), seed=5, dtype=torch.float32, device=DEVICE)
    entry = METHODS[method]
    trained = speculator(entry.speculator, VOCAB) if entry.speculator else None
    drafts = DecoderRunner(draft), DecoderRunner(network.first_layers(1))
    built = of_catalogue(entry, network, drafts, trained)
    engine = Engine(DecoderRunner(GraphedDecoder(network) if graphed else network), built, rows=2, chunk=16)
    assert engine.runner.backend.attention == "triton"
    return [tokens_of(u) for u in run(engine, requests(sampling))]


def requests(sampling: SamplingParams) -> list[Request]:
    return [Request(random_tokens(n, seed=n), sampling, max_new_tokens=6) for n in (3, 17, 9)]


SAMPLED = SamplingParams(temperature=1.2, seed=3)


CASES = [(name, SamplingParams(), True) for name in FAMILIES] + [
    ("self_speculative", SamplingParams(), False),
    ("autoregressive", SAMPLED, True),
    ("ngram", SAMPLED, True),
]


@pytest.mark.parametrize(
    ("method", "sampling", "graphed"),
    [pytest.param(*case, marks=() if case[0] == "sam_recycling" else pytest.mark.exhaustive) for case in CASES],
)
def test_texts_are_those_of_naive_decoding(
    by_triton: None, method: str, sampling: SamplingParams, graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = answers(method, sampling, graphed)
    monkeypatch.setenv(VARIABLE, "auto")
    exact = tiny_decoder(CONFIG)
    assert texts == [naive(exact, request) for request in requests(sampling)]


def test_logits_of_a_tree_are_those_of_torch(by_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with norms of queries and keys, a window, soft caps, and positions in a part of the layers."""
    config = replace(CONFIG, qk_norm=True, attention_softcap=5.0, unrotated_layers=(1,), kv_heads=2, cache_dtype="int8")
    tree = tree_from_lists([[1, 2, 3, 4]], [[-1, 0, 0, 1]])
    logits = list[torch.Tensor]()
    for name in ("torch", "triton"):
        monkeypatch.setenv(VARIABLE, name)
        runner = DecoderRunner(tiny_decoder(config, dtype=torch.float32, device=DEVICE))
        runner.forward([0], chain_tree(random_tokens(12, VOCAB)))
        runner.commit(0, range(12))
        logits.append(runner.forward([0], tree).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-5)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a pass with the shapes of their tensors; it refuses what a captured pass must not do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.list: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item", "_unique2", "unique_consecutive"), (
            f"host read {name}"
        )
        self.list.append((name, *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
        return func(*args, **(kwargs or {}))


@without_gpu
def test_a_pass_is_one_list_of_operations_for_every_bucket(by_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph needs: equal shapes make the same operations and launches in the same order, whatever trees and
    lengths they hold, without a host read; and it reads nothing but static tensors, the cache and the weights.
    """
    from foretell.model.triton import launch

    recorder, lists = Recorder(), dict[tuple[int, ...], list[list[tuple[object, ...]]]]()
    genuine: Callable[[launch.Launch], None] = launch.Launch.run

    def launched(self: launch.Launch) -> None:
        values = {n: tuple(a.shape) if isinstance(a, torch.Tensor) else a for n, a in self.arguments.items()}
        recorder.list.append((self.kernel.__name__, self.grid, *sorted(map(str, values.items()))))
        with torch.utils._python_dispatch._disable_current_modes():
            genuine(self)

    class Recorded(GraphedDecoder):
        def _run(self, x: torch.Tensor, placed: Any, cache: Any, blocks: Any) -> Any:
            recorder.list = []
            with recorder:
                out = super()._run(x, placed, cache, blocks)
            lists.setdefault(placed.shape, []).append(recorder.list)
            return out

    monkeypatch.setattr(launch.Launch, "run", launched)
    runner = DecoderRunner(Recorded(decoder()))
    for parents in ([-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0], [-1], [-1, 0, 0, 0, 1]):
        runner.forward([0], tree_from_lists([[1] * len(parents)], [parents]))
        runner.commit(0, [0, 1][: len(parents)])
    assert sorted(len(passes) for passes in lists.values()) == [1, 1, 3], "4 or 3 nodes, 1 node, 5 nodes"
    for passes in lists.values():
        assert all(each == passes[0] for each in passes)
        kernels = [entry[0] for entry in passes[0] if entry[0] in ("write_pages", "attend", "combine")]
        assert kernels == ["write_pages", "attend"] * CONFIG.layers, "one launch per layer beside the write"


def test_which_attention_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert attention_kind(CONFIG, torch.float32, CPU) is CachedAttention

    def choice(config: ModelConfig) -> type[CachedAttention]:
        return attention_kind(config, torch.bfloat16, torch.device("cuda"))

    pytest.importorskip("triton")
    assert choice(CONFIG) is PagedAttention and choice(replace(CONFIG, cache_dtype="fp8")) is PagedAttention
    for config in (
        tiny_deepseek(), replace(CONFIG, cache_dtype="int4-kivi"), replace(CONFIG, page_budget=128),
        replace(CONFIG, head_dim=512),
    ):  # fmt: skip
        assert choice(config).name != "triton"
    assert KINDS[-1] is CachedAttention and len({kind.name for kind in KINDS}) == len(KINDS)
    for asked, message in (("metal", "none of: auto"), ("triton", "does not compute in float64")):
        monkeypatch.setenv(VARIABLE, asked)
        with pytest.raises(ValueError, match=message):
            attention_kind(CONFIG, torch.float64, torch.device(DEVICE))


def test_nothing_imports_triton_without_need() -> None:
    code = (
        "import sys, torch, foretell, foretell.testing as t\n"
        "from foretell.model.run.decoder_runner import DecoderRunner\n"
        "from foretell.core.tree import tree_from_lists\n"
        "runner = DecoderRunner(t.tiny_decoder())\n"
        "runner.forward([0], tree_from_lists([[1]], [[-1]]))\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
