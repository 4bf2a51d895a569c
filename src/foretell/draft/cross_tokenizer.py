"""A draft model with another tokenizer: universal assisted generation. Text is what the two models share."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import Context, StepResult, TokenBuffer
from foretell.core.ownership import Owner
from foretell.core.sampling import SamplingParams
from foretell.core.tree import root_tree, tree_from_lists
from foretell.draft.base import Continuation, Retriever
from foretell.draft.draft_model import DraftModel
from foretell.tokenizer.codec import TextCodec


class CrossTokenizerDrafter(Retriever):
    """Shows the draft model the text in its own tokens, lets it continue greedily, and reads the continuation in the
    target's tokens.

    Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies" (arXiv 2502.05202), string-level matching; Hugging Face's universal assisted generation. Tokens are
    picked, so `Match` keeps the target's law whatever the translation does. `length` counts draft tokens; a draft ends
    with a token that the draft model gives less than `confidence`. `lookbehind`: how many of the last tokens are
    encoded again together with what is new, since a boundary may fall elsewhere in the other tokenizer.
    """

    label = "draft model with another tokenizer"
    single = True

    def __init__(
        self,
        draft: DraftModel,
        codec: TextCodec,
        draft_codec: TextCodec,
        length: int = 6,
        confidence: float = 0.3,
        lookbehind: int = 16,
    ) -> None:
        if length < 1 or lookbehind < 1:
            raise ValueError(
                f"a translated draft needs length and lookbehind of at least 1, found {length} and {lookbehind}"
            )
        self.draft, self.length, self.confidence, self.lookbehind = draft, length, confidence, lookbehind
        self._codec, self._draft_codec = codec, draft_codec
        self._endings = {i for i, t in draft_codec.tokenizer.get_added_tokens_decoder().items() if t.special}
        self._mirrors: dict[int, RetokenizedText] = {}
        self._open: Context | None = None
        """The texts that the draft model has continued in the step under way."""

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The draft model's greedy continuation of every text, in the target's tokens."""
        mirrors = [self._updated(row, text) for row, text in zip(context.rows, context.sequences, strict=True)]
        lengths = [m.buffer.length for m in mirrors]
        fits = [
            i for i, n in enumerate(lengths) if context.max_depth[i] and 0 < n < self.draft.max_context - self.length
        ]
        found: list[list[Continuation]] = [[] for _ in mirrors]
        if fits:
            inner = Context(
                rows=tuple(context.rows[i] for i in fits),
                sequences=tuple(mirrors[i].buffer for i in fits),
                sampling_params=(SamplingParams(),) * len(fits),
                rngs=tuple(context.rngs[i] for i in fits),
                max_depth=np.full(len(fits), self.length),
            )
            for i, chain in zip(fits, self._continued(inner), strict=True):
                found[i] = self._back(context.sequences[i], mirrors[i].buffer, chain)
            self._open = inner
        return found

    def _updated(self, row: int, text: TokenBuffer) -> "RetokenizedText":
        """The row's text in draft tokens; what the draft model has read of a part that changed is forgotten."""
        mirror = self._mirrors.setdefault(row, RetokenizedText())
        mirror.update(text, self._codec, self._draft_codec, self.lookbehind)
        self.draft.runner.truncate(row, max(0, min(mirror.unchanged, mirror.buffer.length - 1)))
        return mirror

    def _continued(self, inner: Context) -> list[list[tuple[int, float]]]:
        """Greedy tokens per text, each with the product of confidences up to it; ends before a special token."""
        chains: list[list[tuple[int, float]]] = [[] for _ in inner.rows]
        going, tree = set(range(len(chains))), root_tree(inner.last_tokens)
        for depth in range(self.length):
            logits, at = self.draft.expand(tree, np.full((len(chains), 1), depth), inner)
            for i in sorted(going):
                sure, token = torch.softmax(logits[int(at[i, depth])], -1).max(-1)
                chance = float(sure) * (chains[i][-1][1] if chains[i] else 1.0)
                if int(token) in self._endings:
                    going.discard(i)
                    continue
                chains[i].append((int(token), chance))
                if float(sure) < self.confidence:
                    going.discard(i)
            if not going:
                break
            tokens = [[last, *(t for t, _ in chain)] for last, chain in zip(inner.last_tokens, chains, strict=True)]
            # A chain that has ended is cut short of this depth, so that its last token is not read in vain.
            tokens = [t if i in going else t[: depth + 1] for i, t in enumerate(tokens)]
            tree = tree_from_lists(tokens, [range(-1, len(t) - 1) for t in tokens])
        return chains

    def _back(self, text: TokenBuffer, draft_text: TokenBuffer, chain: list[tuple[int, float]]) -> list[Continuation]:
        """The chain in the target's tokens: encoded together with the last of the text, cut where the text ends."""
        tail = decode_from(self._codec, text.tokens, max(0, text.length - self.lookbehind))
        drafted = np.append(draft_text.tokens, [t for t, _ in chain])
        ends = [
            len(decode_from(self._draft_codec, drafted[: draft_text.length + j + 1], draft_text.length))
            for j in range(len(chain))
        ]
        said = decode_from(self._draft_codec, drafted, draft_text.length)
        pieces = encode_after(self._codec, tail, said)
        chances = [next((p for (_, p), e in zip(chain, ends, strict=True) if e >= end), 0.0) for _, end in pieces]
        return [Continuation(tuple(t for t, _ in pieces), tuple(chances))] if pieces else []

    def observe(self, step: StepResult) -> None:
        """Tell the draft model what was decided, in its own tokens."""
        if self._open is None:
            return
        rows, decided = self._open.rows, list[tuple[int, ...]]()
        for row in rows:
            mirror, text = self._mirrors[row], step.context.sequences[step.context.rows.index(row)]
            before = mirror.buffer.length
            mirror.update(text, self._codec, self._draft_codec, self.lookbehind)
            decided.append(tuple(mirror.buffer.tokens[before:].tolist()) if mirror.unchanged >= before else ())
        self.draft.observe(replace(step, context=self._open, new_tokens=tuple(decided)))
        for row in rows:
            mirror = self._mirrors[row]
            self.draft.runner.truncate(row, max(0, min(mirror.unchanged, mirror.buffer.length - 1)))
        self._open = None

    def release(self, row: int) -> None:
        """Forget a row."""
        self._mirrors.pop(row, None)
        self.draft.release(row)

    def claim(self, owner: Owner) -> bool:
        """With the draft model."""
        return any([super().claim(owner), self.draft.claim(owner)])


