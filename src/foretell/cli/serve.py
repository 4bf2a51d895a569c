"""`foretell serve`: an OpenAI-compatible server."""

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretell.cli import options

if TYPE_CHECKING:
    from foretell.cli.setup import LongTextOptions, MethodSelection
    from foretell.serve.loaded import EngineSettings, LoadedModel

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
API_KEY_VARIABLE = "FORETELL_API_KEY"
"""Environment variable with API keys, separated by commas."""
CHEAP_FAMILIES = ("baseline", "retrieval")
"""Methods without weights of their own: requests may ask for them."""
DRAFTING_REQUESTS_ON_CPU = 2
"""Requests that draft at a time on a CPU: with more, passes are bound by arithmetic and drafts cost what they gain (two
cores, SmolLM2; docs/serving.md).
"""
NEEDED = ("starlette", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""


@app.command()
def serve(
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = None,
    request_method: Annotated[
        list[str] | None,
        typer.Option(
            "--request-method",
            metavar="NAME",
            help="Another method that requests may ask for, besides plain decoding and retrieval; repeatable.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any free one.")] = 8000,
    uds: Annotated[Path | None, typer.Option(metavar="PATH", help="Listen on a unix socket instead.")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", metavar="NAME", help="Name of the model in the API; repeatable."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", metavar="KEY", help=f"Ask for this key; repeatable. Also read from ${API_KEY_VARIABLE}."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for one of the keys in this file, one per line.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests decoded together.")] = 16,
    max_num_queued_reqs: Annotated[
        int, typer.Option("--max-num-queued-reqs", metavar="N", min=0, help="Most requests that wait; else 429.")
    ] = 256,
    max_num_queued_tokens: Annotated[
        int, typer.Option("--max-num-queued-tokens", metavar="N", min=1, help="Most prompt tokens that wait; else 429.")
    ] = 1 << 20,
    max_concurrency_per_key: Annotated[
        int, typer.Option("--max-concurrency-per-key", metavar="N", min=0, help="Requests at a time; 0: no limit.")
    ] = 0,
    itl_target_ms: Annotated[
        float,
        typer.Option(
            "--itl-target-ms",
            metavar="MS",
            min=0,
            help="Read prompts in chunks that keep the time between two tokens of running answers; 0: any.",
        ),
    ] = 0.0,
    disable_by_batch_size: Annotated[
        int | None,
        typer.Option(
            "--speculative-disable-by-batch-size",
            metavar="N",
            min=0,
            help="A request that finds so many others is decoded plainly, where that leaves the text of its seed as it "
            "is. Default: 2 on a CPU, else none.",
        ),
    ] = None,
    controller: Annotated[
        bool,
        typer.Option(help="Choose in every step which drafts of all requests are verified, by learned times."),
    ] = False,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-memory-bytes",
            metavar="N",
            min=1,
            help="Greatest size of the key-value cache. Where it is full, ended requests are forgotten, then running "
            "ones wait. Default: half of the free memory.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the cache of earlier requests with the same beginning; same bits as without.")
    ] = True,
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="SOURCE", help="Sampling defaults: auto (the model's generation_config.json), none, or a folder."
        ),
    ] = "auto",
    override_generation_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Sampling defaults that go before, as a JSON object.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Use chat templates of requests (sandboxed).")
    ] = False,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origins", metavar="ORIGIN", help="Let pages of this origin call (CORS); repeatable."),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of the TLS certificate.")] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="For running answers to end after SIGTERM.")
    ] = 30.0,
    metrics_prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics-prefix",
            metavar="NAME",
            help="Further prefix of the metrics, beside foretell; vllm for tools that read vLLM's.",
        ),
    ] = None,
    shadow_rate: Annotated[
        float,
        typer.Option(
            metavar="SHARE", min=0, max=1, help="Decode this share of the answers again plainly when idle, and compare."
        ),
    ] = 0.0,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log the texts of prompts and answers too.")
    ] = False,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads of the model.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    max_model_len: options.MaxModelLen = None,
    rope_scaling: options.RopeScaling = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    speculative_config: options.SpeculativeJson = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions, completions and responses, Anthropic's messages.

    It listens on 127.0.0.1:8000 and needs no option:

        foretell serve

        curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    SIGTERM lets running answers end; a second signal quits at once.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"the server needs {', '.join(missing)}; run: pip install 'foretell[serve]'")
    from foretell.cli.setup import LongTextOptions, parse_method, set_threads
    from foretell.serve.app import create_app
    from foretell.serve.auth import read_keys
    from foretell.serve.loaded import EngineSettings
    from foretell.serve.metrics.request_log import log_as_json
    from foretell.serve.run import Address
    from foretell.serve.run import serve as run
    from foretell.serve.service import Service
    from foretell.serve.settings import Limits, ServerSettings, Timeouts

    set_threads(threads)
    log_as_json()
    settings = ServerSettings(
        served_names=tuple(served_model_name or (model,)),
        api_keys=read_keys(api_key or (), api_key_file, os.environ.get(API_KEY_VARIABLE, "")),
        cors_origins=tuple(allowed_origins or ()),
        trust_request_chat_template=trust_request_chat_template,
        limits=Limits(
            max_num_seqs=max_num_seqs,
            queued_requests=max_num_queued_reqs,
            queued_tokens=max_num_queued_tokens,
            per_key=max_concurrency_per_key,
        ),
        timeouts=Timeouts(shutdown=shutdown_timeout),
        metrics_prefixes=tuple(metrics_prefix or ()),
        shadow_rate=shadow_rate,
        log_requests=log_requests,
    )
    selection = parse_method(method, speculative_config, draft_model)
    load = partial(
        _load,
        model,
        dtype,
        device,
        selection,
        tuple(reference or ()),
        LongTextOptions(max_model_len, rope_scaling, kv_cache_dtype),
        EngineSettings(
            rows=max_num_seqs,
            prefix_caching=enable_prefix_caching,
            itl_target=itl_target_ms / 1000 or None,
            cache_bytes=kv_cache_memory_bytes,
            controls_drafts=controller,
            disable_by_batch_size=disable_by_batch_size,
        ),
        (generation_config, override_generation_config),
        tuple(request_method or ()),
    )
    service = Service(settings, load)

    def announce(url: str) -> None:
        loaded = service.loaded
        name = f"{settings.served_names[0]} ({loaded.fingerprint}, {loaded.methods.default})"
        typer.echo(f"foretell: {name} answers on {url}", err=True)

    run(create_app(service), service, Address(host, port, uds, ssl_certfile, ssl_keyfile), announce)


