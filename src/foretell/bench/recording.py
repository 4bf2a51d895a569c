"""A target that says again what it said before: replays methods over recorded continuations, without a model."""

import base64
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from foretell.bench.schema import FrozenModel
from foretell.core.context import ModelOutput
from foretell.core.tree import TokenTree
from foretell.model.runner import Runner


class RecordedAnswer(FrozenModel):
    """One recorded answer: the prompt, the greedy tokens, and the best scores before each of them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_tokens: str
    """Token ids `[tokens, k]`, best first: base64 of little-endian int32."""
    top_logprobs: str
    """Their log-probabilities: base64 of little-endian float32."""

    @staticmethod
    def pack(
        prompt: Sequence[int], tokens: Sequence[int], best: Int[np.ndarray, "n k"], scores: Float[np.ndarray, "n k"]
    ) -> "RecordedAnswer":
        """Pack arrays."""
        return RecordedAnswer(
            prompt=tuple(prompt),
            tokens=tuple(tokens),
            top_tokens=base64.b64encode(best.astype("<i4").tobytes()).decode(),
            top_logprobs=base64.b64encode(scores.astype("<f4").tobytes()).decode(),
        )

    def unpack(self) -> tuple[Int[np.ndarray, "n k"], Float[np.ndarray, "n k"]]:
        """Unpack them.

        Raises:
            ValueError: the arrays do not fit the tokens.
        """
        try:
            ids = np.frombuffer(base64.b64decode(self.top_tokens, validate=True), "<i4")
            scores = np.frombuffer(base64.b64decode(self.top_logprobs, validate=True), "<f4")
            return ids.reshape(len(self.tokens), -1), scores.reshape(len(self.tokens), -1)
        except ValueError as error:
            raise ValueError(f"a recorded distribution is damaged ({error}); record the workload again") from error


class RecordedQuestion(FrozenModel):
    """All turns of one question."""

    question: str
    category: str
    group: str
    answers: tuple[RecordedAnswer, ...]


class RecordingSettings(FrozenModel):
    """What was recorded, and the facts about the model that replay needs."""

    format: str = "foretell recording 1"
    model: str
    dtype: str
    tasks: str
    digest: str
    max_new_tokens: int
    top_k: int
    vocab: int
    context: int
    eos: tuple[int, ...]
    questions: int
    """How many the recording holds when it is complete."""


class ReplayRunner(Runner):
    """Scores the nodes that agree with the script as the target did; says nothing about the others, which greedy
    decoding never reaches.

    Serves one text (row 0) at a time; `play` names its script. Scores outside the recorded best are -inf.
    """

    def __init__(self, vocab: int, context: int) -> None:
        self.vocab, self.context = vocab, context
        self._length = 0

    def set_answer(self, script: RecordedAnswer) -> None:
        """Serve this script from now on."""
        self._said = np.array([*script.prompt, *script.tokens], np.int64)
        self._prompt = len(script.prompt)
        self._best, self._scores = script.unpack()

    def length(self, row: int) -> int:
        """How many tokens have been read and kept."""
        return self._length

    def forward(
        self,
        rows: Sequence[int],
        tree: TokenTree,
        *,
        active: Bool[np.ndarray, "b n"] | None = None,
        scored: Bool[np.ndarray, "b n"] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Recorded scores after every wanted node that the script contains.

        Raises:
            ValueError: hidden states are asked for, or more than one text.
        """
        if hidden_layers:
            raise ValueError(
                "this method drafts from the target's hidden states, which a recording does not hold: measure it with "
                "`foretell bench run`"
            )
        if len(rows) != 1:
            raise ValueError(f"a script serves one text at a time, {len(rows)} were asked for")
        wanted = tree.active if scored is None else tree.active & scored
        position = self._length + tree.depth[0]
        said = np.zeros(tree.nodes, bool)
        for node, (parent, at, token) in enumerate(
            zip(tree.parent[0].tolist(), position.tolist(), tree.token[0].tolist(), strict=True)
        ):
            said[node] = (parent < 0 or said[parent]) and at < len(self._said) and self._said[at] == token
        served = np.flatnonzero(said & wanted[0])
        index = np.full(wanted.shape, -1, np.int64)
        index[0, served] = np.arange(len(served))
        return ModelOutput(logits=self._logits(position[served] + 1 - self._prompt), logit_index=index)

    def _logits(self, following: Int[np.ndarray, " k"]) -> Float[torch.Tensor, "k v"]:
        """Scores of the recorded tokens numbered `following`; past the end of the script, of nothing in particular."""
        logits = torch.full((len(following), self.vocab), -torch.inf)
        for i, number in enumerate(following.tolist()):
            if 0 <= number < len(self._best):
                logits[i, torch.from_numpy(self._best[number].astype(np.int64))] = torch.from_numpy(
                    self._scores[number].copy()
                )
            else:
                logits[i] = 0.0
        return logits

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Count them as read."""
        self._length += len(path)

    def truncate(self, row: int, length: int) -> None:
        """Forget tokens from `length` on."""
        self._length = min(length, self._length)
