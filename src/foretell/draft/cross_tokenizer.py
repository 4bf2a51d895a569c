"""Drafting with a model of another tokenizer, through text: universal assisted generation."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Int

from foretell.core.context import Context, StepResult, StepState, TokenBuffer, common_prefix
from foretell.core.sampling import SamplingParams
from foretell.core.tree import root_tree, tree_from_lists
from foretell.draft.base import BindingEngine, Continuation, Retriever
from foretell.draft.draft_model import DraftModel
from foretell.tokenizer.codec import TextCodec


class CrossTokenizerDrafter(Retriever):
    """Encodes the text in the draft model's tokens, drafts greedily, and encodes the draft in the target's tokens.

    Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies" (arXiv 2502.05202), string-level matching; Hugging Face's universal assisted generation. Drafts are
    deterministic, so `Match` keeps the target's distribution whatever the conversion does. `length` counts draft
    tokens; a draft ends with a token of a probability below `confidence`. `lookbehind`: how many of the last tokens are
    encoded again together with new ones, since token boundaries differ between the tokenizers.
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
        self._special_tokens = {i for i, t in draft_codec.tokenizer.get_added_tokens_decoder().items() if t.special}
        self._retokenized: dict[int, RetokenizedText] = {}
        self._inner = StepState[Context | None]()
        """The requests that the draft model drafted for in a step, in its own tokens."""

    def retrieve(self, context: Context, budget: int) -> list[list[Continuation]]:
        """The draft model's greedy continuation of every request, in the target's tokens."""
        retokenized = [self._update(row, text) for row, text in zip(context.rows, context.sequences, strict=True)]
        lengths = [m.buffer.length for m in retokenized]
        fits = [
            i for i, n in enumerate(lengths) if context.max_depth[i] and 0 < n < self.draft.max_context - self.length
        ]
        continuations: list[list[Continuation]] = [[] for _ in retokenized]
        if fits:
            inner = Context(
                rows=tuple(context.rows[i] for i in fits),
                sequences=tuple(retokenized[i].buffer for i in fits),
                sampling_params=(SamplingParams(),) * len(fits),
                rngs=tuple(context.rngs[i] for i in fits),
                max_depth=np.full(len(fits), self.length),
            )
            for i, chain in zip(fits, self._continue(inner), strict=True):
                continuations[i] = self._to_target_tokens(context.sequences[i], retokenized[i].buffer, chain)
            self._inner.put(context, inner)
        return continuations

    def _update(self, row: int, text: TokenBuffer) -> "RetokenizedText":
        """The row's sequence in draft tokens; the draft model's cache of tokens that changed is dropped."""
        retokenized = self._retokenized.setdefault(row, RetokenizedText())
        retokenized.update(text, self._codec, self._draft_codec, self.lookbehind)
        self.draft.runner.truncate(row, max(0, min(retokenized.unchanged, retokenized.buffer.length - 1)))
        return retokenized

    def _continue(self, inner: Context) -> list[list[tuple[int, float]]]:
        """Greedy tokens per request, each with the product of probabilities up to it; ends before a special token."""
        chains: list[list[tuple[int, float]]] = [[] for _ in inner.rows]
        going, tree = set(range(len(chains))), root_tree(inner.last_tokens)
        for depth in range(self.length):
            logits, logit_index = self.draft.expand(tree, np.full((len(chains), 1), depth), inner)
            for i in sorted(going):
                sure, token = torch.softmax(logits[int(logit_index[i, depth])], -1).max(-1)
                probability = float(sure) * (chains[i][-1][1] if chains[i] else 1.0)
                if int(token) in self._special_tokens:
                    going.discard(i)
                    continue
                chains[i].append((int(token), probability))
                if float(sure) < self.confidence:
                    going.discard(i)
            if not going:
                break
            tokens = [[last, *(t for t, _ in chain)] for last, chain in zip(inner.last_tokens, chains, strict=True)]
            # A chain that has ended is cut before this depth, so that its last token is not read.
            tokens = [t if i in going else t[: depth + 1] for i, t in enumerate(tokens)]
            tree = tree_from_lists(tokens, [range(-1, len(t) - 1) for t in tokens])
        return chains

    def _to_target_tokens(
        self, text: TokenBuffer, draft_text: TokenBuffer, chain: list[tuple[int, float]]
    ) -> list[Continuation]:
        """The chain in the target's tokens, encoded together with the last tokens of the sequence; nothing for an empty
        one, whose first token was special.
        """
        if not chain:
            return []
        tail = decode_from(self._codec, text.tokens, max(0, text.length - self.lookbehind))
        drafted = np.append(draft_text.tokens, [t for t, _ in chain])
        ends = [
            len(decode_from(self._draft_codec, drafted[: draft_text.length + j + 1], draft_text.length))
            for j in range(len(chain))
        ]
        continuation = decode_from(self._draft_codec, drafted, draft_text.length)
        pieces = encode_after(self._codec, tail, continuation)
        probabilities = [next((p for (_, p), e in zip(chain, ends, strict=True) if e >= end), 0.0) for _, end in pieces]
        return [Continuation(tuple(t for t, _ in pieces), tuple(probabilities))] if pieces else []

    def observe(self, step: StepResult) -> None:
        """Update the draft model with the new tokens, in its own tokens."""
        inner = self._inner.of(step.context, None)
        if inner is None:
            return
        rows, decided = inner.rows, list[tuple[int, ...]]()
        for row in rows:
            retokenized, text = self._retokenized[row], step.context.sequences[step.context.rows.index(row)]
            before = retokenized.buffer.length
            retokenized.update(text, self._codec, self._draft_codec, self.lookbehind)
            decided.append(
                tuple(retokenized.buffer.tokens[before:].tolist()) if retokenized.unchanged >= before else ()
            )
        self.draft.observe(replace(step, context=inner, new_tokens=tuple(decided)))
        for row in rows:
            retokenized = self._retokenized[row]
            self.draft.runner.truncate(row, max(0, min(retokenized.unchanged, retokenized.buffer.length - 1)))

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._retokenized.pop(row, None)
        self.draft.release(row)

    def bind(self, engine: BindingEngine) -> bool:
        """Claim the draft model, too."""
        return any([super().bind(engine), self.draft.bind(engine)])


