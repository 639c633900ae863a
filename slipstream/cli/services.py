"""The commands `slipstream serve`, `train`, and `sglang` and `gateway`, the parts of `serve` as separate services."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from serving.capture.sampling import DEFAULT_BRANCH_SHARE, DEFAULT_FLOOR
from slipstream.cli import effects
from slipstream.cli import options as options
from slipstream.cli.config import Config
from slipstream.cli.effects import check_options, check_variables, warn_of_unread_variables
from slipstream.cli.options import Depth, DraftVocab, Model, RedisUrl, Store, SuffixDepth, VocabFrom, finite
from slipstream.models import checked_fingerprint, resolve_model
from slipstream.settings import DEFAULT_REDIS_URL
from slipstream.terminal import spinner
from speculator.errors import ConfigError
from speculator.tracing import configure_spans

if TYPE_CHECKING:
    from serving.gateway.config import GatewaySettings
    from slipstream.start.learning import Learning


def serve(
    context: typer.Context,
    model: Model,
    sglang_arguments: options.SglangArguments = None,
    config: Config = None,
    engine: options.Engine = "local",
    learn: options.Learn = False,
    data_dir: options.DataDir = None,
    name: options.Name = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    root_path: options.RootPath = None,
    api_key: options.ApiKey = None,
    capture: options.Capture = False,
    capture_floor: options.CaptureFloor = DEFAULT_FLOOR,
    trace_ttl_hours: options.TraceTtl = 0,
    capture_filter: options.CaptureFilter = None,
    depth: Depth = 4,
    control_share: options.ControlShare = 0.02,
    plain_share: options.PlainShare = 0.03,
    context_window: options.ContextWindow = 512,
    branch_share: options.BranchShare = DEFAULT_BRANCH_SHARE,
    draft_vocab_size: DraftVocab = None,
    vocab_from: VocabFrom = None,
    dtype: options.ServeDtype = "bfloat16",
    device: options.Device = None,
    stream_max_bytes: options.StreamMaxBytes = 0,
    seed: options.Seed = None,
    slots: options.Slots = 8,
    context_length: options.ContextLength = 2048,
    threads: options.Threads = None,
    suffix_depth: SuffixDepth = 16,
    share_groups: options.ShareGroups = False,
    head_off_share: options.HeadOffShare = 0,
    sglang_python: options.SglangPython = None,
    capture_bytes_per_s: options.CaptureBytes = 0,
    start_timeout_s: options.StartTimeout = 1200,
) -> None:
    """Serve a model behind the OpenAI-compatible gateway, with the store's draft or a fresh one."""
    configure_spans("slipstream-gateway")
    from slipstream.demo.topics import read_texts

    if learn:
        context.params["capture"] = True
    options.check_together(context)
    given = _given(context)
    given["vocab_texts"] = read_texts(vocab_from) if vocab_from else []
    with (
        spinner(f"loading {given['model_name']}") as is_loaded,
        _learning(context, given) if learn else nullcontext() as learning,
    ):

        def begin(url: str) -> None:
            is_loaded()
            if learning is not None:
                learning.start(url)

        given |= {"on_serving": begin}
        if learning is not None:
            given |= {"redis_url": learning.redis_url, "store": learning.store}
            given["trainer_status"] = learning.trainer_status
        _serve(given)


def _learning(context: typer.Context, given: Mapping[str, Any]) -> Learning:
    """The `Learning` of `serve --learn`."""
    from slipstream.start.learning import Learning, default_data_dir

    def named(option: str) -> Any:
        return None if is_in_data_dir(context, option) else given[option]

    return Learning(
        given["data_dir"] or default_data_dir(given["model_name"]),
        model=str(given["model_dir"]),
        redis_url=named("redis_url"),
        store=named("store"),
        trace_ttl_hours=None if source_of(context, "trace_ttl_hours") == "DEFAULT" else given["trace_ttl_hours"],
    )


def source_of(context: typer.Context, option: str) -> str:
    """The name of click's source: COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (the file of `--config`) or DEFAULT."""
    found = context.get_parameter_source(option)
    return "DEFAULT" if found is None else found.name


def is_in_data_dir(context: typer.Context, option: str) -> bool:
    """Whether `serve --learn` keeps its Redis or store in the data folder: none is given, or only a variable or a file
    gives one, and the folder was typed.
    """
    source = source_of(context, option)
    return source == "DEFAULT" or (source != "COMMANDLINE" and source_of(context, "data_dir") == "COMMANDLINE")


