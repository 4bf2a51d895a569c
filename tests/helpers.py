"""Shared by the tests: tiny models, all methods and variants, and reference implementations without the engine."""

import atexit
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from foretell.accept import (
    BlockVerification,
    GreedyBlockVerification,
    Match,
    Rejection,
    TraversalVerification,
    TypicalAcceptance,
)
from foretell.catalogue import BUILT_IN, DEFAULT_METHOD, BuildContext, Entry, build
from foretell.catalogue.speculators import embedding_and_head, read_speculator, require_draft_model, target_card
from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.sampling import CounterRNG, SamplingParams, exponential_variates
from foretell.core.tree import TokenTree, root_tree
from foretell.draft import DrafterUnion, DraftModel, EarlyExitDrafter, Predictor, PromptLookup
from foretell.draft.exit_heads import TrainedExits
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request, Update
from foretell.engine.statistics import RequestStatistics
from foretell.model.block.decoder import Decoder
from foretell.model.cache.block_table import OutOfBlocksError
from foretell.model.load.checkpoint import Checkpoint
from foretell.model.load.transforms import DecoderTransform
from foretell.model.load.weights import Weights
from foretell.model.offload.sparsity_file import SparsityFile
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.runner import Runner
from foretell.shape import (
    BranchingTree,
    Chain,
    DynamicTree,
    FixedTree,
    Shape,
    Trie,
    optimal_tree,
)
from foretell.speculator.checkpoint import save
from foretell.speculator.network import NETWORKS
from foretell.speculator.network.exits import Exits
from foretell.testing import TINY, RandomWeights, letter_codec, tiny_decoder
from foretell.tokenizer.stream import Detokenizer

