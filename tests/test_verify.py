"""The checks pass lossless methods, and fail broken ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.accept import Acceptor, AcceptResult, Match, Rejection, TypicalAcceptance
from foretell.api import Model
from foretell.core.context import ModelOutput
from foretell.core.sampling import Stream
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions
from foretell.draft import DraftModel, PromptLookup
from foretell.engine.method import AnyMethod, Method
from foretell.model.block.decoder import Decoder
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.shape import Chain, Trie
from foretell.testing import TINY, tiny_decoder
from foretell.tokenizer.codec import TextCodec
from foretell.verify import Verifier, VerifySettings, buildable_methods, verify
from foretell.verify.batch_invariance import compare_sampled
from foretell.verify.classifier import DivergenceClassifier, first_difference
from foretell.verify.distribution import (
    ALPHA,
    detectable_effect,
    enumerate_continuations,
    pearson_statistic,
    pool_cells,
    power,
)
from helpers import unchecked

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SETTINGS = VerifySettings(prompts=("abcabcab", "one two one", "z"), max_new_tokens=14, samples=700)


def decoder(seed: int = 0, layers: int = 2, sharpness: float = 0.5) -> Decoder:
    return tiny_decoder(replace(TINY, vocab=len(LETTERS), layers=layers, tied=False), seed, sharpness=sharpness)


def tiny_model(precision: str = "float32") -> Model:
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    network = decoder()
    return Model("tiny", network.config, TextCodec(tokenizer), network, precision, ())


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier(tiny_model(), SETTINGS)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Other tests check the types of the same calls."""
    with unchecked():
        yield


class Biased(Acceptor):
    """Claims to be lossless, and accepts a share of the drafts that it should reject."""

    lossless = True
    same_seed = False

    def __init__(self, share: float) -> None:
        self._share = share

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        correct = Rejection().accept(tree, row, distributions)
        children, root = tree.children(row), int(tree.prefix_length[row]) - 1
        if (
            correct.path
            or root not in children
            or distributions.uniform(row, root, Stream.ACCEPT, 98) >= self._share
            or distributions.sampling_params(row).temperature == 0
        ):
            return correct
        child = children[root][0]
        return AcceptResult((child,), distributions.sample(row, child))


class SecondChoice(Acceptor):
    """Claims to be lossless, and accepts the target's second choice."""

    lossless = True
    same_seed = True

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        correct = Match().accept(tree, row, distributions)
        if distributions.uniform(row, int(tree.prefix_length[row]) - 1, Stream.ACCEPT, 98) < 0.1:
            return AcceptResult(
                correct.path,
                int(
                    distributions.confidence(row, (correct.path or (int(tree.prefix_length[row]) - 1,))[-1])
                    .topk(2)
                    .indices[1]
                ),
            )
        return correct


class FirstRowDecides(Acceptor):
    """Claims to be lossless, and gives every row the token of the first row."""

    lossless = True
    same_seed = True

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        return (
            AcceptResult((), distributions.sample(0, int(tree.prefix_length[0]) - 1))
            if row
            else Match().accept(tree, row, distributions)
        )


def drafted(accept: Acceptor) -> Callable[[], AnyMethod]:
    return lambda: Method(DraftModel(DecoderRunner(decoder(seed=4, layers=1))), Chain(3), accept)


def test_lossless_methods_pass(verifier: Verifier) -> None:
    for make in (drafted(Rejection()), lambda: Method(PromptLookup(3), Trie(6), Match())):
        report = verifier.check(make)
        assert report.passed and report.lossless
        assert not report.greedy_equality.divergences and not report.batch_invariance.divergences
        assert report.distribution.rounding_variation < 1e-9 and report.distribution.p_value > ALPHA
        assert report.greedy_equality.tokens == 3 * 14


def test_a_biased_acceptor_fails_the_distribution_test(verifier: Verifier) -> None:
    report = verifier.check(drafted(Biased(0.5)))
    assert report.greedy_equality.passed and not report.distribution.passed and not report.passed
    assert report.distribution.total_variation > 2 * report.distribution.expected_total_variation


@pytest.mark.exhaustive
def test_a_lossy_acceptor_fails_the_distribution_test(verifier: Verifier) -> None:
    report = verifier.check(drafted(TypicalAcceptance(0.02)))
    assert not report.lossless and not report.distribution.passed
    assert report.distribution.total_variation > 2 * report.distribution.expected_total_variation


def test_an_acceptor_of_second_choices_fails_the_greedy_comparison() -> None:
    report = Verifier(tiny_model(), replace(SETTINGS, samples=50)).check(drafted(SecondChoice()))
    assert not report.greedy_equality.passed
    worst = report.greedy_equality.divergences[0]
    assert worst.verdict == "bug" and worst.margin > worst.noise and worst.expected != worst.actual


def test_dependence_on_the_batch_fails() -> None:
    report = Verifier(tiny_model(), replace(SETTINGS, samples=50)).check(drafted(FirstRowDecides()))
    assert report.greedy_equality.passed and not report.batch_invariance.passed


