"""Chooses exits and thresholds that change no more than a bound allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float

from foretell.api import Model
from foretell.catalogue.exits import packed_exits
from foretell.core.tree import root_tree
from foretell.draft.exit_blocks import ExitBlocks
from foretell.draft.exit_heads import Confidence, ExitRule, TrainedExits, measure_confidence
from foretell.model.run.decoder_runner import DecoderRunner
from foretell.model.run.network import Network
from foretell.model.run.partial_pass import NodeStates
from foretell.model.run.topk import argmax
from foretell.speculator.exit_calibration import ExitCalibration, exits_digest
from foretell.speculator.network.exits import Exits
from foretell.train.data.dataset import Dataset, Document
from foretell.train.exits.risk import betting_p_value, count_accepted, smallest_bound
from foretell.train.exits.states import texts_to_learn
from foretell.utils.options import Option

Loss = Literal["tokens", "answers"]
"""Loss of an answer: the share of its tokens that an exit would have changed, or 1 if any would have been."""
LEVELS = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, 0.9, 0.87, 0.84, 0.8, 0.75, 0.7, 0.6, 0.5)
"""Estimated probabilities of agreement that thresholds are set for, the most cautious first."""
_MIN_ANSWERS = 20
"""Fewest answers of each quarter."""
_CHUNK = 1024


@dataclass(frozen=True)
class CalibrationSettings:
    """How exits are calibrated."""

    disagreement: Annotated[float, Option("Most tokens (or answers) that may change, as a share.", "D")] = 0.05
    confidence: Annotated[float, Option("Probability that this bound holds.", "P")] = 0.95
    measure: Annotated[
        Confidence,
        Option("Confidence of an exit: softmax margin, similarity of states, or the trained classifier."),
    ] = "softmax"
    loss: Annotated[Loss, Option("What is bounded: changed tokens, or answers with any change.", name="--of")] = (
        "tokens"
    )
    decay: Annotated[
        float,
        Option("Thresholds l fall over the answer, to 0.9 l + 0.1 exp(-DECAY t / 256).", least=0),
    ] = 0.0
    horizon: int = 256
    longest: Annotated[int, Option("Tokens of an answer that count.", least=2)] = 256
    most_exits: int = 3
    """Exits that are used together, at most."""
    head_cost: float = 1.0
    """Layers that a test of an exit costs."""

    def __post_init__(self) -> None:
        for name in ("disagreement", "confidence"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ValueError(f"--{name} {value:g}: a share between 0 and 1, both excluded, was expected")


@dataclass(frozen=True)
class AnswerExits:
    """What the exits of one answer of the model do at its `t` tokens."""

    confidence: Float[np.ndarray, "e t"]
    agrees: Bool[np.ndarray, "e t"]


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration, and how its thresholds do on answers that neither chose nor tested them."""

    calibration: ExitCalibration
    check_loss: float
    check_depth: float
    check_answers: int
    curve: tuple[tuple[float, float, float], ...]
    """Of the chosen exits per level of `LEVELS`: the level, the mean loss of the tested answers, and the mean share of
    the layers that run.
    """