Distribution = np.ndarray
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Rotary scaling of Llama 3, so small that a short sequence reaches the scaled frequencies."""
VOCAB = 29
"""Vocabulary of the tests that compare tokens; those of distributions have a smaller one."""
SPECULATORS: Mapping[str, Mapping[str, object]] = {
    "blockwise": {"heads": 3, "inner": 24},
    "draft_model": {"model": replace(TINY, layers=1)},
    "dflash": {"heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "block_size": 5, "markov_rank": 3},
    "eagle": {"kind": "eagle", "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256},
    "exits": {"layers": (1,)},
    "eagle3": {"kind": "eagle3", "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256},
    "masked_diffusion": {"model": TINY, "mask_token": 2},
    "medusa": {"heads": 3},
    "mlp_speculator": {"stages": 3, "inner": 40},
    "p_eagle": {"heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 24, "context": 256, "layers": 2, "depth": 4},
    "pard": {"model": replace(TINY, layers=1), "depth": 4, "mask_token": 3},
    "pass": {"ahead": 3},
    "redrafter": {"stages": 4, "inner": 20},
}
"""Sizes of a small speculator of every kind that methods of the catalogue draft with."""
_FOLDER = Path(mkdtemp(prefix="foretell-speculators-"))
atexit.register(rmtree, _FOLDER)


@cache
def target(vocab: int = VOCAB, layers: int = 2) -> Decoder:
    """A small model in float64."""
    return tiny_decoder(replace(TINY, vocab=vocab, layers=layers))


@cache
def sibling(vocab: int = VOCAB) -> Decoder:
    """A smaller, unrelated model."""
    return tiny_decoder(replace(TINY, vocab=vocab, layers=1), seed=5)


@cache
def wide_target(seed: int = 0, layers: int = 2) -> Decoder:
    """A small model in float32 whose sizes the CPU kernels run."""
    return tiny_decoder(replace(TINY, hidden=64, head_dim=16, vocab=VOCAB, layers=layers), seed, torch.float32)


def draft_tokens(vocab: int = VOCAB) -> list[int]:
    """Three quarters of a vocabulary: what the speculators of these tests may draft."""
    return sorted(list(dict.fromkeys(random_tokens(10 * vocab, vocab, seed=3)))[: 3 * vocab // 4])


@cache
def speculator(kind: str, vocab: int = VOCAB, wide: bool = False, context: int = 256) -> Path:
    """Directory of a speculator with random weights for the tiny target, or the wide one, over three quarters of the
    vocabulary.

    `context`: the longest sequence that it reads, for the kinds that have a limit.
    """
    config_type, network_type = NETWORKS[kind]
    context_of_target = BuildContext(vocab, wide_target() if wide else target(vocab))
    tokens = torch.tensor(draft_tokens(vocab))
    sizes = dict(SPECULATORS[kind])
    if "context" in sizes:
        sizes |= {"context": context} | ({"head_dim": 16} if wide else {})
    if "model" in sizes:
        sizes["model"] = replace(wide_target().config if wide else TINY, vocab=vocab, layers=1, context=context)
    config = config_type.model_validate({"target": target_card(context_of_target), "draft_vocab": len(tokens), **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = network_type(config, embedding_and_head(context_of_target))
        network.set_draft_vocab(tokens)
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    folder = _FOLDER / f"{kind}-{vocab}-{wide}-{context}"
    save(folder, network, config)
    return folder


@dataclass(frozen=True)
class Variant:
    """A method under test: how to build it for a vocabulary, and what it guarantees."""

    name: str
    make: Callable[[int], AnyMethod]
    lossless: bool = True
    same_seed: bool = True

    def __str__(self) -> str:
        return self.name


class TinyCheckpoint(Checkpoint):
    """A checkpoint with a random multi-token prediction layer for a small model."""

    def __init__(self, network: Decoder, weights: Weights | None = None) -> None:
        config = replace(network.config, architecture="qwen3_5_text")
        super().__init__(config, weights or RandomWeights(seed=1), torch.device("cpu"))

    def load_network(self, change: DecoderTransform, dtype: str | None = None) -> Network:
        raise NotImplementedError


def _thresholds_of_gates() -> str:
    """Directory of thresholds that leave out about half of the neurons of a small random model."""
    folder = _FOLDER / "cats"
    SparsityFile(method="cats", model="", layers=2, sparsity=0.5, thresholds=((0.3,), (0.3,))).save(folder)
    return str(folder)


OPTIONS: Mapping[str, Mapping[str, object]] = {
    "sparse_mlp_draft": {"sparsity": _thresholds_of_gates()},
    "early_exit_lossy": {"exit_threshold": 0.02},
    "skip_decode_lossy": {"min_layers": 1, "horizon": 2},
    "sparse_kv_draft": {"cache_budget": 8, "cache_refresh": 3},
    "triforce": {"cache_budget": 8, "cache_refresh": 3},
}
"""Options of methods that change nothing on a small random model with those of the catalogue."""


def of_catalogue(entry: Entry, network: Decoder, drafts: Sequence[Runner], trained: Path | None) -> AnyMethod:
    """A method for a target, with small models and a trained speculator to draft with."""
    return entry.build(parts_for(entry, network, drafts, trained), OPTIONS.get(entry.name))


def parts_for(entry: Entry, network: Decoder, drafts: Sequence[Runner], trained: Path | None) -> BuildContext:
    """What a method is built from: a target, small models, a trained speculator and references."""
    vocab = network.config.vocab
    return BuildContext(
        vocab,
        network,
        tuple(drafts[: 2 if entry.name == "specinfer" else 1]),
        (tuple(random_tokens(30, vocab, seed=8)), tuple(random_tokens(12, vocab, seed=9))),
        codec=letter_codec(vocab),
        draft_codecs=(letter_codec(vocab, 2),),
        checkpoint=TinyCheckpoint(network) if entry.name == "mtp" else None,
        speculators=() if trained is None else (trained,),
    )


def _of_catalogue(entry: Entry) -> Variant:
    def make(vocab: int) -> AnyMethod:
        drafts = DecoderRunner(sibling(vocab)), DecoderRunner(target(vocab).first_layers(1))
        trained = speculator(entry.speculator, vocab) if entry.speculator else None
        return of_catalogue(entry, target(vocab), drafts, trained)

    return Variant(entry.name, make, entry.lossless, entry.same_seed)


def small_model(vocab: int) -> DraftModel:
    """A drafter that is often wrong."""
    return DraftModel(DecoderRunner(sibling(vocab)))


def looking_ahead(vocab: int, groups: int) -> AnyMethod:
    """PaSS with this many groups of look-ahead embeddings per pass."""
    parts = BuildContext(vocab, target(vocab), speculators=(speculator("pass", vocab),))
    return build("pass", parts, {"look_ahead_groups": groups})


def good_model(vocab: int) -> DraftModel:
    """A drafter that is often right: the target's first layer."""
    return DraftModel(DecoderRunner(target(vocab).first_layers(1)))


