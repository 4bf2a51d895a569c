"""`foretell serve`: an OpenAI-compatible server."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from foretell.cli import options
from foretell.cli.given import refuse_unused
from foretell.serve.settings import EngineSettings, Limits, ServerSettings, SyntaxNames, Timeouts
from foretell.utils.names import unknown

app = typer.Typer(pretty_exceptions_enable=False)
API_KEY_VARIABLE = "FORETELL_API_KEY"
"""Environment variable with API keys, separated by commas."""
DEFAULT_REPLICAS = 2
NEEDED = ("starlette", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""


@app.command()
@options.with_target()
@options.with_settings(Limits(), "limits")
@options.with_settings(Timeouts(), "timeouts")
@options.with_settings(ServerSettings(()), "own")
@options.with_settings(EngineSettings(), "engine")
@options.with_settings(SyntaxNames(), "syntaxes")
def serve(
    ctx: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = None,
    request_method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another method that requests may ask for, besides plain decoding and retrieval; repeatable.",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run replicas of the engine in processes of their own, by Ray Serve.")
    ] = False,
    replicas: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --ray: how many. Default: 2.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any free one.")] = 8000,
    uds: Annotated[Path | None, typer.Option(metavar="PATH", help="Listen on a unix socket instead.")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name of the model in the API; repeatable."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help=f"Ask for this key; repeatable. Also read from ${API_KEY_VARIABLE}."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for one of the keys in this file, one per line.")
    ] = None,
    limits: options.Settings = options.NO_SETTINGS,
    itl_target_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0,
            help="Read prompts in chunks that keep the time between two tokens of running answers, and new requests "
            "from waiting; 0: in chunks of 512 tokens.",
        ),
    ] = 250.0,
    stream_interval_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            min=0,
            help="Least time between two pieces of a stream, beside its first and last one; 0: a piece per pass.",
        ),
    ] = 10.0,
    engine: options.Settings = options.NO_SETTINGS,
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="SOURCE", help="Sampling defaults: auto (the model's generation_config.json), none, or a folder."
        ),
    ] = "auto",
    override_generation_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Sampling defaults that go before, as a JSON object.")
    ] = None,
    syntaxes: options.Settings = options.NO_SETTINGS,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of this origin call (CORS); repeatable."),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name that clients call the server by, beside addresses and localhost; repeatable. Default: any on a "
            "public --host, none on 127.0.0.1.",
        ),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of the TLS certificate.")] = None,
    timeouts: options.Settings = options.NO_SETTINGS,
    own: options.Settings = options.NO_SETTINGS,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="CPU threads of the model; with --ray, of each replica.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    draft_model: options.DraftModel = None,
    reference: options.Reference = None,
    target: options.Target = options.NO_TARGET,
    speculative_config: options.SpeculativeJson = None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions, completions and responses, Anthropic's messages.

    It listens on 127.0.0.1:8000 and needs no option:

        foretell serve

        curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    SIGTERM lets running answers end; a second signal quits at once.
    """
    _check_packages(ray)
    from foretell.cli.serve_plan import ServePlan
    from foretell.cli.served_model import ServedModel
    from foretell.cli.setup import parse_method
    from foretell.core.target_options import TargetOptions
    from foretell.model.load.adapter import adapter_name
    from foretell.serve.auth import read_keys
    from foretell.serve.origin import is_local
    from foretell.serve.run import Address

    _check_traces(own["otlp_traces_endpoint"])
    refuse_unused(ctx, ("host", "port"), "--uds listens on a unix socket", uds is not None)
    loras = [(adapter_name(each).name, each) for each in target["lora"]]
    names = [*(served_model_name or (model,)), *(name for name, _ in loras if name is not None)]
    if len(set(names)) < len(names):
        raise ValueError(f"the models of this server need names of their own, found {', '.join(names)}")
    merged, beside = (tuple(each for name, each in loras if (name is None) == whole) for whole in (True, False))
    settings = ServerSettings(
        served_names=tuple(names),
        api_keys=read_keys(api_key or (), api_key_file, os.environ.get(API_KEY_VARIABLE, "")),
        cors_origins=tuple(allowed_origins or ()),
        allowed_hosts=tuple(allowed_hosts or ()) if allowed_hosts or (is_local(host) and uds is None) else None,
        syntaxes=_syntaxes(**syntaxes),
        limits=Limits(**limits),
        timeouts=Timeouts(**timeouts),
        stream_interval=stream_interval_ms / 1000,
        **own,
    )
    served = ServedModel(
        model=model,
        dtype=dtype,
        device=device,
        selection=parse_method(method, speculative_config, draft_model),
        references=tuple(reference or ()),
        target_options=TargetOptions(**{**target, "lora": merged}, adapters=beside),
        engine=EngineSettings(limits["max_num_seqs"], itl_target_ms / 1000 or None, **engine),
        generation_config=generation_config,
        override_generation_config=override_generation_config,
        allowed=tuple(request_method or ()),
        threads=threads,
    )
    address = Address(host, port, uds, ssl_certfile, ssl_keyfile)
    if replicas is not None and not ray:
        raise ValueError(f"--replicas {replicas} needs --ray, which runs each replica in a process of its own")
    plan = ServePlan(settings, served, address, (replicas or DEFAULT_REPLICAS) if ray else None)
    # Who reads a command line without running it gives what to do with the plan.
    (ctx.obj or ServePlan.run)(plan)


def _check_packages(ray: bool) -> None:
    for extra, names in (("serve", NEEDED), ("ray", ("ray",) if ray else ())):
        if missing := [name for name in names if find_spec(name) is None]:
            raise ValueError(f"the server needs {', '.join(missing)}; run: pip install 'foretell[{extra}]'")


def _check_traces(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        from foretell.serve.metrics.traces import check_endpoint
    except ImportError:
        raise ValueError("traces need OpenTelemetry; run: pip install 'foretell[otel]'") from None
    check_endpoint(endpoint)


def _syntaxes(tools: str | None, reasoning: str | None) -> SyntaxNames:
    """The names of syntaxes, if they are known ones."""
    from foretell.serve.reasoning import NONE, REASONING_SYNTAXES
    from foretell.serve.tools.syntax import TOOL_SYNTAXES

    for kind, name, known in (
        ("tool call parser", tools, [*TOOL_SYNTAXES]),
        ("reasoning parser", reasoning, [*REASONING_SYNTAXES, NONE]),
    ):
        if name is not None and name not in known:
            raise unknown(kind, name, known)
    return SyntaxNames(tools, reasoning)