@dataclass
class RetokenizedText:
    """One sequence in the draft model's tokens.

    As the sequence grows, only the tokens after the *settled* position are encoded again: a position where both
    tokenizers have a token boundary.
    """

    buffer: TokenBuffer = field(default_factory=lambda: TokenBuffer(()))
    covered: int = 0
    """Tokens of the target's sequence that it covers."""
    unchanged: int = 0
    """Tokens at the start of `buffer` that the last update left unchanged."""
    settled: tuple[int, int] = (0, 0)
    """The settled position, in the target's tokens and in the draft model's."""

    def update(self, text: TokenBuffer, codec: TextCodec, draft_codec: TextCodec, lookbehind: int) -> None:
        """Add the new tokens of the target's sequence."""
        if text.length == self.covered:
            return
        start, draft_start = self.settled
        # A replacement character at the end is an incomplete character.
        continuation = decode_from(codec, text.tokens, start).rstrip("\ufffd")
        encoding = draft_codec.tokenizer.encode(continuation, add_special_tokens=draft_start == 0)
        old, new = self.buffer.tokens, np.append(self.buffer.tokens[:draft_start], encoding.ids).astype(np.int64)
        same = common_prefix(old, new)
        if same == len(old):
            self.buffer.append(new[same:].tolist())
            self.unchanged = len(new)
        else:
            self.buffer, self.unchanged = TokenBuffer(new.tolist()), same
        self.covered = text.length
        if text.length - start > 4 * lookbehind:
            self._settle(text, codec, continuation, [o[0] for o in encoding.offsets], lookbehind)

    def _settle(
        self, text: TokenBuffer, codec: TextCodec, continuation: str, starts: list[int], lookbehind: int
    ) -> None:
        start, draft_start = self.settled
        for place in range(text.length - lookbehind, start, -1):
            head = decode_from(codec, text.tokens[:place], start)
            if continuation.startswith(head) and len(head) in starts[1:]:
                self.settled = place, draft_start + starts.index(len(head), 1)
                return


def decode_from(codec: TextCodec, tokens: Int[np.ndarray, " t"], place: int) -> str:
    """The text of the tokens from `place` on, decoded together with a few before them, as some tokenizers treat the
    first token specially.
    """
    start = max(0, place - 4)
    return codec.decode(tokens[start:].tolist())[len(codec.decode(tokens[start:place].tolist())) :]


def encode_after(codec: TextCodec, tail: str, continuation: str) -> list[tuple[int, int]]:
    """The tokens of `continuation` after `tail`, each with its end in `continuation`.

    Both are encoded together; if a token spans the border between them, `continuation` is encoded alone.
    """
    together = codec.tokenizer.encode(tail + continuation, add_special_tokens=False)
    border = len(tail)
    if any(start < border < end for start, end in together.offsets):
        alone = codec.tokenizer.encode(continuation, add_special_tokens=False)
        return [(t, end) for t, (_, end) in zip(alone.ids, alone.offsets, strict=True)]
    return [
        (t, end - border) for t, (start, end) in zip(together.ids, together.offsets, strict=True) if start >= border
    ]