def trained_model(vocab: int) -> Predictor:
    """A drafter with random weights, over three quarters of the vocabulary."""
    return require_draft_model(BuildContext(vocab, target(vocab), speculators=(speculator("draft_model", vocab),)))


def exits(vocab: int, blocks: bool = False) -> EarlyExitDrafter:
    """The target's first layer with an exit of random weights, over three quarters of the vocabulary; `blocks`: with
    the target's next block in it.
    """
    network = target(vocab)
    found = read_speculator(BuildContext(vocab, network), speculator("exits", vocab))
    assert isinstance(found, Exits)
    return EarlyExitDrafter(TrainedExits(found, blocks=[network.block(1)] if blocks else ()))


_CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
_RATES = [0.5, 0.2, 0.1]
_BY_HAND = (
    Variant(
        "confident_chain", lambda v: Method(small_model(v), Chain(4, confidence=0.3), Rejection()), same_seed=False
    ),
    Variant(
        "confident_block",
        lambda v: Method(small_model(v), Chain(4, confidence=0.3), BlockVerification()),
        same_seed=False,
    ),
    Variant("argmax_chain", lambda v: Method(good_model(v), Chain(4, draw=False), Rejection())),
    Variant("sampled_chain_match", lambda v: Method(small_model(v), Chain(4), Match())),
    Variant(
        "independent",
        lambda v: Method(small_model(v), BranchingTree((3, 2), distinct=False), Rejection()),
        same_seed=False,
    ),
    Variant("distinct", lambda v: Method(small_model(v), BranchingTree((3, 2, 1)), Rejection()), same_seed=False),
    Variant(
        "merged",
        lambda v: Method(DrafterUnion([small_model(v), good_model(v)]), BranchingTree((2, 2, 1)), Rejection()),
        same_seed=False,
    ),
    Variant(
        "greedy_block",
        lambda v: Method(small_model(v), BranchingTree((3, 1, 1), distinct=False), GreedyBlockVerification()),
        same_seed=False,
    ),
    Variant(
        "traversal_independent",
        lambda v: Method(small_model(v), BranchingTree((3, 2), distinct=False), TraversalVerification()),
        same_seed=False,
    ),
    Variant(
        "traversal",
        lambda v: Method(small_model(v), BranchingTree((3, 2, 1)), TraversalVerification()),
        same_seed=False,
    ),
    Variant("trained_draft", lambda v: Method(trained_model(v), Chain(4), Rejection()), same_seed=False),
    Variant("fixed_argmax", lambda v: Method(good_model(v), FixedTree(_CHOICES), Match())),
    Variant(
        "fixed_sampled", lambda v: Method(good_model(v), FixedTree(_CHOICES, draw=True), Rejection()), same_seed=False
    ),
    Variant(
        "optimal_sampled",
        lambda v: Method(small_model(v), optimal_tree(8, _RATES, draw=True), Rejection()),
        same_seed=False,
    ),
    Variant("exit_chain", lambda v: Method(exits(v), Chain(4), Rejection()), same_seed=False),
    Variant("exit_blocks", lambda v: Method(exits(v, blocks=True), Chain(4), Rejection()), same_seed=False),
    Variant("exit_blocks_tree", lambda v: Method(exits(v, blocks=True), DynamicTree(3, 3, 7), Match())),
    Variant("exit_tree", lambda v: Method(exits(v), DynamicTree(3, 3, 7), Match())),
    Variant("pass_apart", lambda v: looking_ahead(v, 0), same_seed=False),
    Variant("pass_tree", lambda v: replace(looking_ahead(v, 2), tree=BranchingTree((2, 2))), same_seed=False),
    Variant("dynamic_match", lambda v: Method(good_model(v), DynamicTree(3, 3, 7), Match())),
    Variant("dynamic_rejection", lambda v: Method(good_model(v), DynamicTree(3, 3, 7), Rejection())),
    Variant("first_copy", lambda v: Method(PromptLookup(2, 1, 4, choice="first"), Trie(4), Match())),
    Variant(
        "typical_tree",
        lambda v: Method(small_model(v), BranchingTree((2, 2), draw=False), TypicalAcceptance()),
        lossless=False,
        same_seed=False,
    ),
)

