"""A non-autoregressive model drafts, its autoregressive sibling verifies: generalised aggressive decoding (Xia et al.,
arXiv 2203.16487).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foretell.lab.nat.decode import DecodeOptions, denoise, predict, translate
from foretell.lab.nat.network import KeyValue, NatModel, causal_mask
from foretell.lab.nat.pairs import BEGIN, END, MASK, UNKNOWN, pad


@dataclass(frozen=True)
class VerifiedTranslation:
    """A translation that equals greedy decoding of the verifier."""

    tokens: Sequence[int]
    passes: int
    """Of the verifier's decoder."""
    draft_passes: int
    """Of the drafter's decoder."""
    accepted: int
    """Tokens that were drafted."""


class _Draft:
    """Drafts of one source: the whole target at first, then what follows the tokens that are decided."""

    def __init__(self, model: NatModel, source: Sequence[int], options: DecodeOptions) -> None:
        self._model, self._options = model, options
        self._fixed: Sequence[int] | None = None
        self.passes = 0
        if model.config.kind == "fertility":
            # Its inputs are the source's tokens, so decided tokens change nothing.
            self._fixed, self.passes = translate(model, [source], options).tokens[0], 1
        else:
            self._memory = model.encode(pad([source]))
            self._length = int(self._memory.length_logits.argmax()) + 1

    def after(self, decided: Sequence[int]) -> list[int]:
        """Tokens that may follow the decided ones, the end token last."""
        most = self._model.config.max_target
        if self._fixed is not None:
            return [*self._fixed[len(decided) : most], END]
        length = min(max(self._length, len(decided)), most)
        if len(decided) >= length:
            return [END]
        return [*self._complete(decided, length)[len(decided) :], END]

    def _complete(self, decided: Sequence[int], length: int) -> list[int]:
        """A target of this length that begins with the decided tokens."""
        model, rest, lengths = self._model, length - len(decided), torch.tensor([length])
        if model.config.kind == "sundae":
            generator = torch.Generator().manual_seed(self._options.seed)
            noise = torch.randint(UNKNOWN + 1, len(model.config.target), (rest,), generator=generator).tolist()
            token, _, passes = denoise(model, self._memory, torch.tensor([[*decided, *noise]]), lengths, self._options)
        else:
            token = torch.tensor([[*decided, *[MASK] * rest]])
            token, passes = predict(model, self._memory, token, lengths).argmax(-1), 1
        self.passes += passes
        completed: list[int] = token[0].tolist()
        return completed


@torch.inference_mode()
def translate_verified(
    verifier: NatModel, drafter: NatModel, source: Sequence[int], options: DecodeOptions
) -> VerifiedTranslation:
    """Translate one source; the tokens are those of greedy decoding by the verifier, up to ties within rounding.

    Every pass of the verifier reads its newest token and the draft behind it, and keeps the drafted tokens that are its
    own choice.
    """
    memory, draft = verifier.encode(pad([source])), _Draft(drafter, source, options)
    decided, past, passes, accepted = list[int](), tuple[KeyValue, ...](), 0, 0
    while True:
        # One token more than the longest target: the end token.
        tokens = draft.after(decided)[: verifier.config.max_target - len(decided) + 1]
        inputs = [decided[-1] if decided else BEGIN, *tokens[:-1]]
        embedded = verifier.embed(torch.tensor([inputs]))
        decoded = verifier.decode(embedded, memory, causal_mask(len(inputs), len(decided)), past)
        passes += 1
        own: list[int] = decoded.logits[0].argmax(-1).tolist()
        matched = next((i for i, (a, b) in enumerate(zip(own, tokens, strict=False)) if a != b), len(tokens))
        new = own[: matched + 1]
        accepted += matched
        end = new.index(END) if END in new else None
        decided += new[:end]
        if end is not None or len(decided) >= verifier.config.max_target:
            kept = decided[: verifier.config.max_target]
            return VerifiedTranslation(kept, passes, draft.passes, accepted)
        past = tuple((k[:, :, : len(decided)], v[:, :, : len(decided)]) for k, v in decoded.keys_values)
