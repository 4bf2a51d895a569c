"""A run: every question to every contender, in turn, so that drift of the machine meets all alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretell.api import Model
from foretell.bench.competitor import PLAIN, Contender, conversation
from foretell.bench.schema import Divergence, Record
from foretell.bench.questions import Question
from foretell.core.tree import root_tree
from foretell.tokenizer.codec import Message
from foretell.utils.store import RunStore

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Session:
    """Who answers, how often, and the models that judge where answers diverge, by precision.

    The first contender is plain decoding.
    """

    contenders: Sequence[Contender]
    models: Mapping[str, Model]
    repeats: int

    @property
    def size(self) -> int:
        """Answers per question."""
        return len(self.contenders) * self.repeats

    def run(self, questions: Sequence[Question], store: RunStore[Record], tick: Tick) -> None:
        """Ask everything that the store has no answer to yet."""
        done = {(r.question, r.contender, r.repeat): r for r in store.records}
        if len(done) < len(questions) * self.size:
            self._warm_up()
        for question in questions:
            for repeat in range(self.repeats):
                for contender in self._order(repeat):
                    key = question.id, contender.name, repeat
                    if key not in done:
                        done[key] = self._ask(contender, question, repeat, done)
                        store.append(done[key])
                    tick(f"{question.category} {question.id}: {contender.name}")

    def _warm_up(self) -> None:
        """A short question that is not counted: first calls allocate, compile and page in."""
        question = Question("warm-up", "warm-up", ("Count from one to ten, then count from one to ten again.",))
        plain = None
        for contender in self.contenders:
            turns = contender.answer(question, plain, -1)
            plain = plain or Record(
                question=question.id, category="", group="", contender=contender.name, repeat=0, turns=turns
            )

    def _order(self, repeat: int) -> Sequence[Contender]:
        """Everyone's neighbours change from repeat to repeat; in the first, plain decoding comes first, since peers
        follow its lengths.
        """
        shift = repeat * 3 % len(self.contenders)
        return [*self.contenders[shift:], *self.contenders[:shift]]

    def _ask(
        self, contender: Contender, question: Question, repeat: int, done: Mapping[tuple[str, str, int], Record]
    ) -> Record:
        name, precision = contender.name.split("/")
        own = done.get((question.id, f"{PLAIN}/{precision}", 0))
        plain = own or done.get((question.id, self.contenders[0].name, 0))
        record = Record(
            question=question.id,
            category=question.category,
            group=question.group,
            contender=contender.name,
            repeat=repeat,
        )
        try:
            record = record.model_copy(update={"turns": contender.answer(question, plain, repeat)})
        except ValueError as error:
            return record.model_copy(update={"refused": " ".join(str(error).split())})
        if name == PLAIN or plain is None or plain.refused or repeat:
            return record
        judge = self.models[precision if own else next(iter(self.models))]
        return record.model_copy(
            update={"compared": True, "divergence": first_divergence(record, plain, question, judge)}
        )


def first_divergence(record: Record, plain: Record, question: Question, judge: Model) -> Divergence | None:
    """Where the answers first differ, and how nearly the target was undecided there; None if they are identical."""
    messages = list[Message]()
    for turn, (mine, theirs) in enumerate(zip(record.turns, plain.turns, strict=True)):
        messages.append({"role": "user", "content": question.turns[turn]})
        if mine.tokens != theirs.tokens:
            at = next((i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=False)) if a != b), None)
            if at is None:
                ends = min(len(mine.tokens), len(theirs.tokens))
                return Divergence(question=question.id, turn=turn, position=ends, token=None, plain=None, margin=None)
            token, chosen = mine.tokens[at], theirs.tokens[at]
            text = [*conversation(judge, messages), *theirs.tokens[:at]]
            return Divergence(
                question=question.id,
                turn=turn,
                position=at,
                token=token,
                plain=chosen,
                margin=margin(judge, text, chosen, token),
            )
        messages.append({"role": "assistant", "content": judge.codec.decode(theirs.tokens)})
    return None


def margin(model: Model, text: Sequence[int], first: int, second: int) -> float:
    """Logit of `first` less that of `second` after a text, read without speculation."""
    runner = model.runner()
    for start in range(0, len(text), 512):
        part = list(text[start : start + 512])
        tree = root_tree([part[-1]]).with_prefix([part])
        output = runner.forward([0], tree, scored=np.arange(len(part))[None] == len(part) - 1)
        runner.commit(0, range(len(part)))
    return float(output.logits[0, first] - output.logits[0, second])
