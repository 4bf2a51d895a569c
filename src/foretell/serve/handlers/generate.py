"""Runs the engine's requests of one HTTP request and writes the answer: as one object, or as a stream."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from foretell.engine.request import Request, Update
from foretell.plan import PlanRun
from foretell.serve.choices import Choices, Piece
from foretell.serve.errors import ApiError
from foretell.serve.formats.base import AnswerFormat
from foretell.serve.jobs import Batch, Job
from foretell.serve.planned import AnyJob, PlannedJob
from foretell.serve.service import Service
from foretell.serve.silence import Silence
from foretell.serve.sse import EventStream, until_disconnected
from foretell.serve.thinking import Phases
from foretell.serve.usage import measurements, usage


@dataclass(frozen=True)
class Generation:
    """What to generate, and how to write it."""

    requests: Sequence[Request]
    per_prompt: int
    """Choices of each prompt."""
    format: AnswerFormat
    stream: bool
    stream_interval: int = 1
    """New tokens of a piece of a stream, at least, beside its first and last one."""
    ping_interval: float | None = None
    """Seconds between the comments in a silent stream; 0: none, None: the server's."""
    progress: bool = False
    """Whether a stream reports how much of the prompt is read."""
    run: PlanRun | None = None
    """Of the plan that writes the answer to the one request."""
    phases: Phases | None = None
    """Of answers that may begin with reasoning."""
    prompt_only: bool = False
    """Whether the answers are the prompts: the one new token, without which the engine reads none, is not shown."""


async def respond(service: Service, http: HttpRequest, generation: Generation) -> ASGIApp:
    """Generate, and answer.

    Raises:
        ApiError: the server is overloaded, or the engine failed.
        ClientDisconnect: the client went away.
    """
    service.admit_tokens(sum(len(r.prompt) for r in generation.requests), len(generation.requests))
    job = _open(service, generation)
    choices = Choices(
        generation.requests, generation.per_prompt, job.started, generation.phases, generation.prompt_only
    )
    if generation.stream:
        usual, asked = service.settings.timeouts.keep_alive_interval, generation.ping_interval
        watched = job if generation.progress and isinstance(job, Job) else None
        silence = Silence(generation.format, usual if asked is None else asked or None, watched)
        events = _events(job, choices, generation, silence)
        return EventStream(events, generation.format.media_type)
    try:
        pieces = await until_disconnected(http.receive, _collect(job, choices))
    finally:
        job.close()
    body = generation.format.complete(choices, pieces, usage(choices), measurements(choices))
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


def _open(service: Service, generation: Generation) -> AnyJob:
    if generation.run is None:
        return service.jobs.open(generation.requests, generation.per_prompt)
    return PlannedJob(service.jobs, generation.run, service.in_pool)


async def _events(job: AnyJob, choices: Choices, generation: Generation, silence: Silence) -> AsyncIterator[bytes]:
    """The stream of an answer. It begins with the first token: until then a gateway may repeat the request."""
    begun, format, held = False, generation.format, Batch()
    try:
        async for batch in job.batches(silence.interval):
            if not batch:
                if filler := silence.data(begun):
                    yield filler
                continue
            held += batch
            if begun and not _is_piece(held, generation.stream_interval):
                continue
            data = list[bytes]()
            if not begun:
                begun = True
                data += format.begin(choices)
            batch, held = held, []
            for piece in choices.add(batch):
                data += format.piece(piece, usage(choices) if format.head.continuous_usage else None)
            if data:
                yield b"".join(data)
        yield b"".join(format.end(usage(choices), measurements(choices)))
    except ApiError as error:
        yield b"".join([*(() if begun else format.begin(choices)), *format.error(error)])
    finally:
        job.close()


def _is_piece(updates: Batch, tokens: int) -> bool:
    """Whether updates have so many tokens, or the last one of a request."""
    return any(u.finish_reason for _, _, u in updates) or sum(len(u.tokens) for _, _, u in updates) >= tokens


async def _collect(job: AnyJob, choices: Choices) -> list[Piece]:
    """The whole answer: one piece per choice."""
    updates: list[list[Update]] = [[] for _ in choices.all]
    async for batch in job.batches():
        choices.add(batch)
        for index, _, update in batch:
            updates[index].append(update)
    return [Piece.of(index, outputs) for index, outputs in enumerate(updates)]