def test_a_tie_is_distinguished_from_a_bug() -> None:
    class Noisy(DecoderRunner):
        """Rounds scores as if their precision were lower, and differently for every number of tokens read."""

        def forward(self, *args: object, **kwargs: object) -> ModelOutput:
            out = super().forward(*args, **kwargs)  # type: ignore[arg-type]
            noise = torch.randn(
                out.logits.shape, generator=torch.Generator().manual_seed(len(out.logits)), dtype=out.logits.dtype
            )
            return replace(out, logits=out.logits + 0.01 * noise)

    runner = Noisy(decoder())
    classifier = DivergenceClassifier(runner, "bfloat16", str)
    prompt = list(range(20))
    best, second, *_, last = classifier.logits_both_ways(prompt)[0][-1].topk(len(LETTERS)).indices.tolist()
    close = classifier.classify(2, prompt, [best, 1], [best, 1])
    far = classifier.classify(2, prompt, [best, 1], [last, 1])
    ended = classifier.classify(2, prompt, [best, 1], [best])
    assert close is None
    assert (
        far is not None
        and far.verdict == "bug"
        and (far.prompt, far.position, far.actual) == (2, 0, last)
        and far.noise > 0.005
    )
    assert ended is not None and ended.verdict == "bug" and ended.actual is None and ended.position == 1
    near = classifier.classify(0, prompt, [best], [second])
    assert near is not None and near.verdict == ("tie" if near.margin <= 2 * near.noise else "bug")
    strict = DivergenceClassifier(runner, "float32", str).classify(0, prompt, [best], [best + 1])
    assert strict is not None and strict.verdict == "bug", "float32 does not explain noise of 0.01"


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_the_exact_distribution_sums_to_one() -> None:
    distribution = enumerate_continuations(DecoderRunner(decoder()), [3, 1, 2], single_pass=False)
    assert len(distribution) == 27 and sum(distribution.values()) == pytest.approx(1)
    again = enumerate_continuations(DecoderRunner(decoder()), [3, 1, 2], single_pass=True)
    assert all(again[path] == pytest.approx(p) for path, p in distribution.items())


def test_power_is_what_simulation_finds() -> None:
    generator, cells, samples, effect = np.random.default_rng(0), 8, 2000, 0.06
    distribution = np.full(cells, 1 / cells)
    other = distribution + effect / cells * np.where(np.arange(cells) % 2, 2, -2)
    assert np.abs(other - distribution).sum() / 2 == pytest.approx(effect)
    expected = distribution * samples
    statistics = [
        pearson_statistic(generator.multinomial(samples, other).astype(float), expected, pool_cells(expected), 0)[0]
        for _ in range(2000)
    ]
    from scipy.stats import chi2

    seen = float(np.mean(np.array(statistics) > chi2.isf(ALPHA, cells - 1)))
    assert power(effect, samples, cells - 1, 0.0) == pytest.approx(seen, abs=0.04)
    assert power(detectable_effect(samples, cells - 1, 0.0), samples, cells - 1, 0.0) == pytest.approx(0.9, abs=1e-6)


def test_rare_outcomes_are_pooled() -> None:
    assert sorted(np.bincount(pool_cells(np.array([100.0, 1, 3, 50, 2])), [100.0, 1, 3, 50, 2])) == [6, 50, 100]
    assert sorted(np.bincount(pool_cells(np.array([100.0, 1, 50])), [100.0, 1, 50])) == [51, 100]
    assert len(set(pool_cells(np.array([9.0, 8, 7])).tolist())) == 3


def test_rounding_explains_few_differences() -> None:
    alone = [(1, 2, 3)] * 20
    assert compare_sampled(alone, alone, 0.0) == (0, 1.0)
    assert compare_sampled(alone, [(1, 2, 4), *alone[1:]], 0.0) == (1, 0.0)
    differ, chance = compare_sampled(alone, [(1, 2, 4), *alone[1:]], 0.01)
    assert differ == 1 and chance > 0.5
    assert compare_sampled(alone, [(0,)] * 20, 0.01)[1] < ALPHA


def test_buildable_methods() -> None:
    model = tiny_model()
    names = buildable_methods(model)
    assert "suffix" in names and "layer_skip" in names and "draft_model" not in names and "llma" not in names
    assert "draft_model" in buildable_methods(model, [model]) and "llma" in buildable_methods(
        model, references=["text"]
    )


def test_verify_by_name_and_wrong_settings() -> None:
    (report,) = verify(tiny_model(), ["pld"], replace(SETTINGS, samples=200, prompts=("abab",)))
    assert report.method == "ngram" and report.passed
    with pytest.raises(ValueError, match="at least one prompt"):
        VerifySettings(prompts=())
    with pytest.raises(ValueError, match="samples must be at least 1"):
        VerifySettings(samples=0)
    with pytest.raises(ValueError, match="did you mean 'suffix'"):
        verify(tiny_model(), ["sufix"])