def calibrate(
    model: Model,
    exits: Exits,
    data: Dataset,
    settings: CalibrationSettings,
    on_progress: Callable[[str], None] = lambda _: None,
) -> CalibrationResult:
    """Choose exits and thresholds on a quarter of the answers, test them on half, and check them on the last quarter.

    The bound holds for the expected loss of an answer from the source of these answers. The model's answers are greedy,
    and an exit is compared with the model's own token after the same text, so all thresholds are tested on one pass.

    Raises:
        ValueError: too few answers, or no threshold keeps the bound.
    """
    documents = [d for d in data if d.greedy and len(d.tokens) - d.start > 1]
    part = len(documents) // 4
    if part < _MIN_ANSWERS:
        raise ValueError(
            f"{data.folder}: {len(documents)} greedy answers are too few to calibrate on; {4 * _MIN_ANSWERS} are "
            "needed, and some hundreds keep smaller bounds: enlarge it with foretell data generate"
        )
    on_progress("reading the states of the exits")
    heads = packed_exits(exits, (), model.network)
    answers = [run_exits(model.network, heads, d, settings) for d in documents]
    chosen, checked, tested = answers[:part], answers[part : 2 * part], answers[2 * part :]
    layers, rules = choose_exits(exits, chosen, settings)
    losses = [np.array([_loss(a, layers, exits, rule, settings) for a in tested]) for rule in rules]
    accepted = count_accepted(losses, settings.disagreement, settings.confidence)
    if not accepted:
        best = smallest_bound(losses[0], settings.confidence)
        none = smallest_bound(np.zeros(len(tested)), settings.confidence)
        raise ValueError(
            f"no threshold keeps a disagreement of {settings.disagreement:g} at a confidence of "
            f"{settings.confidence:g}: the best that can be kept is {best:.4f} (with {len(tested)} answers and no "
            f"change at all, {none:.4f}); allow that, or calibrate on more answers"
        )
    rule, test_losses = rules[accepted - 1], losses[accepted - 1]
    assert betting_p_value(test_losses, settings.disagreement) <= 1 - settings.confidence
    calibration = ExitCalibration(
        model=model.checkpoint.fingerprint(),
        exits=exits_digest(exits),
        measure=settings.measure,
        layers=layers,
        thresholds=rule.thresholds,
        decay=settings.decay,
        horizon=settings.horizon,
        loss=settings.loss,
        disagreement=settings.disagreement,
        confidence=settings.confidence,
        answers=len(tested),
        mean_loss=float(test_losses.mean()),
        depth=mean_depth(tested, layers, exits, rule),
    )
    check = [_loss(a, layers, exits, rule, settings) for a in checked]
    curve = tuple(
        (level, float(loss.mean()), mean_depth(tested, layers, exits, each))
        for level, loss, each in zip(LEVELS, losses, rules, strict=True)
    )
    depth = mean_depth(checked, layers, exits, rule)
    return CalibrationResult(calibration, float(np.mean(check)), depth, len(checked), curve)


@torch.inference_mode()
def run_exits(network: Network, heads: TrainedExits, document: Document, settings: CalibrationSettings) -> AnswerExits:
    """Confidence and agreement of every exit at the tokens of an answer, at most `settings.longest`.

    All of it is computed as when `early_exit_lossy` decodes: by the same layers, packed heads and measure.
    """
    (tokens, first), *_ = texts_to_learn([document], settings.longest, document.start + settings.longest)
    runner = DecoderRunner(network)
    blocks = ExitBlocks(heads.blocks, heads.layers[0], runner) if heads.blocks else None
    tree = root_tree([tokens[-1]]).with_prefix([tokens])
    run = runner.begin_pass([0], tree)
    run.keeps_previous = settings.measure == "state"
    learned = np.arange(len(tokens)) >= first
    depths: torch.Tensor | None = None
    confidence, best = list[np.ndarray](), list[np.ndarray]()
    for i, layer in enumerate(heads.layers):
        output = run.advance(tree.valid, layer)
        states = output.states
        if blocks is not None:
            states = blocks.read_nodes(tree, [0], np.zeros(1, np.int64), tree.valid, states)
        if settings.measure == "classifier" and heads.chooses_depth and not i:
            depths = heads.depth_distribution(states[first:])
            if heads.chooses_once:  # by the state of the answer's first token
                depths = depths[min(1, len(depths) - 1)].expand_as(depths)
        before = output.before[first:] if settings.measure == "state" else output.before
        part = NodeStates(states[first:], np.arange(len(tokens) - first)[None], before)
        logits = heads.logits(i, part.states)
        sure = depths[:, i] if depths is not None else measure_confidence(settings.measure, heads, i, part, logits)
        confidence.append(sure.double().cpu().numpy())
        top = argmax(logits).cpu().numpy()
        best.append(top if heads.token_of is None else heads.token_of[top])
    own = argmax(runner.forward([0], tree, scored=tree.valid & learned).logits).cpu().numpy()
    return AnswerExits(np.stack(confidence), np.stack(best) == own)


