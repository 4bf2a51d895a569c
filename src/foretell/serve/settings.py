"""Settings of a server: names, limits and keys."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a request may ask for; checked before work is done for it."""

    connections: int = 4096
    """HTTP connections at a time; above it idle ones are closed."""
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
    max_num_seqs: int = 16
    """Requests that are decoded together."""
    queued_requests: int = 256
    queued_tokens: int = 1 << 20
    """Prompt tokens of the requests that have no answer yet."""
    per_key: int = 0
    """Concurrent HTTP requests of one API key; 0: no limit."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds."""

    shutdown: float = 30.0
    """For running requests to end after SIGTERM."""
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

    tools: str | None = None
    reasoning: str | None = None


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
    trust_request_chat_template: bool = False
    syntaxes: SyntaxNames = SyntaxNames()
    reasoning_budget: int | None = None
    """Most tokens of reasoning of an answer whose request names no number; None: any number."""
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tokenizer_threads: int = 2
    stream_interval: float = 0.01
    """Least seconds between two pieces of a stream, beside its first and last one; tokens that come meanwhile are sent
    together.
    """
    metrics_prefixes: tuple[str, ...] = ()
    """Further prefixes of the metrics with vLLM's names, beside `foretell`."""
    shadow_rate: float = 0.0
    """Share of the finished answers that are decoded again plainly while the engine is idle."""
    otlp_traces_endpoint: str | None = None
    """Address of the OpenTelemetry collector that gets a span per request; None: there is none."""
    log_requests: bool = False
    """Log the texts of prompts and answers."""