DISTINCT = tuple(e for e in BUILT_IN if e.name != DEFAULT_METHOD)
"""The methods of the catalogue, without the one that chooses another."""
VARIANTS = tuple(_of_catalogue(e) for e in DISTINCT) + _BY_HAND
"""The catalogue's methods, then combinations that it does not contain."""
FAMILIES = (
    "autoregressive",
    "ngram",
    "sam_recycling",
    "lookahead",
    "phrases",
    "draft_model",
    "layer_skip",
    "specinfer",
    "dynamic_tree",
    "online",
    "medusa",
    "pass",
    "mlp_speculator",
    "eagle",
    "eagle3",
    "hybrid_model",
)
"""At least one method of every family."""
STATES = (
    "autoregressive", "ngram", "lookahead", "draft_model", "layer_skip", "online", "pass", "mlp_speculator", "eagle3",
    "hybrid_model",
)  # fmt: skip
"""One of the families of each thing that a drafter keeps."""
REPRESENTATIVES = {
    *FAMILIES, "rest", "universal_draft", "cascade", "masked_diffusion", "pard", "sparse_kv_draft", "triforce", "mtp",
    "dflash", "bild_lossy", "mixed", "exit_blocks_tree",
}  # fmt: skip
"""Methods that differ in what they keep between the steps. A test of the engine runs with these, and with all others
among the exhaustive tests; what every method must fulfil is in `test_general`.
"""


def methods_by_kind(
    methods: Sequence[Entry] | Sequence[Variant],
    others: pytest.MarkDecorator = pytest.mark.exhaustive,
    of: Collection[str] = REPRESENTATIVES,
) -> list[Any]:
    """Parameters of a test: the methods; those that are not in `of` have the mark `others`."""
    return [pytest.param(method, marks=() if method.name in of else others, id=method.name) for method in methods]


def random_tokens(count: int, vocab: int = VOCAB, seed: int = 0) -> list[int]:
    """Tokens sampled uniformly."""
    tokens: list[int] = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def run(engine: Engine, requests: Sequence[Request]) -> list[list[Update]]:
    """The updates of every request; all are submitted at once."""
    updates: dict[int, list[Update]] = {}
    engine.complete(requests, lambda update: updates.setdefault(update.request, []).append(update))
    return [updates[number] for number in sorted(updates)]


def statistics_of(updates: Sequence[Update]) -> RequestStatistics:
    """Statistics of a finished request."""
    assert updates[-1].statistics is not None
    return updates[-1].statistics


def tokens_of(updates: Sequence[Update]) -> list[int]:
    """All tokens of a request."""
    return [t for u in updates for t in u.tokens]


def engine_for(method: AnyMethod, rows: int = 3, chunk: int = 16, vocab: int = VOCAB) -> Engine:
    """An engine for the tiny target; tokens are letters."""
    return Engine(
        DecoderRunner(target(vocab)), method, rows=rows, chunk=chunk, detokenizer=lambda: Detokenizer(letters)
    )


def generate(
    method: AnyMethod, requests: Sequence[Request], rows: int = 3, chunk: int = 16, vocab: int = VOCAB
) -> list[list[int]]:
    """Tokens of every request from the tiny target."""
    return [tokens_of(u) for u in run(engine_for(method, rows, chunk, vocab), requests)]