@dataclass
class RetokenizedText:
    """One text in the draft model's tokens.

    Only what follows a *settled* place is encoded again as the text grows: a place where both tokenizers have a
    boundary.
    """

    buffer: TokenBuffer = field(default_factory=lambda: TokenBuffer(()))
    covered: int = 0
    """Tokens of the target's text that it covers."""
    unchanged: int = 0
    """Tokens of `text` before which the last change of the text changed nothing."""
    settled: tuple[int, int] = (0, 0)
    """The settled place, in the target's tokens and in the draft's."""

    def update(self, text: TokenBuffer, codec: TextCodec, draft_codec: TextCodec, lookbehind: int) -> None:
        """Take in what the target's text has gained."""
        if text.length == self.covered:
            return
        start, draft_start = self.settled
        # A replacement character at the end is a character that is not whole yet.
        said = decode_from(codec, text.tokens, start).rstrip("\ufffd")
        encoding = draft_codec.tokenizer.encode(said, add_special_tokens=draft_start == 0)
        old, new = self.buffer.tokens, np.append(self.buffer.tokens[:draft_start], encoding.ids).astype(np.int64)
        same = _common(old, new)
        if same == len(old):
            self.buffer.append(new[same:].tolist())
            self.unchanged = len(new)
        else:
            self.buffer, self.unchanged = TokenBuffer(new.tolist()), same
        self.covered = text.length
        if text.length - start > 4 * lookbehind:
            self._settle(text, codec, said, [o[0] for o in encoding.offsets], lookbehind)

    def _settle(self, text: TokenBuffer, codec: TextCodec, said: str, starts: list[int], lookbehind: int) -> None:
        start, draft_start = self.settled
        for place in range(text.length - lookbehind, start, -1):
            head = decode_from(codec, text.tokens[:place], start)
            if said.startswith(head) and len(head) in starts[1:]:
                self.settled = place, draft_start + starts.index(len(head), 1)
                return


def _common(a: Int[np.ndarray, " s"], b: Int[np.ndarray, " t"]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def decode_from(codec: TextCodec, tokens: Int[np.ndarray, " t"], place: int) -> str:
    """The text that the tokens from `place` on add: decoded together with a few before, as some tokenizers treat a
    beginning specially.
    """
    start = max(0, place - 4)
    return codec.decode(tokens[start:].tolist())[len(codec.decode(tokens[start:place].tolist())) :]


def encode_after(codec: TextCodec, tail: str, said: str) -> list[tuple[int, int]]:
    """The tokens of `said` as it follows `tail`, each with where it ends in `said`.

    Encoded together, because a continuation is encoded otherwise than a beginning; where a token would span the border,
    which is already decided, `said` is encoded alone.
    """
    together = codec.tokenizer.encode(tail + said, add_special_tokens=False)
    border = len(tail)
    if any(start < border < end for start, end in together.offsets):
        alone = codec.tokenizer.encode(said, add_special_tokens=False)
        return [(t, end) for t, (_, end) in zip(alone.ids, alone.offsets, strict=True)]
    return [
        (t, end - border) for t, (start, end) in zip(together.ids, together.offsets, strict=True) if start >= border
    ]
