"""Search for the sub-layers that self-speculative decoding skips (Draft & Verify, arXiv 2309.08168)."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from foretell.accept import Match
from foretell.catalogue.options.self_drafting import SelfSpeculativeOptions
from foretell.core.tree import root_tree
from foretell.draft import DraftModel, NoDrafter
from foretell.engine.engine import Engine
from foretell.engine.method import AnyMethod, Method
from foretell.engine.request import Request
from foretell.model.block.decoder import SkipSet
from foretell.model.offload.influence import measure_influence
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.skip import SkipFile, SkipTrial, default_skip, kept_weight_share
from foretell.shape import Chain, RootOnly

if TYPE_CHECKING:
    import optuna

Objective = Literal["counts", "time"]


@dataclass(frozen=True)
class DraftingOptions:
    """When a draft ends: after `length` tokens, or after a token with a probability below `confidence`."""

    length: int = SelfSpeculativeOptions().num_speculative_tokens
    confidence: float = SelfSpeculativeOptions().confidence_threshold


@dataclass(frozen=True)
class GreedyAnswer:
    """A prompt and the target's own greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class PassCounts:
    """Passes of the target, draft tokens and new tokens of decoding a workload."""

    passes: int
    drafted: int
    tokens: int

    def speedup(self, share: float) -> float:
        """Speed-up over plain decoding if a pass costs the weights it reads, and the draft reads a `share` of them."""
        return self.tokens / (self.passes + self.drafted * share)