class Interrupted(DecoderRunner):
    """A target that raises an error in the place of its next pass over several requests that decode, after drafts."""

    error: Exception | None = None
    failures = 0

    def forward(self, rows, tree, **more):  # type: ignore[no-untyped-def]
        if self.error is not None and len(rows) > 1 and tree.is_decode:
            error, self.error = self.error, None
            self.failures += 1
            raise error
        return super().forward(rows, tree, **more)


def interrupted(
    engine: Engine, asked: Sequence[Request], interrupt: Callable[[Engine, int], None]
) -> list[tuple[int, ...]]:
    """Texts of requests each of which is interrupted in turn, again and again, while it is answered."""
    numbers, texts, over = [engine.submit(r) for r in asked], defaultdict[int, list[int]](list), set[int]()
    steps = turns = 0
    while len(over) < len(numbers):
        for update in engine.step():
            assert update.error is None
            texts[update.request] += update.tokens
            over |= {update.request} if update.finish_reason else set()
        steps += 1
        begun = [n for n in numbers if texts[n] and n not in over]
        if begun and steps % 3 == 0:
            interrupt(engine, begun[turns % len(begun)])
            turns += 1
    return [tuple(texts[n]) for n in numbers]


def fail(engine: Engine, number: int) -> None:
    """The next pass raises; then each request gets one of its own."""
    assert isinstance(engine.runner, Interrupted)
    engine.runner.error = MemoryError()


def preempt(engine: Engine, number: int) -> None:
    """The next pass finds the cache full, and this request is the least urgent."""
    assert isinstance(engine.runner, Interrupted)
    for r in engine._scheduler.running:
        r.request = replace(r.request, priority=int(r.number == number))
    engine.runner.error = OutOfBlocksError(1)


def pause(engine: Engine, number: int) -> None:
    """This request waits, and the one that waited goes on; one that is alone does not wait."""
    for other in list(engine._scheduler.paused):
        engine.resume(other)
    if engine.load[0] > 1:
        engine.pause(number)


def letters(tokens: Sequence[int]) -> str:
    """One letter per token."""
    return "".join(chr(ord("a") + t) for t in tokens)


def chain_tree(tokens: Sequence[int]) -> TokenTree:
    """A tree of these tokens as prefix, without drafts."""
    return root_tree(tokens[-1:]).with_prefix([tokens])


def after_prompt(network: Network, context: Context, hidden_layers: Sequence[int]) -> StepResult:
    """A step in which the target has read all sequences up to their last tokens, which are new."""
    texts = [t.tokens.tolist() for t in context.sequences]
    tree = root_tree([t[-2] for t in texts]).with_prefix([t[:-1] for t in texts])
    output = DecoderRunner(network).forward(context.rows, tree, hidden_layers=hidden_layers)
    paths = tuple(tuple(range(len(t) - 1)) for t in texts)
    return StepResult(context, tree, output, paths, tuple((t[-1],) for t in texts), (0,) * len(texts))


def drafted_paths(shape: Shape[Any], drafter: Predictor, step: StepResult) -> list[set[tuple[int, ...]]]:
    """The tree of a shape for each request after that step: the tokens on the path to every node, the root's first."""
    drafter.observe(step)
    tree = shape.grow(drafter, step.context)
    return [
        {tuple(tree.token[i, tree.ancestors(i, node)].tolist()) for node in np.flatnonzero(tree.valid[i])[1:].tolist()}
        for i in range(tree.rows)
    ]


def all_logits(network: Network, tokens: Sequence[int]) -> np.ndarray:
    """Logits after every token of a sequence, in one pass without a cache."""
    output = DecoderRunner(network).forward([0], chain_tree(tokens))
    scores: np.ndarray = output.logits.double().numpy()
    return scores


@torch.no_grad()
def oracle_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The same with a model of transformers."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def process(logits: np.ndarray, text: Sequence[int], prompt: int, s: SamplingParams) -> Distribution:
    """Reference of the processed distribution: penalties, bias, temperature, top-k, top-p, min-p."""
    x = logits.astype(np.float64).copy()
    for token in set(text):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in text[prompt:]:
        x[token] -= s.frequency_penalty
    for token in set(text[prompt:]):
        x[token] -= s.presence_penalty
    for token, value in s.logit_bias.items():
        x[token] += value
    if s.temperature == 0:
        best: Distribution = np.eye(len(x))[x.argmax()]
        return best
    p: Distribution = np.exp((x - x.max()) / s.temperature)
    order = np.argsort(-p, kind="stable")
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    above = 0.0
    for token in order.tolist() if s.top_p < 1 else []:
        if above >= s.top_p:
            p[token] = 0
        above += p[token]
    p[p < s.min_p * p.max()] = 0
    p /= p.sum()
    return p