def _load(
    model: str,
    dtype: str,
    device: str,
    selection: "MethodSelection",
    references: tuple[Path, ...],
    long_text: "LongTextOptions",
    engine: "EngineSettings",
    generation_config: tuple[str, str | None],
    allowed: tuple[str, ...],
) -> "LoadedModel":
    """Load what the server serves."""
    from foretell.catalogue import catalogue, find
    from foretell.catalogue.config import SpeculativeConfig
    from foretell.cli.setup import load_models
    from foretell.load import resolve_reference
    from foretell.model.load.memory import available_memory
    from foretell.serve.defaults import read_defaults
    from foretell.serve.fingerprint import system_fingerprint
    from foretell.serve.loaded import LoadedModel, Methods

    path = resolve_reference(model)
    defaults = read_defaults(generation_config[0], path, generation_config[1])
    setup = load_models(model, dtype, device, selection, references, long_text=long_text)
    # The options of the command line are for the method that it named.
    others = replace(setup, config=SpeculativeConfig())
    cheap = {entry.name for entry in catalogue().values() if entry.family in CHEAP_FAMILIES}
    methods = Methods(
        lambda name: (setup if name == selection.name else others).method(name),
        selection.name,
        cheap | {find(name).name for name in allowed},
    )
    methods.get(selection.name)
    runner, memory = setup.model.runner(), available_memory()
    if engine.cache_bytes is None and runner.shares_prefixes and memory is not None:
        engine = replace(engine, cache_bytes=memory // 2)
    if engine.disable_by_batch_size is None and runner.backend.device == "cpu":
        engine = replace(engine, disable_by_batch_size=DRAFTING_REQUESTS_ON_CPU)
    return LoadedModel(setup.model, methods, engine, system_fingerprint(path, runner.backend), defaults)
