"""Settings of a server: names, limits and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from foretell.utils.options import Option


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; checked before work is done for it."""

    connections: Annotated[
        int, Option("HTTP connections at a time; above it idle ones are closed.", "N", "--max-connections", 1)
    ] = 4096
    head_bytes: int = 1 << 16
    """Request line and headers of a request."""
    body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    """Longest time that the body of a request may take to arrive."""
    messages: int = 2048
    images: int = 8
    tools: int = 512
    nesting: int = 64
    """Levels of objects and arrays in messages, tools and variables of a chat template."""
    prompts: int = 256
    """Prompts of one completion request."""
    choices: int = 64
    """Prompts times `n`."""
    stop_strings: int = 16
    stop_chars: int = 1024
    """Of one stop string."""
    bad_words: int = 1024
    bad_word_chars: int = 1024
    """Of one bad word."""
    top_logprobs: int = 20
    """Also of the tokens of a prompt."""
    chars_per_token: int = 8
    """A prompt of more characters per token of context is refused before it is encoded."""
    max_num_seqs: Annotated[int, Option("Most requests decoded together.", "N", least=1)] = 16
    queued_requests: Annotated[int, Option("Most requests that wait; else 429.", "N", "--max-num-queued-reqs", 0)] = 256
    queued_tokens: Annotated[
        int, Option("Most prompt tokens that wait; else 429.", "N", "--max-num-queued-tokens", 1)
    ] = 1 << 20
    per_key: Annotated[
        int, Option("HTTP requests of a key at a time; 0: no limit.", "N", "--max-concurrency-per-key", 0)
    ] = 0


@dataclass(frozen=True)
class Timeouts:
    """Seconds."""

    shutdown: Annotated[
        float, Option("For running answers to end after SIGTERM.", "SECONDS", "--shutdown-timeout", 0)
    ] = 30.0
    keep_alive_interval: float = 15.0
    """Between the comments that keep a silent stream open."""
    head: float = 30.0
    """For the head of a request, from the connection or from the last answer on."""
    stalled_reader: float = 120.0
    """A client that reads nothing of its answer for so long is cut off, and its request is cancelled."""
    heartbeat: float = 120.0
    """The engine counts as hung if one step takes longer."""
    restart: float = 1.0
    """Between a crash of the engine and its restart."""


@dataclass(frozen=True)
class SyntaxNames:
    """Names of how the model writes calls and reasoning; None: the chat template shows it."""

    tools: Annotated[
        str | None,
        Option(
            "How the model writes calls of tools, by vLLM's name. Default: as its template shows.",
            "NAME",
            "--tool-call-parser",
        ),
    ] = None
    reasoning: Annotated[
        str | None,
        Option(
            "How the model marks its reasoning, by vLLM's name, or none: it is part of the answer. Default: as its "
            "template shows.",
            "NAME",
            "--reasoning-parser",
        ),
    ] = None


@dataclass(frozen=True)
class EngineSettings:
    """How the server's engines run; see `Engine`."""

    rows: int = 16
    """Requests that are decoded together."""
    itl_target: float | None = 0.25
    """Seconds between two tokens of an answer that chunks of prompts leave room for (a reader sees text come); None:
    any.
    """
    disable_by_batch_size: Annotated[
        int | None,
        Option(
            "A request beside so many others gets no drafts, where that leaves the text of its seed as it is. Default: "
            "any number; the server drafts where measured times say that it pays.",
            "N",
            "--speculative-disable-by-batch-size",
            0,
        ),
    ] = None
    cache_bytes: Annotated[
        int | None,
        Option(
            "Greatest size of the key-value cache. Where it is full, ended requests are forgotten, then running ones "
            "wait. Default: half of the free memory.",
            "N",
            "--kv-cache-memory-bytes",
            1,
        ),
    ] = None
    prefix_caching: Annotated[
        bool,
        Option(
            "Reuse the cache of earlier requests with the same beginning; same bits as without.",
            name="--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and keys of a server."""

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    cors_origins: tuple[str, ...] = ()
    """Origins that may call from a browser; `*`: every one. Empty: none."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names that clients may call the server by, beside IP addresses and localhost; None: any."""
    trust_request_chat_template: Annotated[bool, Option("Use chat templates of requests (sandboxed).")] = False
    syntaxes: SyntaxNames = SyntaxNames()
    reasoning_budget: Annotated[
        int | None,
        Option("Most tokens of reasoning, where a request names no number. Default: any number.", "N", least=0),
    ] = None
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tokenizer_threads: int = 2
    stream_interval: float = 0.01
    """Least seconds between two pieces of a stream, beside its first and last one; tokens that come meanwhile are sent
    together.
    """
    metrics_prefixes: Annotated[
        Sequence[str],
        Option(
            "Further prefix of the metrics, beside foretell; vllm for tools that read vLLM's. Repeatable.",
            "NAME",
            "--metrics-prefix",
        ),
    ] = ()
    shadow_rate: Annotated[
        float, Option("Decode this share of the answers again plainly when idle, and compare.", "SHARE", "", 0, 1)
    ] = 0.0
    otlp_traces_endpoint: Annotated[
        str | None,
        Option("Send a span per request to this OpenTelemetry collector, as http://127.0.0.1:4318/v1/traces.", "URL"),
    ] = None
    log_requests: Annotated[bool, Option("Log the texts of prompts and answers too.")] = False