def gumbel_max(distribution: Distribution, key: int) -> int:
    """Reference of the choice of a token: the least noise over probability."""
    with np.errstate(divide="ignore"):
        return int((exponential_variates(key, np.arange(len(distribution))) / distribution).argmin())


class Phrases:
    """A constraint whose state is the number of tokens read, up to 11: two of every four tokens are forced."""

    def start(self) -> int:
        """No token."""
        return 0

    def _allowed(self, state: int) -> set[int]:
        return ({3, 5, 8, 13, 21}, {7}, {12}, set(range(0, VOCAB, 2)))[state % 4]

    def advance(self, state: int, token: int) -> int | None:
        """One token more."""
        return state + 1 if token in self._allowed(state) and state < 11 else None

    def mask(self, state: int) -> np.ndarray:
        """The allowed tokens."""
        return np.packbits([token in self._allowed(state) for token in range(VOCAB)], bitorder="little")

    def forced(self, state: int) -> tuple[tuple[int, ...], ...]:
        """The tokens up to the next choice, and different ones behind it, which verification tells apart."""
        return ((), ((7, 12, 2), (7, 12, 4, 8)), ((12, 2),), ())[state % 4]

    def is_final(self, state: int) -> bool:
        """After eleven tokens."""
        return state == 11


class Choice:
    """A constraint to one of some texts. `final`: a text is complete where no longer one begins with it; else nothing
    may follow it, and nothing says so.
    """

    def __init__(self, texts: Sequence[Sequence[int]], eos: Sequence[int], final: bool = True) -> None:
        self._texts, self._eos, self._final = {tuple(t) for t in texts}, eos, final

    def start(self) -> tuple[int, ...]:
        """No token."""
        return ()

    def _following(self, state: tuple[int, ...]) -> set[int]:
        return {t[len(state)] for t in self._texts if len(t) > len(state) and t[: len(state)] == state}

    def _allowed(self, state: tuple[int, ...]) -> set[int]:
        return self._following(state) | (set(self._eos) if self._final and state in self._texts else set())

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...] | None:
        """One token more."""
        return (*state, token) if token in self._allowed(state) else None

    def mask(self, state: tuple[int, ...]) -> np.ndarray:
        """The allowed tokens."""
        return np.packbits([token in self._allowed(state) for token in range(VOCAB)], bitorder="little")

    def forced(self, state: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The rest of the text, if there is one alone."""
        rest = [t[len(state) :] for t in self._texts if len(t) > len(state) and t[: len(state)] == state]
        return (rest[0],) if len(rest) == 1 else ()

    def is_final(self, state: tuple[int, ...]) -> bool:
        """At the end of a text."""
        return self._final and state in self._texts and not self._following(state)


@cache
def _naive_texts(network: Decoder) -> dict[str, tuple[Request, list[int]]]:
    return {}


def naive(network: Decoder, request: Request) -> list[int]:
    """Reference decoding without cache, batch, tree or engine: one pass over the whole sequence per token; the text of
    a request that many tests compare with is computed once.
    """
    texts, key = _naive_texts(network), repr(request)
    if key not in texts:
        # The request is kept, so that no other constraint gets the address of its own.
        texts[key] = request, _naive_text(network, request)
    return list(texts[key][1])


def _naive_text(network: Decoder, request: Request) -> list[int]:
    sampling, prompt = request.sampling_params, len(request.prompt)
    tokens, rng, least = list(request.prompt), CounterRNG(sampling.seed), sampling.min_tokens
    for position in range(prompt, prompt + request.max_new_tokens):
        logits = all_logits(network, tokens)[-1].astype(np.float64)
        logits[[not may_follow(request, [*tokens[prompt:], t]) for t in range(len(logits))]] = -np.inf
        distribution = process(logits, tokens, prompt, sampling)
        tokens.append(gumbel_max(distribution, rng.key(position)))
        stopped = any(s in letters(tokens[prompt + least :]) for s in request.stop)
        if tokens[-1] in endings(request) or stopped or is_complete(request, tokens[prompt:]):
            break
    return tokens[prompt:]


def endings(request: Request) -> set[int]:
    """Tokens that end an answer."""
    return {*request.stop_token_ids, *(() if request.ignore_eos else request.eos)}


def may_follow(request: Request, answer: list[int]) -> bool:
    """Whether the rules of a request allow the last token of an answer."""
    sampling, n = request.sampling_params, len(answer)
    inside = sampling.allowed_token_ids is None or answer[-1] in sampling.allowed_token_ids
    bad = any(tuple(answer[max(0, n - len(word)) :]) == tuple(word) for word in sampling.bad_words)
    early = n <= sampling.min_tokens and answer[-1] in endings(request)
    return inside and not bad and not early and (request.constraint is None or _states(request, answer) is not None)


def is_complete(request: Request, answer: list[int]) -> bool:
    """Whether the constraint of a request ends the answer."""
    return request.constraint is not None and request.constraint.is_final(_states(request, answer))


def _states(request: Request, answer: list[int]) -> Any:
    assert request.constraint is not None
    state = request.constraint.start()
    for token in answer:
        state = None if state is None else request.constraint.advance(state, token)
    return state


def exact_distribution(network: Decoder, prompt: Sequence[int], length: int, sampling: SamplingParams) -> Distribution:
    """Probability of every continuation of `length` tokens, in lexical order."""

    def grow(text: list[int], chance: float) -> list[float]:
        if len(text) == len(prompt) + length:
            return [chance]
        logits, answer = all_logits(network, text)[-1].astype(np.float64), text[len(prompt) :]
        ruled = Request(prompt, sampling)
        logits[[not may_follow(ruled, [*answer, token]) for token in range(len(logits))]] = -np.inf
        distribution = process(logits, text, len(prompt), sampling)
        return [c for token, p in enumerate(distribution.tolist()) for c in grow([*text, token], chance * p)]

    return np.array(grow(list(prompt), 1.0))


def p_value(counts: np.ndarray, distribution: Distribution) -> float:
    """p-value of Pearson's chi-squared test, rare outcomes merged; 0 if an outcome of probability 0 was counted.

    Raises:
        ValueError: all outcomes but one are rare, so that the test could not fail.
    """
    if counts[distribution == 0].any():
        return 0.0
    expected = distribution * counts.sum()
    common = expected >= 5
    found, wanted = counts[common], expected[common]
    rare = expected[~common].sum()
    if rare >= 5 or not common.any():
        found, wanted = np.append(found, counts[~common].sum()), np.append(wanted, rare)
    else:  # Even together they are too rare for the test's approximation.
        least = wanted.argmin()
        found[least] += counts[~common].sum()
        wanted[least] += rare
    if len(found) < 2:
        raise ValueError("all outcomes but one are rare: take more samples, or a higher temperature")
    return float(chisquare(found, wanted).pvalue)


@contextmanager
def unchecked() -> Iterator[None]:
    """No run-time type checks, which are slow: for tests with thousands of requests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def context_of(
    *texts: Sequence[int], sampling: SamplingParams | None = None, max_depth: int = 99, prompt: int = 0
) -> Context:
    """The context of these sequences; their first `prompt` tokens are the prompt (0: all)."""
    whole = [TokenBuffer(t[: prompt or len(t)]) for t in texts]
    for text, tokens in zip(whole, texts, strict=True):
        text.append(tokens[text.length :])
    parameters = sampling or SamplingParams()
    return Context(
        rows=tuple(range(len(texts))),
        sequences=tuple(whole),
        sampling_params=(parameters,) * len(texts),
        rngs=tuple(CounterRNG(parameters.seed + i) for i in range(len(texts))),
        max_depth=np.full(len(texts), max_depth),
    )
