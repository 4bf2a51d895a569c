"""Answers of plans: which fields go together with a plan, and the job whose requests the plan makes."""

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from foretell.engine.request import Request, Update
from foretell.plan import PlanFieldError, PlanRun, PlanTask, question_of
from foretell.plan.base import PlanStep
from foretell.serve.errors import bad_request
from foretell.serve.formats.base import AnswerHead
from foretell.serve.jobs import Batch, Job, Jobs
from foretell.serve.loaded import LoadedModel
from foretell.serve.prompts import PromptEncoder
from foretell.serve.protocol.chat import ChatBody, ChatMessage
from foretell.tokenizer.codec import Message

Executor = Callable[[Callable[[], list[Request]]], Awaitable[list[Request]]]
"""Calls a function in another thread."""
REFUSED_FIELDS = (
    "tools", "functions", "response_format", "structured_outputs", "grammar", "json_schema", "prediction", "logprobs",
    "top_logprobs", "prompt_logprobs", "echo", "continue_final_message", "truncate_prompt_tokens", "return_token_ids",
    "return_drafts", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids", "repetition_detection",
)  # fmt: skip
"""Fields that belong to one stretch of tokens, and so do not go together with a plan."""


def check_plan(body: ChatBody) -> None:
    """Raise `ApiError` for a body with a plan and a field that does not go with it."""
    if (body.n or 1) > 1:
        raise bad_request("a plan writes one answer, and n asks for several; leave out one of them", "n")
    if any(message.images for message in body.messages):
        raise bad_request("a plan writes its own prompts, which have no images; leave out one of them", "messages")
    for name in REFUSED_FIELDS:
        value = getattr(body, name)
        means_nothing = (
            value is None or value is False or value in ([], ()) or (value == 0 and name != "prompt_logprobs")
        )
        if name == "response_format" and value is not None:
            means_nothing = value.type == "text"
        if not means_nothing:
            raise bad_request(f"a plan writes the answer in several parts and takes no {name}; leave out one", name)


def make_run(body: ChatBody, request: Request, loaded: LoadedModel, encoder: PromptEncoder) -> PlanRun:
    """The run of a body's plan; `request` answers the body without it.

    Raises:
        ApiError: the body asks for something that the plan cannot give.
    """
    assert body.plan is not None

    def encode(turns: Sequence[Message], continued: bool) -> list[int]:
        new = [ChatMessage(role=turn["role"], content=turn["content"]) for turn in turns]
        asked = {"messages": [*body.messages[:-1], *new], "continue_final_message": continued}
        return encoder.chat(body.model_copy(update=asked)).tokens

    last, model = body.messages[-1], loaded.model
    try:
        question = question_of([{"role": last.role, "content": last.text}])
        return body.plan.run(PlanTask(question, request, model.codec, encode, model.config.context))
    except PlanFieldError as error:
        raise bad_request(str(error), error.name) from error


def with_plan(head: AnswerHead, run: PlanRun) -> AnswerHead:
    """The head of an answer that a plan writes: it names the plan with its report, and is not lossless."""
    return replace(head, extension={**head.extension, "lossless": False, "plan": run.report}, ends_with_extension=True)


class PlannedJob:
    """A job with one answer, which a plan puts together from requests that it makes as it goes."""

    def __init__(self, jobs: Jobs, run: PlanRun, execute: Executor) -> None:
        self._jobs, self._run, self._execute = jobs, run, execute
        self._job = jobs.open_growing()
        self.started = self._job.started

    async def batches(self, interval: float | None = None) -> AsyncIterator[Batch]:
        """All updates of the answer; an empty batch after `interval` seconds without any.

        Raises:
            ApiError: the job has failed.
        """
        shown = time.monotonic()
        await self._follow(self._run.start())
        async for batch in self._job.batches(interval):
            answer_updates: Batch = []
            for at, updates in _passes(batch):
                step = self._run.observe(updates)
                await self._follow(step)
                if step.update is not None:
                    answer_updates.append((0, at, step.update))
            now = time.monotonic()
            if answer_updates or (interval is not None and now - shown >= interval):
                shown = now
                yield answer_updates

    async def _follow(self, step: PlanStep) -> None:
        if step.make_requests is not None:
            self._jobs.extend(self._job, await self._execute(step.make_requests))
        for number in step.cancel:
            self._jobs.cancel(self._job, number)

    def close(self) -> None:
        """Cancel what is not over."""
        self._job.close()


def _passes(batch: Batch) -> Iterator[tuple[float, list[tuple[int, Update]]]]:
    """The updates of a batch pass by pass: those of one pass have the same time."""
    for at, same_pass in itertools.groupby(batch, key=itemgetter(1)):
        yield at, [(number, update) for number, _, update in same_pass]


AnyJob = Job | PlannedJob