def _serve(given: Mapping[str, Any]) -> None:
    if given["engine"] == "sglang":
        from serving.sglang.outside.launcher import SglangStart
        from slipstream.start.gateway import run_sglang_server

        device = given["device"] or "cuda"
        run_sglang_server(
            SglangStart(**_fields(SglangStart, {**given, "device": device})),
            _gateway_settings(effects.GATEWAY_IN_FRONT, given),
            # The trainer takes the same GPU unless it is set to the CPU.
            shares_gpu=given["learn"] and device == "cuda" and os.environ.get(f"{_PREFIX}DEVICE") != "cpu",
            **_fields(run_sglang_server, given),
        )
    else:
        from serving.local.config import LocalEngineConfig
        from slipstream.start.local import ServeOptions, run_server

        engine = {"device": given["device"] or "cpu", "num_slots": given["slots"], "num_threads": given["threads"]}
        config = LocalEngineConfig(**_fields(LocalEngineConfig, {**given, **engine}))
        served = ServeOptions(**_fields(ServeOptions, {**given, "engine": config}))
        run_server(served, _gateway_settings(effects.GATEWAY_OF_LOCAL, given), **_fields(run_server, given))


def _given(context: typer.Context) -> dict[str, Any]:
    """A command's options, with the names of the dataclass fields that take them."""
    with spinner("starting"):
        warn_of_unread_variables()
        from speculator.draft.checkpoint import model_name

    given = dict(context.params)
    model_dir = resolve_model(given["model"])
    return given | {
        "model_dir": model_dir,
        "model_name": given["name"] or model_name(model_dir),
        "python": Path(given["sglang_python"]) if given["sglang_python"] else None,
        "extra": tuple(given["sglang_arguments"] or ()),
    }


def _fields(kind: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in inspect.signature(kind).parameters if name in given}


def _gateway_settings(rules: Iterable[effects.Rule], given: Mapping[str, Any]) -> GatewaySettings:
    """Gateway settings from the environment and the command line. Raises ConfigError for a variable that is invalid or
    for another engine.
    """
    from serving.gateway.config import load_settings

    settings = load_settings(**_fields(load_settings, given))
    check_variables(settings, rules)
    return settings


EngineId = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_ENGINE_ID", help="Name of this SGLang in Redis; `sglang` and `gateway` need the same."
    ),
]
SglangDepth = Annotated[int, typer.Option(min=1, max=5, help="Maximum proposals of the draft head per round.")]


def sglang(
    model: Model,
    context: typer.Context,
    sglang_arguments: options.SglangArguments = None,
    config: Config = None,
    name: options.Name = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of SGLang.")] = 30000,
    private_network: Annotated[
        bool, typer.Option("--private-network", help="Declare that only the gateway and Prometheus reach --host.")
    ] = False,
    engine_id: EngineId = "sglang",
    capture: options.Capture = False,
    capture_floor: options.CaptureFloor = DEFAULT_FLOOR,
    trace_ttl_hours: options.TraceTtl = 0,
    capture_filter: options.CaptureFilter = None,
    depth: SglangDepth = 4,
    suffix_depth: SuffixDepth = 16,
    share_groups: options.ShareGroups = False,
    control_share: options.ControlShare = 0.02,
    plain_share: options.PlainShare = 0.03,
    context_window: options.ContextWindow = 512,
    branch_share: options.BranchShare = DEFAULT_BRANCH_SHARE,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Number type of the target.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    stream_max_bytes: options.StreamMaxBytes = 0,
    sglang_python: options.SglangPython = None,
    capture_bytes_per_s: options.CaptureBytes = 0,
    gpu: Annotated[str, typer.Option(envvar="SLIPSTREAM_SGLANG_GPU", help="Name of this SGLang's GPU.")] = "0",
    trainer_gpu: Annotated[
        str | None,
        typer.Option(
            envvar="SLIPSTREAM_TRAINER_GPU",
            help="Name of the trainer's GPU; if it is the same, SGLang with --capture leaves room for training.",
        ),
    ] = None,
) -> None:
    """Run SGLang with the plugin and the store's last good draft; `slipstream gateway` stands in front of it.

    The store needs a version: `slipstream drafts init --store` writes the first.
    """
    check_options(context, effects.SGLANG)
    options.check_sharing(context)
    from serving.sglang.outside.launcher import SglangStart
    from slipstream.start.exposure import check_sglang_exposure
    from slipstream.start.sglang import exec_sglang

    check_sglang_exposure(host, redis_url, is_private=private_network)
    exec_sglang(
        SglangStart(**_fields(SglangStart, _given(context))),
        host=host,
        port=port,
        engine_id=engine_id,
        shares_gpu=capture and device == "cuda" and gpu == trainer_gpu,
    )


