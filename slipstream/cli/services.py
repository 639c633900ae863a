"""`slipstream sglang` and `slipstream gateway`: the two halves of `slipstream serve --engine sglang` as services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from serving.capture.sampling import DEFAULT_FLOOR
from slipstream.cli import options as options
from slipstream.cli.options import Model, RedisUrl, Store
from slipstream.logs import configure_logs
from slipstream.models import resolve_model
from slipstream.start import effects
from slipstream.start.shared_defaults import DEFAULT_REDIS_URL, DEFAULT_STREAM_MAX_BYTES
from speculator.errors import ConfigError
from speculator.tracing import configure_spans

EngineId = Annotated[
    str, typer.Option(envvar="SLIPSTREAM_ENGINE_ID", help="Names this SGLang in Redis; both services need the same.")
]
Depth = Annotated[int, typer.Option(min=1, max=5, help="Most proposals a round.")]


def sglang(
    model: Model,
    context: typer.Context,
    sglang_arguments: options.SglangArguments = None,
    name: options.Name = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of SGLang.")] = 30000,
    private_network: Annotated[
        bool, typer.Option("--private-network", help="Nobody but the gateway and Prometheus reaches --host.")
    ] = False,
    engine_id: EngineId = "sglang",
    capture: options.Capture = False,
    capture_floor: options.CaptureFloor = DEFAULT_FLOOR,
    trace_ttl_hours: options.TraceTtl = 0,
    capture_filter: options.CaptureFilter = None,
    depth: Depth = 4,
    control_share: options.ControlShare = 0.02,
    context_window: options.ContextWindow = 512,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Number type of the target.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    stream_max_bytes: options.StreamMaxBytes = DEFAULT_STREAM_MAX_BYTES,
    sglang_python: options.SglangPython = None,
    capture_bytes_per_s: options.CaptureBytes = 0,
) -> None:
    """Become SGLang with the plugin and the store's last good draft; `slipstream gateway` stands in front of it.

    The store needs a version: `slipstream draft init --store` writes the first.
    """
    configure_logs()
    effects.check_options(context, effects.SGLANG)
    effects.warn_of_unread_variables()
    from slipstream.start.exposure import check_sglang_exposure
    from slipstream.start.sglang_server import SglangStart, become_sglang
    from speculator.draft.checkpoint import model_name

    check_sglang_exposure(host, redis_url, is_private=private_network)
    model_dir = resolve_model(model)
    become_sglang(
        SglangStart(
            python=sglang_python,
            model_dir=model_dir,
            model_name=name or model_name(model_dir),
            dtype=dtype,
            device=device,
            depth=depth,
            capture=capture,
            trace_ttl_hours=trace_ttl_hours,
            capture_filter=capture_filter,
            control_share=control_share,
            context_window=context_window,
            capture_bytes_per_s=capture_bytes_per_s,
            capture_floor=capture_floor,
            store=store,
            redis_url=redis_url,
            stream_max_bytes=stream_max_bytes,
            extra=tuple(sglang_arguments or ()),
        ),
        host=host,
        port=port,
        engine_id=engine_id,
    )


def gateway(
    model: Model,
    context: typer.Context,
    sglang: Annotated[
        list[str],
        typer.Option(
            help="Address of an SGLang that `slipstream sglang` started, or of a router before several. With --pool "
            "once for each router before the same engines: the first that can be reached is asked."
        ),
    ],
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    engine_id: EngineId = "sglang",
    pool: Annotated[
        bool,
        typer.Option("--pool", help="An sglang-router is at each --sglang; every engine that reports is behind it."),
    ] = False,
    start_timeout_s: options.StartTimeout = 1200,
) -> None:
    """Serve the OpenAI-compatible gateway in front of an SGLang that runs as a service of its own, or of a pool."""
    configure_logs()
    configure_spans("slipstream-gateway")
    effects.check_options(context, effects.GATEWAY)
    effects.warn_of_unread_variables()
    from serving.gateway.config import load_settings
    from slipstream.start.gateway import GatewayOptions, run_gateway

    if len(sglang) > 1 and not pool:
        raise ConfigError("--sglang more than once is for routers before the same engines: pass --pool, or it once")
    run_gateway(
        GatewayOptions(
            sglang_urls=tuple(url.rstrip("/") for url in sglang),
            engine_id=None if pool else engine_id,
            model_dir=resolve_model(model),
            store=store,
            redis_url=redis_url,
            host=host,
            port=port,
            start_timeout_s=start_timeout_s,
        ),
        load_settings(),
    )
