"""The server's state: the model, its engine, and what may be admitted."""

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from foretell.serve.errors import ApiError, bad_request, overloaded, unavailable
from foretell.serve.event_buffer import Event
from foretell.serve.jobs import Jobs, RequestObserver
from foretell.serve.loaded import LoadedModel
from foretell.serve.metrics.registry import MetricTables
from foretell.serve.metrics.rejections import Rejections
from foretell.serve.metrics.request_log import RequestLog
from foretell.serve.metrics.requests import ENGINE, RequestMetrics
from foretell.serve.metrics.steps import StepMetrics
from foretell.serve.prompts import PromptEncoder
from foretell.serve.settings import ServerSettings
from foretell.serve.shadow import ShadowVerifier
from foretell.serve.token_text import TokenTexts
from foretell.serve.worker import EngineWorker

if TYPE_CHECKING:
    from foretell.serve.metrics.traces import RequestTraces

log = logging.getLogger(__name__)
T = TypeVar("T")


class State(Enum):
    """What the server does."""

    LOADING = "the model is being loaded"
    SERVING = "serving"
    DRAINING = "the server is shutting down"
    STOPPED = "the server has stopped"


class Service:
    """One model with its engine. All methods run in the event loop.

    `load` is called once, in a thread.
    """

    def __init__(self, settings: ServerSettings, load: Callable[[], LoadedModel]) -> None:
        self.settings, self._load = settings, load
        self.created = int(time.time())
        self.pool = ThreadPoolExecutor(settings.tokenizer_threads, "foretell-tokenizer")
        self.state = State.LOADING
        self.metrics = MetricTables(settings.metrics_prefixes)
        self.labels = settings.served_names[0], ENGINE
        """Of most metrics: the model's name, and vLLM's label of an engine."""
        self.rejections = Rejections(self.metrics, self.labels)
        self._loaded: LoadedModel | None = None
        self._worker: EngineWorker | None = None
        self._jobs: Jobs | None = None
        self._traces: RequestTraces | None = None

    async def start(self) -> None:
        """Load the model and start the engine.

        Raises:
            ValueError: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        # In a thread that ends: while a second thread keeps threads of OpenMP, those of the engine sleep between its
        # kernels, which costs a tenth of a step.
        with ThreadPoolExecutor(1, "foretell-load") as pool:
            loaded = await loop.run_in_executor(pool, self._load)
        self._loaded = loaded
        self.encoder = PromptEncoder(
            loaded.model.codec,
            loaded.model.config.context,
            self.settings.limits,
            self.settings.trust_request_chat_template,
            self.settings.syntaxes,
            loaded.model.vision,
        )
        self.texts = TokenTexts(loaded.model.codec)
        metrics = RequestMetrics(self.metrics, self.labels, loaded.method_name)
        steps = StepMetrics(self.metrics, self.labels)
        decode = loaded.model.codec.decode if self.settings.log_requests else None
        self._worker = EngineWorker(
            loaded.make_engine,
            lambda events: _call(loop, partial(self._receive, events)),
            lambda error: _call(loop, partial(self._engine_failed, metrics)),
            self.settings.timeouts.restart,
            steps.step,
            self.settings.stream_interval,
        )
        self._shadow = ShadowVerifier(
            self.settings.shadow_rate, self.metrics, loaded.method_of, self._worker, lambda: self.jobs.live == 0
        )
        observers: list[RequestObserver] = [metrics, RequestLog(loaded.method_name, decode), self._shadow]
        if self.settings.otlp_traces_endpoint is not None:
            from foretell.serve.metrics.traces import RequestTraces

            self._traces = RequestTraces.to_collector(
                self.settings.served_names[0], loaded.method_name, self.settings.otlp_traces_endpoint
            )
            observers.append(self._traces)
        self._jobs = Jobs(self._worker, observers, metrics.closed)
        metrics.show_engine(
            lambda: None if self._worker is None else self._worker.engine,
            lambda: self.jobs.live,
            lambda: self.jobs.paused,
        )
        self._worker.start()
        if self.state is State.LOADING:
            self.state = State.SERVING

    def _receive(self, events: Sequence[Event]) -> None:
        self.jobs.receive(self._shadow.receive(events))

    def _engine_failed(self, metrics: RequestMetrics) -> None:
        metrics.engine_failed()
        self._shadow.engine_failed()
        self.jobs.engine_failed()

    async def stop(self) -> None:
        """End what runs, and the engine's thread."""
        self.state = State.STOPPED
        if self._jobs is not None:
            self._jobs.fail_all(unavailable(self.state.value))
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.model.pass_times.close)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.shutdown)
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Refuse new requests, and wait for the running ones as long as the settings say."""
        self.state = State.DRAINING
        if self._jobs is not None:
            await self._jobs.drain(self.settings.timeouts.shutdown)

    @property
    def loaded(self) -> LoadedModel:
        """The model.

        Raises:
            ApiError: it is still being loaded.
        """
        if self._loaded is None:
            raise unavailable(self.state.value, 1)
        return self._loaded

    @property
    def jobs(self) -> Jobs:
        """All jobs."""
        assert self._jobs is not None
        return self._jobs

    @property
    def ready(self) -> bool:
        """Whether requests can be served."""
        try:
            self.check_ready()
        except ApiError:
            return False
        return True

    def check_ready(self) -> None:
        """Raise `ApiError` (503) unless requests can be served."""
        if self.state is not State.SERVING or self._worker is None:
            raise unavailable(self.state.value, 1 if self.state is State.LOADING else None)
        if not self._worker.ready:
            raise unavailable("the engine is being started", 1)
        silent = time.monotonic() - self._worker.heartbeat
        if silent > self.settings.timeouts.heartbeat:
            raise unavailable(f"the engine has not answered for {silent:.0f} s")

    def check_model(self, name: str | None) -> str:
        """The served name that a request means; the first one if it names none.

        Raises:
            ApiError: there is no such model.
        """
        names = self.settings.served_names
        if name is None or name in names:
            return name or names[0]
        shown = name if len(name) <= 100 else name[:100] + "…"
        raise ApiError(
            404, f"the model {shown!r} does not exist; this server has {', '.join(names)}", "model", "model_not_found"
        )

    def admit_request(self) -> None:
        """Raise `ApiError` (429) if the queue is full; called before any work is done for a request."""
        limits = self.settings.limits
        queued = self.jobs.live - limits.max_num_seqs
        if queued >= limits.queued_requests:
            self.rejections.count("queue")
            raise overloaded(f"{queued} requests are waiting; try again later", self._retry_after(queued))

    def admit_tokens(self, tokens: int, requests: int) -> None:
        """Raise `ApiError` if requests with so many prompt tokens do not fit the queue."""
        limits = self.settings.limits
        if requests > limits.choices:
            raise bad_request(f"n asks for {requests} answers, and this server gives at most {limits.choices}", "n")
        if self.jobs.live and self.jobs.unread_tokens + tokens > limits.queued_tokens:
            queued = self.jobs.live - limits.max_num_seqs
            self.rejections.count("tokens")
            raise overloaded(
                f"prompts of {self.jobs.unread_tokens} tokens are waiting; try again later", self._retry_after(queued)
            )

    def _retry_after(self, queued: int) -> int:
        """Seconds after which a client should come back: one per full batch that waits."""
        return 1 + math.ceil(max(queued, 0) / self.settings.limits.max_num_seqs)

    async def in_pool(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the pool of tokenizer threads, with the context variables of the request."""
        run = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self.pool, run)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function in the loop; a closed loop has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        log.debug("the event loop is closed")