def choose_exits(
    exits: Exits, answers: Sequence[AnswerExits], settings: CalibrationSettings
) -> tuple[tuple[int, ...], list[ExitRule]]:
    """The exits that run the fewest layers within the bound on these answers, tests of exits included; and a rule for
    each of `LEVELS`, whose thresholds leave where the estimated probability of agreement is at least so high.
    """
    known, total = exits.config.layers, exits.config.target.layers
    tables = [_thresholds(answers, i) for i in range(len(known))]
    best: tuple[float, tuple[int, ...], list[ExitRule]] = (float("inf"), known[:1], [])
    for size in range(1, min(settings.most_exits, len(known)) + 1):
        for which in combinations(range(len(known)), size):
            layers = tuple(known[i] for i in which)
            thresholds = (tuple(tables[i][n] for i in which) for n in range(len(LEVELS)))
            rules = [ExitRule(settings.measure, each, settings.decay, settings.horizon) for each in thresholds]
            cost = 1.0
            for rule in rules:
                if np.mean([_loss(a, layers, exits, rule, settings) for a in answers]) > 0.8 * settings.disagreement:
                    break
                tests = settings.head_cost * size / total
                cost = min(cost, mean_depth(answers, layers, exits, rule) + tests)
            if cost < best[0] or not best[2]:
                best = cost, layers, rules
    return best[1], best[2]


def _thresholds(answers: Sequence[AnswerExits], exit_: int) -> list[float]:
    """For every level the smallest confidence from which on the tokens agree so often; 1: there is none."""
    sure = np.concatenate([a.confidence[exit_] for a in answers])
    right = np.concatenate([a.agrees[exit_] for a in answers]).astype(np.float64)
    order = np.argsort(-sure, kind="stable")
    share = np.cumsum(right[order]) / np.arange(1, len(order) + 1)
    out = list[float]()
    for level in LEVELS:
        kept = np.flatnonzero(share >= level)
        lowest = float(sure[order[kept[-1]]]) if len(kept) else 1.0
        # A token leaves above the threshold.
        out.append(min(1.0, max(0.0, float(np.nextafter(lowest, -1.0)))) if len(kept) else 1.0)
    return out


def _exit_of(answer: AnswerExits, layers: Sequence[int], exits: Exits, rule: ExitRule) -> np.ndarray:
    """Where every token leaves: the index of its exit among all, or their number."""
    known = list(exits.config.layers)
    tokens = answer.confidence.shape[1]
    out = np.full(tokens, len(known))
    for i, layer in reversed(list(enumerate(layers))):
        leaves = answer.confidence[known.index(layer)] > rule.threshold(i, np.arange(tokens))
        out[leaves] = known.index(layer)
    return out


def _loss(
    answer: AnswerExits, layers: Sequence[int], exits: Exits, rule: ExitRule, settings: CalibrationSettings
) -> float:
    where = _exit_of(answer, layers, exits, rule)
    agrees = np.concatenate([answer.agrees, np.ones((1, len(where)), bool)])
    changed = ~agrees[where, np.arange(len(where))]
    return float(changed.any() if settings.loss == "answers" else changed.mean())


def mean_depth(answers: Sequence[AnswerExits], layers: Sequence[int], exits: Exits, rule: ExitRule) -> float:
    """Mean share of the layers that a token runs before it leaves. Decoder blocks of the exit count as layers, for all
    tokens: those that stay have run them too.
    """
    total, blocks = exits.config.target.layers, exits.config.blocks
    depth = (np.array([*exits.config.layers, total]) + (0 if blocks is None else blocks.layers)) / total
    return float(np.mean(np.concatenate([depth[_exit_of(a, layers, exits, rule)] for a in answers])))
