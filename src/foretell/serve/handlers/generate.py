"""Runs the engine's requests of one HTTP request and writes the answer: as one object, or as a stream."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from foretell.engine.request import Request, Update
from foretell.serve.choices import Choices, Piece
from foretell.serve.errors import CLIENT_CLOSED_REQUEST, ApiError
from foretell.serve.formats.base import AnswerFormat
from foretell.serve.jobs import Job
from foretell.serve.service import Service
from foretell.serve.sse import EventStream, disconnected
from foretell.serve.usage import measurements, usage


@dataclass(frozen=True)
class Plan:
    """What to generate, and how to write it."""

    requests: Sequence[Request]
    per_prompt: int
    """Choices of each prompt."""
    format: AnswerFormat
    stream: bool
    headers: Mapping[str, str]


async def respond(service: Service, http: HttpRequest, plan: Plan) -> ASGIApp:
    """Generate, and answer.

    Raises:
        ApiError: the server is overloaded, the client went away, or the engine failed.
    """
    service.admit_tokens(sum(len(r.prompt) for r in plan.requests), len(plan.requests))
    job = service.jobs.open(plan.requests)
    choices = Choices(plan.requests, plan.per_prompt, job.started)
    if plan.stream:
        timeouts = service.settings.timeouts
        events = _events(job, choices, plan.format, timeouts.keep_alive_interval)
        return EventStream(events, plan.headers, timeouts.stalled_reader)
    try:
        pieces = await _until_disconnect(http, _collect(job, choices))
    finally:
        job.close()
    body = plan.format.complete(choices, pieces, usage(choices), measurements(choices))
    return Response(to_json(body, inf_nan_mode="null"), headers=dict(plan.headers), media_type="application/json")


async def _events(job: Job, choices: Choices, format: AnswerFormat, interval: float) -> AsyncIterator[bytes]:
    try:
        for data in format.begin(choices):
            yield data
        async for batch in job.batches(interval):
            if not batch:
                for data in format.ping():
                    yield data
            for piece in choices.add(batch):
                for data in format.piece(piece, usage(choices) if format.head.continuous_usage else None):
                    yield data
        for data in format.end(usage(choices), measurements(choices)):
            yield data
    except ApiError as error:
        for data in format.error(error):
            yield data
    finally:
        job.close()


async def _collect(job: Job, choices: Choices) -> list[Piece]:
    """The whole answer: one piece per choice."""
    updates: list[list[Update]] = [[] for _ in choices.all]
    async for batch in job.batches():
        choices.add(batch)
        for index, _, update in batch:
            updates[index].append(update)
    return [Piece.of(index, found) for index, found in enumerate(updates)]


async def _until_disconnect(http: HttpRequest, work: "asyncio._CoroutineLike[list[Piece]]") -> list[Piece]:
    """The result of `work`, which is cancelled when the client goes away."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(disconnected(http.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
