"""The plug-in for SGLang beside stand-ins for SGLang's classes; it was not run on a GPU."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import foretell_sglang
from foretell_sglang import TreeDrafter

VOCAB, NODES = 64, 6


class Worker:
    """SGLang's worker as far as the plug-in reads it."""

    overlap = False

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap, self.draft_token_num, self.ngram_corpus = self.overlap, NODES, None


class HookType(Enum):
    REPLACE = "replace"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    registered = dict[str, Any]()
    packages = [ModuleType(f"sglang{name}") for name in ("", ".srt", ".srt.plugins", ".srt.speculative")]
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = HookType  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, hook, kind: registered.update({target: (hook, kind)})
    )
    worker = ModuleType("sglang.srt.speculative.ngram_worker")
    worker.NGRAMWorker = Worker  # type: ignore[attr-defined]
    for module in (*packages, registry, worker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return registered


@dataclass
class Request:
    rid: str
    origin_input_ids_unpadded: list[int]
    output_ids: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    """Chosen in the last step, and not yet among the output."""


def next_token(token: int) -> int:
    return (token * 3 + 1) % 10


def made_worker(hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, overlap: bool) -> Any:
    monkeypatch.setenv(foretell_sglang.VARIABLE, '{"method": "suffix"}')
    monkeypatch.setattr(Worker, "overlap", overlap)
    foretell_sglang.register()
    kind, how = hooks["sglang.srt.speculative.ngram_worker.NGRAMWorker"]
    assert how is HookType.REPLACE and issubclass(kind, Worker)
    target = SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB)))
    return kind(SimpleNamespace(tokenizer_path=None, model_path="nowhere"), 0, 0, target)


def batch_of(requests: list[Request]) -> Any:
    tokens = torch.zeros(len(requests), NODES, dtype=torch.int64)
    for i, request in enumerate(requests):
        tokens[i, : len(request.late)] = torch.tensor(request.late)
    info = SimpleNamespace(accept_tokens=tokens.flatten(), accept_lens=torch.tensor([len(r.late) for r in requests]))
    return SimpleNamespace(reqs=requests, spec_info=info, grammar_needs_sync=lambda: False)


@pytest.mark.parametrize("overlap", [False, True])
def test_trees_continue_the_texts_of_requests_that_come_and_go(
    hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    worker, accepted, steps, requests = made_worker(hooks, monkeypatch, overlap), 0, 0, list[Request]()
    for n in range(40):
        if len(requests) < 3:
            requests.append(Request(str(n), [n % 10, 7, 5], [next_token(5)]))
        tokens, mask = worker._prepare_draft_tokens(batch_of(requests))
        tokens, mask = tokens.reshape(-1, NODES), mask.reshape(-1, NODES, NODES)
        assert len(tokens) == len(requests)
        for request, row, seen in zip(requests, tokens, mask, strict=True):
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *(request.late if overlap else ())]
            assert row[0] == text[-1]
            # As SGLang derives the tree: the parent of a node is its last ancestor.
            parents = [-1, *(int(np.flatnonzero(seen[node, :node])[-1]) for node in range(1, NODES))]
            for node in range(1, NODES):
                assert (seen[node] == np.maximum(seen[parents[node]], np.eye(NODES, dtype=np.uint8)[node])).all()
            new, at = list[int](), 0
            while at >= 0:
                new.append(next_token(int(row[at])))
                at = next((k for k in range(1, NODES) if parents[k] == at and row[k] == new[-1]), -1)
            accepted, steps = accepted + len(new) - 1, steps + 1
            if overlap:
                request.output_ids += request.late
                request.late = new
            else:
                request.output_ids += new
        worker._update_ngram_corpus(None)
        requests = [r for r in requests if len(r.output_ids) < 30]
        rows = [r.row for r in worker.ngram_corpus._requests.values()]
        assert len(set(rows)) == len(rows) <= 4
    assert accepted > 2 * steps


def test_without_the_variable_sglang_stays_as_it_is(hooks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(foretell_sglang.VARIABLE, raising=False)
    foretell_sglang.register()
    assert not hooks


@pytest.mark.parametrize("given", ["suffix", "[1]"])
def test_options_that_are_no_object_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(foretell_sglang.VARIABLE, given)
    with pytest.raises(ValueError, match=foretell_sglang.VARIABLE):
        foretell_sglang.register()


def test_a_tree_needs_room_for_a_draft() -> None:
    with pytest.raises(ValueError, match="2 nodes"):
        TreeDrafter({}, 1, VOCAB, "nowhere")


def test_a_request_whose_text_has_changed_begins_anew() -> None:
    drafter = TreeDrafter({}, 4, VOCAB, "nowhere")
    drafter.draft([("a", [1, 2, 1, 2, 1], 5)])
    tokens, _ = drafter.draft([("a", [3, 4, 3, 4, 3], 5)])
    assert tokens[:2].tolist() == [3, 4] and drafter.known("a") == 5
    drafter.reset()
    assert drafter.known("a") == 0
