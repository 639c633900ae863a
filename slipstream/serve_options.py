"""The options of `slipstream serve`, and which of them belong to one of the two engines alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from slipstream import effects
from slipstream.options import finite
from speculator.errors import ConfigError

Engine = Annotated[
    Literal["local", "sglang"],
    typer.Option(help="What generates: the engine in here, or an SGLang started beside."),
]
SglangArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- SGLANG_ARGUMENTS", help="Passed to SGLang as they are.")
]
Name = Annotated[str | None, typer.Option(help="Name that clients use; default: the directory's.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]
Capture = Annotated[
    bool,
    typer.Option("--capture", envvar="SLIPSTREAM_CAPTURE", help="Record traces: prompts and answers go to Redis."),
]
ControlShare = Annotated[
    float,
    typer.Option(min=0, max=0.5, callback=finite, help="Share of rounds at depth 0 that gives the measured baseline."),
]
HeadOffShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.5,
        callback=finite,
        help="Local engine: share of drafting rounds that may not ask the draft head; measures what the head adds.",
    ),
]
ContextWindow = Annotated[int, typer.Option(min=1, help="Prompt positions kept in a trace.")]
ServeDtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    typer.Option(help="Number type of the target; float16 is SGLang's alone, float64 the local engine's."),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cpu, with SGLang cuda.")]
StreamMaxBytes = Annotated[int, typer.Option(min=1, help="Byte cap of the stream.")]
Seed = Annotated[int | None, typer.Option(help="Seed of a fresh draft; default: 0.")]

Slots = Annotated[int, typer.Option(min=1, max=256, help="Local engine: requests that decode together.")]
ContextLength = Annotated[int, typer.Option(min=16, help="Local engine: prompt and completion tokens together.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Local engine: CPU threads; default: one less than the cores.")
]
ShareGroups = Annotated[
    bool,
    typer.Option(
        "--share-groups",
        envvar="SLIPSTREAM_SHARE_GROUPS",
        help="Local engine: answers of a prompt group go to Redis as they come, for the drafts of other engines.",
    ),
]

SglangPython = Annotated[
    Path | None, typer.Option(help="SGLang: interpreter that has it; default: this one or .venv-sglang's.")
]
CaptureBytes = Annotated[int, typer.Option(min=0, help="SGLang: budget of recorded traces; 0 sets no limit.")]
CaptureFloor = Annotated[
    float,
    typer.Option(
        min=0.0001,
        max=1,
        callback=finite,
        envvar="SLIPSTREAM_CAPTURE_FLOOR",
        help="Least share of the traces that is kept where Redis or the trainer cannot take all; 1 always keeps all.",
    ),
]
TraceTtl = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        envvar="SLIPSTREAM_TRACE_TTL_HOURS",
        help="Hours after which traces are gone from the stream and text from the engine; 0 sets no limit.",
    ),
]
CaptureFilter = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        envvar="SLIPSTREAM_CAPTURE_FILTER",
        help="Function of text and tenant: traces of which it says False are dropped before they leave the process.",
    ),
]
StartTimeout = Annotated[float, typer.Option(min=1, callback=finite, help="SGLang: how long it may take to load.")]


def check_together(context: typer.Context) -> None:
    """Raise ConfigError for options of `serve` that have no effect, or that exclude each other."""
    engine, dtype = context.params["engine"], context.params["dtype"]
    effects.check_options(context, effects.SERVE)
    if engine == "local":
        if unknown := context.params["sglang_arguments"]:
            raise ConfigError(f"{unknown[0]!r} is an argument for --engine sglang: leave it out")
        if context.params["share_groups"] and context.params["capture_filter"]:
            raise ConfigError(
                "--share-groups sends answers to Redis as they come, and --capture-filter is asked about whole ones: "
                "leave one of them out"
            )
        if dtype == "float16":
            raise ConfigError("--dtype float16 is for --engine sglang: the local engine computes in bfloat16 or wider")
        return
    if dtype == "float64":
        raise ConfigError("--dtype float64 is for --engine local: SGLang has no such kernels")
    if context.params["depth"] == 0:
        raise ConfigError("--depth 0 would load no draft: pass 1 or more, SGLang drafts less where it does not pay")
