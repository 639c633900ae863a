"""Options that several commands share: name, type and help.

The help of an option of `slipstream serve` says where it is for one of the two engines only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from serving.capture.sampling import MAX_BRANCH_SHARE
from slipstream.cli import effects
from speculator.errors import ConfigError


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Callback of number options. Raises ConfigError for infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[0]} {value} is not a finite number: give another one")
    return value


Model = Annotated[str, typer.Option(help="Target: a Hugging Face model directory, an id, or the bundled model's name.")]
RedisUrl = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_REDIS_URL",
        help="redis://, rediss://, unix:// or redis+sentinel:// with the trace stream.",
    ),
]
Store = Annotated[
    Path, typer.Option(envvar="SLIPSTREAM_STORE", help="Directory of the draft versions, shared by serve and train.")
]
Dtype = Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Number type of the target.")]
DraftVocab = Annotated[int | None, typer.Option(min=2, help="Tokens that a fresh draft can propose; default: 8192.")]
Depth = Annotated[int, typer.Option(min=0, max=5, help="Most proposals of the draft head a round; 0 drafts nothing.")]
SuffixDepth = Annotated[
    int, typer.Option(min=0, max=64, help="Most proposals from earlier text a round; needs --depth; 0: none.")
]
VocabFrom = Annotated[
    Path | None,
    typer.Option(
        help='Recording of traces, or JSON lines with "domain" and "prompt": choose a fresh draft\'s vocabulary by it.'
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


Engine = Annotated[
    Literal["local", "sglang"],
    typer.Option(help="What generates: the engine in here, or an SGLang started beside."),
]
SglangArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- SGLANG_ARGUMENTS", help="Passed to SGLang as they are.")
]
Name = Annotated[
    str | None, typer.Option("--name", "--served-model-name", help="Name that clients use; default: the directory's.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="SLIPSTREAM_API_KEY", help="The one key that clients need; `slipstream keys` makes several, with limits."
    ),
]
RootPath = Annotated[
    str | None,
    typer.Option(
        envvar="SLIPSTREAM_GATEWAY_ROOT_PATH",
        help="Path below which a proxy in front shows the gateway, such as /slipstream.",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")]
Capture = Annotated[
    bool,
    typer.Option("--capture", envvar="SLIPSTREAM_CAPTURE", help="Record traces: prompts and answers go to Redis."),
]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn",
        help="Record traces, and start what learns from them: the trainer and, without --redis-url, a Redis.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="What --learn keeps: drafts, the trainer's state, recorded prompts and answers; "
        "default: ~/.local/share/slipstream/NAME."
    ),
]


def take_data_dir(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--data-dir` in commands that read one: its store, state and Redis become the options' defaults."""
    if path is not None and not context.resilient_parsing:
        from slipstream.start.learning import DataDir
        from speculator.redis.embedded import socket_url

        data = DataDir(path)
        places = {"store": data.store, "state": data.state, "redis_url": socket_url(data.redis)}
        taken = {option.name for option in context.command.params}
        context.default_map = {name: str(place) for name, place in places.items() if name in taken}
    return path


InDataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        is_eager=True,
        callback=take_data_dir,
        help="Folder of `slipstream serve --learn`: Redis, drafts and the trainer's state are looked for there.",
    ),
]
ControlShare = Annotated[
    float,
    typer.Option(min=0, max=0.5, callback=finite, help="Share of rounds at depth 0 that gives the measured baseline."),
]
PlainShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.5,
        callback=finite,
        help="Share of rounds, in stretches, in which all requests are served plainly: the end-to-end speedup.",
    ),
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
BranchShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=MAX_BRANCH_SHARE,
        callback=finite,
        envvar="SLIPSTREAM_BRANCH_SHARE",
        help="Share of the rejected proposals whose features and target distribution are kept in traces, too.",
    ),
]
ContextWindow = Annotated[int, typer.Option(min=1, help="Prompt positions kept in a trace.")]
ServeDtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    typer.Option(help="Number type of the target; float16 is SGLang's alone, float64 the local engine's."),
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cpu, with SGLang cuda.")]
StreamMaxBytes = Annotated[
    int,
    typer.Option(
        min=0,
        envvar="SLIPSTREAM_STREAM_MAX_BYTES",
        help="Byte cap of the stream; 0 allows 160,000 tokens of the target, at least 512 MiB.",
    ),
]
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
        help="Answers of a prompt group go to Redis as they come, for the drafts of other engines.",
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


def check_sharing(context: typer.Context) -> None:
    """Raise ConfigError where answers would be sent to Redis before the capture filter judges them."""
    if context.params["share_groups"] and context.params["capture_filter"]:
        raise ConfigError(
            "--share-groups sends answers to Redis as they grow, but --capture-filter judges complete answers: "
            "leave one of them out"
        )


def check_together(context: typer.Context) -> None:
    """Raise ConfigError for options of `serve` that have no effect, or that exclude each other."""
    engine, dtype = context.params["engine"], context.params["dtype"]
    effects.check_options(context, effects.SERVE)
    check_sharing(context)
    if engine == "local":
        if unknown := context.params["sglang_arguments"]:
            raise ConfigError(f"{unknown[0]!r} is an argument for --engine sglang: leave it out")
        if dtype == "float16":
            raise ConfigError("--dtype float16 is for --engine sglang: the local engine computes in bfloat16 or wider")
        return
    if dtype == "float64":
        raise ConfigError("--dtype float64 is for --engine local: SGLang has no such kernels")
    if context.params["depth"] == 0:
        raise ConfigError("--depth 0 would load no draft: pass 1 or more; SGLang drafts less where that is faster")


def check_output(path: Path | None) -> None:
    """Raise ConfigError, before the work starts, where the folder of an output file does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist: create it or choose another folder for {path.name}")
