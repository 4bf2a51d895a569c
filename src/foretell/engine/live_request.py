"""A request while it waits or runs."""

from collections.abc import Sequence

from foretell.core.context import TokenBuffer
from foretell.core.sampling import CounterRNG
from foretell.core.token_rules import TokenRules
from foretell.distributions.processed import Reads
from foretell.distributions.sampler import sampling_struct
from foretell.draft.prediction import Prediction
from foretell.engine.answer_text import AnswerText
from foretell.engine.draft_account import DraftAccount
from foretell.engine.logprobs import TokenLogprobs
from foretell.engine.method import BoundMethod
from foretell.engine.repetition import REPETITION, RepetitionWatch
from foretell.engine.request import Request
from foretell.engine.statistics import RequestStatistics
from foretell.engine.tuning import LATE_WEIGHT, MOST_PRIORITY
from foretell.tokenizer.stream import Detokenizer, StopStrings


class LiveRequest:
    """A request that waits or runs; `row` is its row while it runs."""

    def __init__(
        self, number: int, request: Request, method: BoundMethod, detokenizer: Detokenizer | None, context: int
    ) -> None:
        self.number, self.request, self.method, self.row = number, request, method, -1
        self.submitted_at = 0.0
        """Time by the engine's clock."""
        self.statistics = RequestStatistics(prompt_tokens=len(request.prompt))
        self.sequence = TokenBuffer(request.prompt)
        self.rng = CounterRNG(request.sampling_params.seed)
        stop_strings = StopStrings(request.stop, request.include_stop_str_in_output)
        self.text = AnswerText(detokenizer, stop_strings, request.sampling_params.min_tokens)
        rules = TokenRules(request.sampling_params, request.ending_tokens, request.constraint)
        self.rules = rules if rules.restricts else None
        params, reads = request.sampling_params, method.method.accept.reads
        samples = params.temperature > 0 and params.uses_raw_logits and self.rules is None and reads is Reads.TOKENS
        self.sampling = sampling_struct(params, self.rng.seed_key) if samples else None
        """How a pass of the target samples for it; None: its tokens are not sampled from the logits as they are."""
        self.prompt_logprobs = TokenLogprobs()
        self.max_new_tokens = min(request.max_new_tokens, context - len(request.prompt))
        detection, min_tokens = request.repetition_detection, request.sampling_params.min_tokens
        self.repetition = None if detection is None else RepetitionWatch(detection, min_tokens, self.max_new_tokens)
        self.prediction = Prediction(request.prediction) if request.prediction else None
        self.count_prediction()
        self.account = DraftAccount()

    def weight(self, soon: float) -> float:
        """What one of its tokens is worth; `soon`: time by the engine's clock up to which a deadline is near."""
        deadline, priority = self.request.deadline, self.request.priority
        late = deadline is not None and deadline <= soon
        return (LATE_WEIGHT if late else 1.0) * 2.0 ** -max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))

    @property
    def room(self) -> int:
        """How deep its drafts may be; 0: it may have none."""
        deepest, most = self.remaining_tokens - 1, self.request.max_drafts
        return deepest if most is None else min(deepest, most)

    @property
    def remaining_tokens(self) -> int:
        """Number of new tokens that it may still get."""
        return self.max_new_tokens - self.sequence.length + self.sequence.prompt_length

    @property
    def reading_end(self) -> int:
        """Number of tokens that the target reads before a step gives it new ones: all of its prompt. After a pause or a
        preemption all but the last token, so that it drafts after this one as if it had not waited.
        """
        return self.sequence.length - int(len(self.sequence.generated) > 0)

    def count_prediction(self) -> None:
        """Compare the new tokens with the predicted output, and count."""
        if self.prediction is not None:
            self.prediction.follow(self.sequence)
            self.statistics.accepted_prediction_tokens = self.prediction.appeared
            self.statistics.rejected_prediction_tokens = self.prediction.missing

    @property
    def shows_end(self) -> bool:
        """Whether the text of the token that ends the answer is shown: a token that only completes a constraint is."""
        return self.request.include_stop_str_in_output or self.sequence.last_token not in self.request.ending_tokens

    @property
    def reads_prompt_logprobs(self) -> bool:
        """Whether logits of its prompt are still needed."""
        return self.request.prompt_logprobs is not None and len(self.sequence.generated) == 0

    def until_end(self, tokens: Sequence[int]) -> list[int]:
        """The tokens up to the first that ends the answer, which is included; called once for all new tokens."""
        if self.repetition is not None:
            tokens = tokens[: self.repetition.until_repetition(tokens)]
        ending, rules = self.request.ending_tokens, self.rules
        for count, token in enumerate(tokens, 1):
            done = rules is not None and rules.ends(self.sequence.generated, tokens[:count])
            if token in ending or done:
                return list(tokens[:count])
        return list(tokens)

    @property
    def reason_to_end(self) -> str | None:
        """The `finish_reason` of an answer that neither a token nor a stop string has ended; None: it goes on."""
        if self.remaining_tokens <= 0:
            return "length"
        return REPETITION if self.repetition is not None and self.repetition.has_repeated else None

    def has_ended(self) -> bool:
        """Whether the last token ended the answer."""
        ends = self.sequence.last_token in self.request.ending_tokens
        return ends or (self.rules is not None and self.rules.is_complete(self.sequence.generated))
