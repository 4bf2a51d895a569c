"""The catalogue: columns follow from the parts of a method, and unknown options are errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from command import run_foretell
from foretell.bench.competitor import MethodSpec
from foretell.catalogue import (
    BUILT_IN,
    DEFAULT_METHOD,
    BuildContext,
    Entry,
    build,
    catalogue,
    installed_methods,
    registry,
)
from foretell.catalogue.build_context import Input
from foretell.catalogue.config import SpeculativeConfig
from foretell.catalogue.options.base import MethodOptions
from foretell.catalogue.options.feature_level import EagleTreeOptions
from foretell.catalogue.registry import find
from foretell.cli import methods
from foretell.draft import CombinedRetriever, DraftModel, HybridDrafter
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.retrieval.datastore import write_datastore
from foretell.shape import (
    BranchingTree,
    Chain,
    DynamicTree,
    FixedTree,
    HybridTree,
    Trie,
)
from helpers import DISTINCT, OPTIONS, VARIANTS, VOCAB, Variant, parts_for, sibling, speculator, target
from word_codec import word_codec

FAMILIES = {
    "baseline", "retrieval", "draft model", "self-drafting", "heads", "feature level", "parallel decoding", "hybrid",
    "lossy",
}  # fmt: skip


def context(*kinds: str, drafts: int = 0) -> BuildContext:
    models = tuple(DecoderRunner(sibling()) for _ in range(drafts))
    return BuildContext(VOCAB, target(), models, speculators=tuple(speculator(k) for k in kinds))


@pytest.mark.parametrize(("entry", "variant"), list(zip(DISTINCT, VARIANTS, strict=False)), ids=lambda p: p.name)
def test_columns_are_those_of_the_parts_that_are_built(entry: Entry, variant: Variant) -> None:
    method = variant.make(VOCAB)
    assert (type(method.draft), type(method.tree), type(method.accept)) == (entry.drafter, entry.shape, entry.acceptor)
    assert method.lossless == entry.lossless == (entry.family != "lossy")
    assert entry.drafter.label and entry.shape.label and entry.acceptor.label


def test_the_default_drafts_with_what_there_is() -> None:
    for parts, drafter, shape in (
        (context("eagle3"), HybridDrafter, HybridTree),
        (context(drafts=1), HybridDrafter, HybridTree),
        (context(), CombinedRetriever, Trie),
    ):
        method = build(DEFAULT_METHOD, parts, {"num_draft_tokens": 9})
        assert (method.name, type(method.draft), type(method.tree)) == ("auto", drafter, shape)
        trie = method.tree.trie if isinstance(method.tree, HybridTree) else method.tree
        assert isinstance(trie, Trie) and trie.budget == 9
        assert method.drafter_label and method.accept.same_seed


def test_every_method_is_described() -> None:
    for entry in BUILT_IN:
        assert entry.family in FAMILIES and entry.description.endswith(".") and entry.when_to_use.endswith("."), (
            entry.name
        )
        assert entry.papers or entry.name in ("autoregressive", "synthetic_lossy")
        assert all(o.description.endswith(".") and o.type for o in entry.option_list()), entry.name
        assert all(re.fullmatch(r"(\d{4}\.\d{5})?", p.arxiv) for p in entry.papers)
    assert {e.family for e in BUILT_IN} == FAMILIES
    names = [n for e in BUILT_IN for n in (e.name, *e.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_an_option_that_a_method_does_not_read_is_refused(entry: Entry, every: int) -> None:
    unread = {n for e in BUILT_IN for n in e.options.model_fields} - set(entry.options.model_fields)
    names = sorted(unread - {a for o in entry.option_list() for a in o.aliases})
    for name in names[BUILT_IN.index(entry) % every :: every]:
        with pytest.raises(ValueError, match=f"method {entry.name} does not read '{name}'") as error:
            entry.parse_options({name: 1})
        assert all(o.name in str(error.value) for o in entry.option_list())


class Unread(tuple[Any, ...]):
    """An input of a method that must not look at it."""

    def _look(self, *_: object) -> Any:
        raise LookupError("a builder has read what its entry does not declare")

    __bool__ = __iter__ = __len__ = __getitem__ = _look


INPUTS = get_args(Input)
CASES = [
    *((entry, OPTIONS.get(entry.name, {})) for entry in BUILT_IN),
    *((find("triforce"), {"first_level": level}) for level in ("ngram", "sam_recycling", "eagle3")),
]


@pytest.mark.parametrize(("entry", "options"), CASES, ids=lambda part: getattr(part, "name", ""))
def test_an_entry_declares_what_it_reads(entry: Entry, options: dict[str, object]) -> None:
    kind = "eagle3" if options.get("first_level") == "eagle3" else entry.speculator
    parts = parts_for(entry, target(), [DecoderRunner(sibling())] * 2, speculator(kind) if kind else None)
    read = {name for name in INPUTS if name in entry.reads} - entry.parse_options(options).unread
    unread: dict[str, Any] = {name: Unread() for name in INPUTS if name not in read}
    only_these = replace(parts, **unread)
    assert entry.build(only_these, options).inputs == read
    for name in read:
        wrong: dict[str, Any] = {name: Unread()}
        with pytest.raises(LookupError):
            entry.build(replace(only_these, **wrong), options)


def test_a_datastore_takes_the_place_of_references(tmp_path: Path) -> None:
    codec = word_codec("a")
    write_datastore(tmp_path / "store", [np.array([1, 2, 3], np.uint32)], codec, "m")
    parts = BuildContext(VOCAB, target(), codec=codec, references=Unread())
    assert build("rest", parts, {"datastore": str(tmp_path / "store")}).inputs == frozenset()


def test_every_option_is_read_somewhere() -> None:
    folder = Path(registry.__file__).parent
    code = "".join(p.read_text() for p in folder.glob("*.py") if p.name not in ("options.py", "entry.py"))
    for name in {n for e in BUILT_IN for n in e.options.model_fields}:
        assert re.search(rf"(options|shape)\.{name}\b", code), name


def test_bad_options_are_named_in_one_sentence() -> None:
    with pytest.raises(
        ValueError, match="method ngram does not read 'prompt_lookup_mx': did you mean 'prompt_lookup_max'"
    ):
        find("ngram").parse_options({"prompt_lookup_mx": 3})
    with pytest.raises(ValueError, match="method autoregressive does not read 'num_steps': it has no options"):
        find("plain").parse_options({"num_steps": 3})
    with pytest.raises(ValueError, match="num_draft_tokens and num_speculative_tokens are one option; give one"):
        find("eagle3").parse_options({"num_draft_tokens": 3, "num_speculative_tokens": 3})
    with pytest.raises(ValueError, match=r"method medusa, num_draft_tokens: .*greater than or equal to 1"):
        find("medusa").parse_options({"num_draft_tokens": 0})
    for method, values in (
        ("medusa", {"speculative_tree": [[0]], "num_draft_tokens": 4}),
        ("eagle2", {"acceptance": [0.5], "confidence_threshold": 0.1}),
        ("blockwise", {"num_speculative_tokens": 2, "num_draft_tokens": 4}),
        ("eagle3", {"draft_sample_method": "probabilistic", "confidence_threshold": 0.1}),
        ("mlp_speculator", {"draft_sample_method": "probabilistic", "eagle_topk": 3}),
    ):
        with pytest.raises(ValueError, match=rf"{method}: .* so \w+ would not be read: leave that out"):
            find(method).parse_options(values)
    with pytest.raises(ValueError, match="two criteria; give one of them"):
        find("blockwise_lossy").parse_options({"accept_top_k": 2, "accept_distance": 1})


def test_any_key_of_the_json_is_an_option() -> None:
    config = SpeculativeConfig.parse('{"method": "pld", "model": "a", "self": 1, "num_speculative_tokens": 3}')
    assert (config.method, config.model) == ("pld", "a")
    assert config.options == {"self": 1, "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="speculative config, method: must be a string, found 3"):
        SpeculativeConfig.parse('{"method": 3}')


def test_names_of_other_engines_are_aliases() -> None:
    read = find("eagle3").parse_options(
        {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "num_speculative_tokens": 9}
    )
    assert read == EagleTreeOptions(num_steps=3, eagle_topk=2, num_draft_tokens=9)
    assert find("deepseek_mtp") is find("glm4_moe_mtp") is find("qwen3_next_mtp") is find("mtp")


def shapes() -> Iterator[tuple[str, object]]:
    yield "ngram@16", Trie(16, 0.1)
    yield "draft_model@16", Chain(16)
    yield "specinfer@16", BranchingTree((2, 2, 1, 1))
    yield "specinfer@5", BranchingTree((2, 1))
    yield "spectr@6", BranchingTree((4, 1, 1, 1, 1, 1), distinct=False)
    yield "dynamic_tree@60", DynamicTree(5, 10, 60)


@pytest.mark.parametrize(("text", "shape"), list(shapes()))
def test_a_number_of_drafted_tokens_is_what_is_drafted(text: str, shape: object) -> None:
    spec = MethodSpec.parse(text)
    assert build(spec.method, context(drafts=1), spec.config).tree == shape


def test_a_number_of_drafted_tokens_bounds_the_elastic_trie() -> None:
    spec = MethodSpec.parse("hybrid@16")
    tree = build(spec.method, context(), spec.config).tree
    assert isinstance(tree, Trie) and tree.budget == 16


def test_a_number_of_drafted_tokens_is_refused_where_it_is_not_read() -> None:
    with pytest.raises(ValueError, match="plain@4: method autoregressive does not read 'num_speculative_tokens'"):
        MethodSpec.parse("plain@4")


def test_the_drafter_beside_retrieval_has_its_own_options() -> None:
    method = build("hybrid_model", context("eagle3"), {"num_speculative_tokens": 60, "num_draft_tokens": 9})
    assert isinstance(method.tree, HybridTree)
    assert method.tree.model_shape == DynamicTree(7, 10, 60) and method.tree.trie.budget == 9
    with pytest.raises(ValueError, match="hybrid_model, which drafts with eagle3 here, does not read 'exit_layer'"):
        build("hybrid_model", context("eagle3"), {"exit_layer": 1})
    with pytest.raises(ValueError, match="hybrid_model, which has a draft model here, does not read 'eagle_topk'"):
        build("hybrid_model", context(drafts=1), {"eagle_topk": 1})
    early = build("hybrid_model", context(), {"exit_layer": 1, "num_speculative_tokens": 2}).tree
    assert isinstance(early, HybridTree) and early.model_shape == Chain(2, draw=False, confidence=0.4)


def test_schedules_and_fixed_trees() -> None:
    adaptive = build("draft_model", context(drafts=1), {"num_assistant_tokens_schedule": "adaptive"})
    assert adaptive.tree == Chain(5, adaptive=True) and isinstance(adaptive.draft, DraftModel)
    fixed = build("eagle2", context("eagle"), {"acceptance": [0.5, 0.2], "num_draft_tokens": 6}).tree
    assert isinstance(fixed, FixedTree) and len(fixed.choices) == 6
    chain = build("eagle", context("eagle"), {"eagle_topk": 1, "num_steps": 3}).tree
    assert chain == Chain(3, draw=False)


MINE = Entry(
    name="mine",
    family="retrieval",
    description="-",
    when_to_use="-",
    drafter=BUILT_IN[0].drafter,
    shape=BUILT_IN[0].shape,
    acceptor=BUILT_IN[0].acceptor,
    builder=BUILT_IN[0].builder,
)


def test_methods_of_other_packages_are_found_and_broken_ones_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> object:
        raise ImportError("no module\nnamed torch_plus")

    points = [
        SimpleNamespace(name="broken", value="broken.module:ENTRY", load=fail),
        SimpleNamespace(name="text", value="some.module:NAME", load=lambda: "no entry"),
        SimpleNamespace(name="mine", value="good.module:ENTRY", load=lambda: MINE),
    ]
    for module in (registry, methods):
        monkeypatch.setattr(module, "entry_points", lambda group: points)
    assert catalogue()["mine"] is MINE and find("mine").options is MethodOptions
    first, second = installed_methods().problems
    assert "broken = broken.module:ENTRY" in first and "(ImportError: no module named torch_plus); upgrade or" in first
    assert "text = some.module:NAME" in second and "no foretell.catalogue.Entry" in second
    with pytest.raises(ValueError, match=r"unknown method 'broken'.*no module named torch_plus"):
        find("broken")
    shown = run_foretell("methods", "--json")
    assert shown.exit_code == 0 and [e["name"] for e in json.loads(shown.stdout)] == [*catalogue()]
    assert shown.stderr.count("foretell: the method") == 2
