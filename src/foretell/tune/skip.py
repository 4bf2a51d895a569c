"""The search for the sub-layers that a self-drafting target leaves out (Draft & Verify, arXiv 2309.08168)."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from foretell.accept import Match
from foretell.catalogue.options import SelfSpeculativeOptions
from foretell.core.tree import root_tree
from foretell.draft import DraftModel, NoDrafter
from foretell.engine.engine import Engine, Request
from foretell.engine.method import AnyMethod, Method
from foretell.model.decoder import SkipSet
from foretell.model.influence import measure_influence
from foretell.model.network import Network
from foretell.model.runner import DecoderRunner
from foretell.model.skip import SkipFile, SkipTrial, default_skip, kept_weight_share
from foretell.shape import Chain, RootOnly

if TYPE_CHECKING:
    import optuna

Objective = Literal["counts", "time"]


@dataclass(frozen=True)
class Drafting:
    """How far a draft goes: `length` tokens, or up to one that the drafter gives less than `confidence`."""

    length: int = SelfSpeculativeOptions().num_speculative_tokens
    confidence: float = SelfSpeculativeOptions().confidence_threshold


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's own greedy answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """What decoding a workload would take: passes of the target and of the draft, tokens decided."""

    passes: int
    drafted: int
    tokens: int

    def speedup(self, share: float) -> float:
        """Gain over plain decoding where a pass costs the weights it reads and the draft reads `share` of them."""
        return self.tokens / (self.passes + self.drafted * share)


def answers(
    network: Network, prompts: Sequence[Sequence[int]], new_tokens: int, eos: tuple[int, ...] = ()
) -> list[Sample]:
    """The target's greedy answers.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to tune on: give at least one")
    written, _ = _decode(network, Method(NoDrafter(), RootOnly(), Match()), prompts, new_tokens, eos)
    return [Sample(tuple(p), tuple(a)) for p, a in zip(prompts, written, strict=True)]


def _decode(
    network: Network, method: AnyMethod, prompts: Sequence[Sequence[int]], new_tokens: int, eos: tuple[int, ...]
) -> tuple[list[list[int]], float]:
    """Greedy answers, and the seconds they took."""
    engine = Engine(DecoderRunner(network), method, rows=1)
    start = time.perf_counter()
    found = engine.complete([Request(p, max_new_tokens=new_tokens, eos=eos) for p in prompts])
    return [list(c.tokens) for c in found], time.perf_counter() - start


def count(network: Network, skip: SkipSet, samples: Sequence[Sample], drafting: Drafting) -> Counts:
    """Passes that drafting with `skip` would take, from one pass of the draft over each known answer.

    Deterministic and much quicker than decoding: where the draft is right it has read the very text that it would read.
    Only how far it goes on after a mistake is estimated, by its confidence on the true text.
    """
    draft = network.without_sublayers(skip)
    total = Counts(0, 0, 0)
    for sample in samples:
        best, sure = _guesses(draft, sample)
        one = _replay(np.array(sample.answer), best, sure, drafting)
        total = Counts(total.passes + one.passes, total.drafted + one.drafted, total.tokens + one.tokens)
    return total