def greedy_answers(
    network: Network, prompts: Sequence[Sequence[int]], new_tokens: int, eos: tuple[int, ...] = ()
) -> list[GreedyAnswer]:
    """The target's greedy answers.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to tune on: give at least one")
    answers, _ = _decode(network, Method(NoDrafter(), RootOnly(), Match()), prompts, new_tokens, eos)
    return [GreedyAnswer(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)]


def _decode(
    network: Network, method: AnyMethod, prompts: Sequence[Sequence[int]], new_tokens: int, eos: tuple[int, ...]
) -> tuple[list[list[int]], float]:
    """Greedy answers, and the seconds they took."""
    engine = Engine(DecoderRunner(network), method, rows=1)
    start = time.perf_counter()
    completions = engine.complete([Request(p, max_new_tokens=new_tokens, eos=eos) for p in prompts])
    return [list(c.tokens) for c in completions], time.perf_counter() - start


def count_passes(
    network: Network, skip: SkipSet, samples: Sequence[GreedyAnswer], drafting: DraftingOptions
) -> PassCounts:
    """Passes of decoding with `skip`, from one pass of the draft over each known answer.

    Deterministic and faster than decoding. Exact as long as the draft is right; the length of a draft after a wrong
    token is estimated from the confidences on the true answer.
    """
    draft = network.without_sublayers(skip)
    total = PassCounts(0, 0, 0)
    for sample in samples:
        predicted, probability = _draft_predictions(draft, sample)
        one = _count_rounds(np.array(sample.answer), predicted, probability, drafting)
        total = PassCounts(total.passes + one.passes, total.drafted + one.drafted, total.tokens + one.tokens)
    return total


@torch.inference_mode()
def _draft_predictions(draft: Network, sample: GreedyAnswer) -> tuple[np.ndarray, np.ndarray]:
    """The draft's most probable token at every position of the answer, given the true tokens before it, and its
    probability.
    """
    text = [*sample.prompt, *sample.answer[:-1]]
    tree = root_tree(text[-1:]).with_prefix([text])
    scored = np.zeros(tree.token.shape, bool)
    scored[0, len(sample.prompt) - 1 :] = True
    logits = DecoderRunner(draft).forward([0], tree, scored=scored).logits
    top = torch.softmax(logits, -1).max(-1)
    return top.indices.cpu().numpy(), top.values.double().cpu().numpy()


def _count_rounds(
    answer: np.ndarray, predicted: np.ndarray, probability: np.ndarray, drafting: DraftingOptions
) -> PassCounts:
    """Simulate the steps of decoding an answer; the first step reads the prompt and verifies drafts like any other."""
    done, passes, drafted = 0, 0, 0
    while done < len(answer):
        length = min(drafting.length, len(answer) - done - 1)
        unsure = np.flatnonzero(probability[done : done + length] < drafting.confidence)
        num_drafted = int(unsure[0]) + 1 if len(unsure) else length
        wrong = np.flatnonzero(predicted[done : done + num_drafted] != answer[done : done + num_drafted])
        done += (int(wrong[0]) if len(wrong) else num_drafted) + 1
        passes, drafted = passes + 1, drafted + num_drafted
    return PassCounts(passes, drafted, len(answer))


def tokens_per_second(
    network: Network, skip: SkipSet, samples: Sequence[GreedyAnswer], drafting: DraftingOptions
) -> float:
    """Measured speed of decoding the samples; differences of a few percent are noise."""
    shape = Chain(drafting.length, draw=False, confidence=drafting.confidence)
    method = Method(DraftModel(DecoderRunner(network.without_sublayers(skip))), shape, Match())
    new_tokens = max(len(s.answer) for s in samples)
    answers, seconds = _decode(network, method, [s.prompt for s in samples], new_tokens, ())
    return sum(map(len, answers)) / seconds


def tune_skip(
    network: Network,
    model: str,
    samples: Sequence[GreedyAnswer],
    out: Path,
    trials: int = 100,
    objective: Objective = "counts",
    drafting: DraftingOptions = DraftingOptions(),
    seed: int = 0,
    on_trial: Callable[[SkipTrial], None] = lambda trial: None,
) -> SkipFile:
    """Search until `out` holds `trials` trials; an earlier search is continued, and every trial is saved.

    `model`: fingerprint of the network (`Checkpoint.fingerprint`). The first trials are the default skip set and the
    least influential sub-layers; later ones come from a tree-structured Parzen estimator.

    Raises:
        ValueError: optuna is missing, or `out` holds a search on another model, other prompts or another objective.
    """
    layers = network.config.layers
    skip_file = _load_or_create(model, layers, samples, out, objective, drafting)
    study = _create_study(skip_file, layers, seed)
    for skip in _initial_skips(network, samples):
        if skip not in [t.skip_set for t in skip_file.trials]:
            study.enqueue_trial(_params(skip, layers))
    while len(skip_file.trials) < trials:
        trial = study.ask(_search_space(layers))
        skip = _skip_from_params(trial.params, layers)
        if objective == "counts":
            value = count_passes(network, skip, samples, drafting).speedup(kept_weight_share(network.config, skip))
        else:
            value = tokens_per_second(network, skip, samples, drafting)
        study.tell(trial, value)
        skip_file = skip_file.add(SkipTrial.from_skip_set(skip, value))
        skip_file.save(out)
        on_trial(skip_file.trials[-1])
    return skip_file


def _load_or_create(
    model: str, layers: int, samples: Sequence[GreedyAnswer], out: Path, objective: Objective, drafting: DraftingOptions
) -> SkipFile:
    workload = hashlib.sha256(repr((tuple(samples), drafting)).encode()).hexdigest()[:16]
    fresh = SkipFile(model, layers, objective, workload)
    if not out.exists():
        return fresh
    skip_file = SkipFile.read(out, model, layers)
    if (skip_file.objective, skip_file.workload) != (objective, workload):
        raise ValueError(
            f"{out}: holds a search for {skip_file.objective} on other prompts or settings, whose values do not "
            f"compare with this one ({objective}); name another --out, or delete the file"
        )
    return skip_file


def _initial_skips(network: Network, samples: Sequence[GreedyAnswer]) -> list[SkipSet]:
    """Skip sets of the first trials."""
    layers = network.config.layers
    measured = measure_influence(network, [*samples[0].prompt, *samples[0].answer])
    counts = sorted({max(1, 2 * layers * part // 20) for part in range(1, 11)})
    return [default_skip(layers), *(measured.least_influential_sublayers(n) for n in counts)]


def _create_study(skip_file: SkipFile, layers: int, seed: int) -> "optuna.Study":
    """A study with the finished trials."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError("tuning needs optuna; run: pip install 'foretell[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + len(skip_file.trials))
    )
    for trial in skip_file.trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=_params(trial.skip_set, layers), distributions=_search_space(layers), value=trial.value
            )
        )
    return study


def _search_space(layers: int) -> "dict[str, optuna.distributions.BaseDistribution]":
    import optuna

    yes_no = optuna.distributions.CategoricalDistribution((False, True))
    return {f"{part}.{i}": yes_no for part in ("attention", "mlp") for i in range(layers)}


def _params(skip: SkipSet, layers: int) -> dict[str, bool]:
    return {f"attention.{i}": i in skip.attention for i in range(layers)} | {
        f"mlp.{i}": i in skip.mlp for i in range(layers)
    }


def _skip_from_params(params: Mapping[str, bool], layers: int) -> SkipSet:
    chosen = (frozenset(i for i in range(layers) if params[f"{part}.{i}"]) for part in ("attention", "mlp"))
    return SkipSet(*chosen)
