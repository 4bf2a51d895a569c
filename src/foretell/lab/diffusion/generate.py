"""The loop of masked diffusion models: an answer of masks is revealed block by block, in passes over all of it or over
a window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field

from foretell.lab.diffusion.reveal import choose_to_reveal, choose_tokens, split_evenly
from foretell.model.diffusion.predictor import MaskPredictor
from foretell.utils.options import Option
from foretell.utils.validation import FrozenModel


class DiffusionSettings(FrozenModel):
    """How an answer is revealed; lengths in tokens."""

    max_new_tokens: Annotated[int, Option("Tokens of the answer at most.", "N")] = Field(128, ge=1)
    """Before it is cut at its first end token."""
    block_length: Annotated[
        int | None,
        Option("Tokens of a block; blocks are revealed from left to right. Default: the model's own, or 32.", "N"),
    ] = Field(None, ge=1)
    """Models of block diffusion have a length of their own, and may be revealed in shorter blocks."""
    steps: Annotated[int | None, Option("Passes per block. Default: one per token.", "N")] = Field(None, ge=1)
    threshold: Annotated[
        float | None, Option("Reveal all tokens of at least this probability, in place of --steps.", "P")
    ] = Field(None, ge=0, le=1)
    """And the most probable one (Fast-dLLM, arXiv 2505.22618)."""
    temperature: float = Field(0.0, ge=0)
    remasking: Annotated[
        Literal["low_confidence", "random"], Option("What stays masked: low_confidence or random.", "NAME")
    ] = "low_confidence"
    cache: Annotated[
        Literal["none", "prefix", "dual"],
        Option("Approximate cache within a block: none, prefix or dual (Fast-dLLM).", "NAME"),
    ] = "none"
    """Keys and values that passes within a block do not compute again: none; those before the block; those before and
    after it. All are refreshed once per block.
    """
    seed: int = Field(0, ge=0)


@dataclass(frozen=True)
class DiffusionAnswer:
    """The tokens of an answer, its end token excluded, and what they took."""

    tokens: tuple[int, ...]
    passes: int
    positions: int
    """Positions that all passes computed together."""
    ended: bool
    """An end token was revealed."""


_BLOCK_LENGTH = 32
"""Of a model without blocks of its own."""


@torch.inference_mode()
def generate(
    predictor: MaskPredictor, prompt: Sequence[int], settings: DiffusionSettings, eos: Sequence[int] = ()
) -> DiffusionAnswer:
    """Answer a prompt.

    Raises:
        ValueError: the prompt is empty, prompt and answer are longer than the model's context, or a block is longer
            than the model was trained for.
    """
    context = predictor.decoder.config.context
    if predictor.block and (settings.block_length or 0) > predictor.block:
        raise ValueError(
            f"blocks of {settings.block_length} tokens were asked for, and this model was trained with blocks of "
            f"{predictor.block}; ask for a --block-length of at most {predictor.block}, or for none"
        )
    if not prompt:
        raise ValueError("a masked diffusion model needs a prompt of at least one token")
    if len(prompt) + settings.max_new_tokens > context:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and an answer of {settings.max_new_tokens} exceed this model's context "
            f"of {context}; ask for fewer --max-new-tokens"
        )
    run = _Run(predictor, prompt, settings)
    for block in run.blocks():
        run.reveal_block(block)
        if any(t in eos for t in run.token[len(prompt) : block.end].tolist()):
            break
    answer: list[int] = run.token[len(prompt) :].tolist()
    end = next((i for i, t in enumerate(answer) if t in eos), None)
    return DiffusionAnswer(tuple(answer[:end]), run.passes, run.positions, end is not None)


class _Block(NamedTuple):
    """Positions that are revealed together, from `begin` to `end`."""

    begin: int
    end: int
    first: int
    last: int
    """First position, and end, of what attends to each other in block diffusion; else as `begin` and `end`."""


class _Run:
    """One answer in the making. `token`: prompt and answer, masks included."""

    def __init__(self, predictor: MaskPredictor, prompt: Sequence[int], settings: DiffusionSettings) -> None:
        self._predictor, self._settings, self._prompt = predictor, settings, len(prompt)
        masks = [predictor.mask] * settings.max_new_tokens
        self.token = torch.tensor([*prompt, *masks], device=predictor.decoder.device)
        self._store = predictor.new_store(len(self.token))
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._kept = 0
        """Leading positions whose keys and values are final: in block diffusion those of finished blocks."""
        self.passes, self.positions = 0, 0

    def blocks(self) -> Iterator[_Block]:
        """The blocks of the answer; those of block diffusion begin at multiples of their length."""
        own, end, size = self._predictor.block, len(self.token), self._settings.block_length
        if not own:
            for at in range(self._prompt, end, size := size or _BLOCK_LENGTH):
                yield _Block(at, min(at + size, end), at, min(at + size, end))
            return
        for first in range(self._prompt // own * own, end, own):
            last = min(first + own, end)
            for at in range(first, last, size or own):
                yield _Block(at, min(at + (size or own), last), first, last)

    def reveal_block(self, block: _Block) -> None:
        """Reveal all tokens of a block."""
        begin, end = block.begin, block.end
        masks = int((self.token[begin:end] == self._predictor.mask).sum())
        counts, step = split_evenly(masks, min(self._settings.steps or masks, masks)), 0
        while masked := [i for i in range(begin, end) if self.token[i] == self._predictor.mask]:
            logits = self._read(block, masked, fresh=step == 0)
            predictions = choose_tokens(logits, self._settings.temperature, self._settings.remasking, self._generator)
            shown = choose_to_reveal(predictions, counts[min(step, len(counts) - 1)], self._settings.threshold)
            self.token[torch.tensor(masked)[shown]] = predictions.token[shown].to(self.token.device)
            step += 1

    def _read(self, block: _Block, masked: Sequence[int], fresh: bool) -> Float[torch.Tensor, "k v"]:
        """Logits at the masked positions, from a pass over as much of the sequence as the cache leaves."""
        first, last, until = self._window(block, fresh)
        self.passes += 1
        self.positions += last - first
        return self._predictor.read(self._store, self.token[first:last], first, masked, until)

    def _window(self, block: _Block, fresh: bool) -> tuple[int, int, int]:
        """First and last position that are read, and the end of what they attend to.

        Where predictions are shifted, the output before a block predicts its first token.
        """
        before, whole = max(block.first - int(self._predictor.shifted), 0), len(self.token)
        if self._predictor.block:
            # What later blocks do not change is kept without loss.
            first = self._kept if fresh else before
            self._kept = block.first
            return min(first, before), block.last, block.last
        if fresh or self._settings.cache == "none":
            return 0, whole, whole
        return before, whole if self._settings.cache == "prefix" else block.end, whole
