"""`slipstream serve` as a command; what it does is in slipstream/start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from serving.capture.sampling import DEFAULT_FLOOR
from slipstream.cli import options as options
from slipstream.cli.options import Depth, DraftVocab, Model, RedisUrl, Store, SuffixDepth, VocabFrom
from slipstream.logs import configure_logs
from slipstream.models import resolve_model
from slipstream.start.effects import warn_of_unread_variables
from slipstream.start.shared_defaults import DEFAULT_REDIS_URL, DEFAULT_STREAM_MAX_BYTES
from speculator.tracing import configure_spans


def serve(
    context: typer.Context,
    model: Model,
    sglang_arguments: options.SglangArguments = None,
    engine: options.Engine = "local",
    name: options.Name = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = Path("drafts"),
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    capture: options.Capture = False,
    capture_floor: options.CaptureFloor = DEFAULT_FLOOR,
    trace_ttl_hours: options.TraceTtl = 0,
    capture_filter: options.CaptureFilter = None,
    depth: Depth = 4,
    control_share: options.ControlShare = 0.02,
    context_window: options.ContextWindow = 512,
    draft_vocab_size: DraftVocab = None,
    vocab_from: VocabFrom = None,
    dtype: options.ServeDtype = "bfloat16",
    device: options.Device = None,
    stream_max_bytes: options.StreamMaxBytes = DEFAULT_STREAM_MAX_BYTES,
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
    """Serve a model behind the OpenAI-compatible gateway, with the draft that the store holds or a fresh one."""
    configure_logs()
    configure_spans("slipstream-gateway")
    from speculator.draft.checkpoint import model_name

    options.check_together(context)
    warn_of_unread_variables()
    given: dict[str, Any] = dict(context.params)
    given["model_dir"] = resolve_model(model)
    given["model_name"] = name or model_name(given["model_dir"])
    given["vocab_texts"] = _texts(vocab_from)
    if engine == "sglang":
        _serve_sglang(given)
    else:
        _serve_locally(given)


def _texts(vocab_from: Path | None) -> tuple[str, ...]:
    from slipstream.demo.topics import read_prompts

    return tuple(prompt.text for prompt in read_prompts(vocab_from)) if vocab_from else ()


_EITHER = (
    "store",
    "redis_url",
    "host",
    "port",
    "stream_max_bytes",
    "draft_vocab_size",
    "vocab_texts",
    "seed",
    "trace_ttl_hours",
    "capture_filter",
    "capture_floor",
)
"""Options that mean the same to both engines; the names of the fields that take them."""


def _serve_locally(given: dict[str, Any]) -> None:
    from serving.gateway.config import load_settings
    from serving.local.config import LocalEngineConfig
    from slipstream.start.local import run_server
    from slipstream.start.local_site import ServeOptions

    same = ("model_dir", "model_name", "dtype", "context_length", "context_window", "depth", "control_share")
    config = LocalEngineConfig(
        **{name: given[name] for name in (*same, "capture", "suffix_depth", "head_off_share")},
        device=given["device"] or "cpu",
        num_slots=given["slots"],
        num_threads=given["threads"],
    )
    settings = {name: given[name] for name in (*_EITHER, "share_groups")}
    run_server(ServeOptions(engine=config, **settings), load_settings())


def _serve_sglang(given: dict[str, Any]) -> None:
    from serving.gateway.config import load_settings
    from slipstream.start.sglang import SglangServeOptions, run_sglang_server

    same = ("model_dir", "model_name", "dtype", "depth", "capture", "control_share", "context_window")
    run_sglang_server(
        SglangServeOptions(
            **{name: given[name] for name in (*_EITHER, *same, "capture_bytes_per_s", "start_timeout_s")},
            python=given["sglang_python"],
            device=given["device"] or "cuda",
            extra=tuple(given["sglang_arguments"] or ()),
        ),
        load_settings(),
    )