def gateway(
    model: Model,
    context: typer.Context,
    sglang: Annotated[
        list[str],
        typer.Option(
            help="Address of an SGLang that `slipstream sglang` started. With --pool: of each router before the "
            "same engines; the first that answers is used."
        ),
    ],
    config: Config = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    root_path: options.RootPath = None,
    api_key: options.ApiKey = None,
    engine_id: EngineId = "sglang",
    pool: Annotated[
        bool, typer.Option("--pool", help="Each --sglang is an sglang-router; every engine that reports is behind it.")
    ] = False,
    start_timeout_s: options.StartTimeout = 1200,
) -> None:
    """Serve the OpenAI-compatible gateway in front of an SGLang that runs already, or of a pool."""
    configure_spans("slipstream-gateway")
    check_options(context, effects.GATEWAY)
    with spinner("starting"):
        warn_of_unread_variables()
        from slipstream.start.gateway import GatewayOptions, run_gateway
        from speculator.connections import server_url

    if len(sglang) > 1 and not pool:
        raise ConfigError("several --sglang are for routers before the same engines: add --pool, or pass only one")
    urls = tuple(server_url(url, "--sglang") for url in sglang)
    model_dir = resolve_model(model)
    with spinner(f"waiting for SGLang at {urls[0]}") as is_there:
        run_gateway(
            GatewayOptions(
                sglang_urls=urls,
                engine_id=None if pool else engine_id,
                model_dir=model_dir,
                store=store,
                redis_url=redis_url,
                host=host,
                port=port,
                start_timeout_s=start_timeout_s,
            ),
            _gateway_settings(effects.GATEWAY_IN_FRONT, context.params),
            on_serving=lambda _: is_there(),
        )


_PREFIX = "SLIPSTREAM_TRAINER_"
"""Prefix of the trainer's variables; a command option overrides its variable."""


def train(
    model: Model,
    config: Config = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    state: Annotated[
        Path,
        typer.Option(
            callback=options.at_home, envvar=f"{_PREFIX}STATE_DIR", help="Directory of the trainer's checkpoint."
        ),
    ] = Path("trainer-state"),
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, envvar=f"{_PREFIX}METRICS_PORT", help="Port for Prometheus metrics; 0: any free one."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(envvar=f"{_PREFIX}NUM_THREADS", min=1, help="CPU threads.")] = 1,
    trace_ttl_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            envvar="SLIPSTREAM_TRACE_TTL_HOURS",
            help="Hours until traces are deleted from stream, replay and disk; 0: never.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(envvar=f"{_PREFIX}SEED", help="Seed of training order and of a fresh draft.")
    ] = 0,
) -> None:
    """Learn from the traces in Redis and publish better drafts; SLIPSTREAM_TRAINER_* variables set the rest.

    With several GPUs, or machines that share --store and --state: `torchrun … -m slipstream train …`.
    """
    configure_spans("slipstream-trainer")
    with spinner("starting"):
        from speculator.draft.checkpoint import model_key, model_name
        from speculator.versions.store import DraftStore
        from trainer.config import load_config
        from trainer.process import run_trainer

    model_dir = resolve_model(model)
    given = {} if trace_ttl_hours is None else {"trace_ttl_hours": trace_ttl_hours}
    with spinner(f"loading {model_name(model_dir)}") as is_loaded:
        settings = load_config(
            **given,
            model_dir=model_dir,
            model_key=model_key(model_dir, checked_fingerprint(model_dir, DraftStore(store))),
            redis_url=redis_url,
            store_dir=store,
            state_dir=state,
            metrics_port=metrics_port,
            num_threads=threads,
            seed=seed,
        )
        check_variables(settings, effects.TRAIN)
        warn_of_unread_variables()
        run_trainer(settings, on_training=is_loaded)