@torch.inference_mode()
def _guesses(draft: Network, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """The draft's best token for every place of the answer, given the true text before it, and the probability it gives
    it.
    """
    text = [*sample.prompt, *sample.answer[:-1]]
    tree = root_tree(text[-1:]).with_prefix([text])
    scored = np.zeros(tree.token.shape, bool)
    scored[0, len(sample.prompt) - 1 :] = True
    logits = DecoderRunner(draft).forward([0], tree, scored=scored).logits
    top = torch.softmax(logits, -1).max(-1)
    return top.indices.cpu().numpy(), top.values.double().cpu().numpy()


def _replay(answer: np.ndarray, best: np.ndarray, sure: np.ndarray, drafting: Drafting) -> Counts:
    """Count the rounds; the pass that reads the prompt's end verifies drafts like any other."""
    done, passes, drafted = 0, 0, 0
    while done < len(answer):
        most = min(drafting.length, len(answer) - done - 1)
        unsure = np.flatnonzero(sure[done : done + most] < drafting.confidence)
        asked = int(unsure[0]) + 1 if len(unsure) else most
        wrong = np.flatnonzero(best[done : done + asked] != answer[done : done + asked])
        done += (int(wrong[0]) if len(wrong) else asked) + 1
        passes, drafted = passes + 1, drafted + asked
    return Counts(passes, drafted, len(answer))


def tokens_per_second(network: Network, skip: SkipSet, samples: Sequence[Sample], drafting: Drafting) -> float:
    """Measured speed of decoding the samples: noisy, so trust differences of several percent only."""
    shape = Chain(drafting.length, draw=False, confidence=drafting.confidence)
    method = Method(DraftModel(DecoderRunner(network.without_sublayers(skip))), shape, Match())
    most = max(len(s.answer) for s in samples)
    written, seconds = _decode(network, method, [s.prompt for s in samples], most, ())
    return sum(map(len, written)) / seconds


def tune_skip(
    network: Network,
    model: str,
    samples: Sequence[Sample],
    out: Path,
    trials: int = 100,
    objective: Objective = "counts",
    drafting: Drafting = Drafting(),
    seed: int = 0,
    told: Callable[[SkipTrial], None] = lambda trial: None,
) -> SkipFile:
    """Search until `out` holds `trials` trials, going on where an earlier search stopped; every trial is saved at once.

    `model` is the fingerprint of the network (`Checkpoint.fingerprint`).

    Starts from the default and the least influential sub-layers, then follows a tree-structured Parzen estimator.

    Raises:
        ValueError: optuna is missing, or `out` holds a search on another model, other prompts or another objective.
    """
    layers = network.config.layers
    found = _resume(model, layers, samples, out, objective, drafting)
    study = _study(found, layers, seed)
    for skip in _starts(network, samples):
        if skip not in [t.skip_set for t in found.trials]:
            study.enqueue_trial(_params(skip, layers))
    while len(found.trials) < trials:
        trial = study.ask(_space(layers))
        skip = _skip(trial.params, layers)
        if objective == "counts":
            value = count(network, skip, samples, drafting).speedup(kept_weight_share(network.config, skip))
        else:
            value = tokens_per_second(network, skip, samples, drafting)
        study.tell(trial, value)
        found = found.add(SkipTrial.from_skip_set(skip, value))
        found.save(out)
        told(found.trials[-1])
    return found


def _resume(
    model: str, layers: int, samples: Sequence[Sample], out: Path, objective: Objective, drafting: Drafting
) -> SkipFile:
    workload = hashlib.sha256(repr((tuple(samples), drafting)).encode()).hexdigest()[:16]
    fresh = SkipFile(model, layers, objective, workload)
    if not out.exists():
        return fresh
    found = SkipFile.read(out, model, layers)
    if (found.objective, found.workload) != (objective, workload):
        raise ValueError(
            f"{out}: holds a search for {found.objective} on other prompts or settings, whose values do not compare "
            f"with this one "
            f"({objective}); name another --out, or delete the file"
        )
    return found


def _starts(network: Network, samples: Sequence[Sample]) -> list[SkipSet]:
    """Points worth probing first."""
    layers = network.config.layers
    measured = measure_influence(network, [*samples[0].prompt, *samples[0].answer])
    counts = sorted({max(1, 2 * layers * part // 20) for part in range(1, 11)})
    return [default_skip(layers), *(measured.least_influential_sublayers(n) for n in counts)]


def _study(found: SkipFile, layers: int, seed: int) -> "optuna.Study":
    """A study that knows the trials made so far."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError("tuning needs optuna; run: pip install 'foretell[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + len(found.trials)))
    for trial in found.trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=_params(trial.skip_set, layers), distributions=_space(layers), value=trial.value
            )
        )
    return study


def _space(layers: int) -> "dict[str, optuna.distributions.BaseDistribution]":
    import optuna

    yes_no = optuna.distributions.CategoricalDistribution((False, True))
    return {f"{part}.{i}": yes_no for part in ("attention", "mlp") for i in range(layers)}


def _params(skip: SkipSet, layers: int) -> dict[str, bool]:
    return {f"attention.{i}": i in skip.attention for i in range(layers)} | {
        f"mlp.{i}": i in skip.mlp for i in range(layers)
    }


def _skip(params: Mapping[str, bool], layers: int) -> SkipSet:
    chosen = (frozenset(i for i in range(layers) if params[f"{part}.{i}"]) for part in ("attention", "mlp"))
    return SkipSet(*chosen)
