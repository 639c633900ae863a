"""Options that several commands share: name, type and help.

If an option of `slipstream serve` is for one of the two engines only, its help says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serving.capture.sampling import MAX_BRANCH_SHARE
from slipstream.cli import effects
from speculator.errors import ConfigError
from speculator.host import expanded


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Callback of number options. Raises ConfigError for infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[0]} {value} is not a finite number: give another one")
    return value


def at_home(path: Path | None) -> Path | None:
    """Callback of options for folders that are created: expands `~`, which a shell leaves in `--store=~/x` and a file
    never expands. Raises ConfigError where there is no such home.
    """
    return None if path is None else expanded(str(path))


Model = Annotated[str, typer.Option(help="Target: a Hugging Face directory or id, or the bundled model's name.")]
RedisUrl = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_REDIS_URL", help="Redis of the engines: redis://, rediss://, unix:// or redis+sentinel://."
    ),
]
Store = Annotated[
    Path,
    typer.Option(
        callback=at_home,
        envvar="SLIPSTREAM_STORE",
        help="Directory of the draft versions, shared by all services.",
    ),
]
Dtype = Annotated[Literal["bfloat16", "float32", "float64"], typer.Option(help="Number type of the target.")]
DraftVocab = Annotated[int | None, typer.Option(min=2, help="Tokens that a fresh draft can propose; default: 8192.")]
Depth = Annotated[int, typer.Option(min=0, max=5, help="Maximum proposals of the draft head per round; 0: no drafts.")]
SuffixDepth = Annotated[
    int, typer.Option(min=0, max=64, help="Maximum proposals from earlier text per round; needs --depth; 0: none.")
]
VocabFrom = Annotated[
    Path | None,
    typer.Option(
        help='Recording, or JSON lines with "domain" and "prompt", from which a fresh draft\'s vocabulary is chosen.'
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="File for the figures, as JSON.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


Engine = Annotated[
    Literal["local", "sglang"],
    typer.Option(help="What generates: the local engine, or an SGLang that is started beside."),
]
SglangArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- SGLANG_ARGUMENTS", help="Passed to SGLang as they are.")
]
Name = Annotated[
    str | None, typer.Option("--name", "--served-model-name", help="Model name for clients; default: the directory's.")
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
        envvar="SLIPSTREAM_GATEWAY_ROOT_PATH", help="Path below which a proxy shows the gateway, such as /slipstream."
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")]
Capture = Annotated[
    bool,
    typer.Option("--capture", envvar="SLIPSTREAM_CAPTURE", help="Record traces: prompts and answers go to Redis."),
]
Learn = Annotated[
    bool,
    typer.Option(
        "--learn", help="Record traces and train from them: starts the trainer and, without --redis-url, a Redis."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        callback=at_home,
        help="Folder of --learn: drafts, trainer state, recorded prompts and answers; default: "
        "~/.local/share/slipstream/NAME.",
    ),
]


def apply_data_dir(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--data-dir` in commands that read one: its store, state and Redis become the options' defaults.
    Variables do not override what is in it: the folder was typed.
    """
    path = at_home(path)
    if path is not None and not context.resilient_parsing:
        from slipstream.start.learning import DataDir
        from speculator.redis.embedded import socket_url

        data = DataDir(path)
        places = {"store": data.store, "state": data.state, "redis_url": socket_url(data.redis)}
        taken = [option for option in context.command.params if option.name in places]
        context.default_map = {option.name: str(places[option.name]) for option in taken}
        for option in taken:
            # `serve --learn` may keep Redis and store elsewhere. The state is always in its folder.
            if option.name == "state" or (data.redis if option.name == "redis_url" else data.store).is_dir():
                # The command was made for this call alone.
                option.envvar = None
    return path


InDataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        is_eager=True,
        callback=apply_data_dir,
        help="Folder of `slipstream serve --learn`, with its Redis, drafts and trainer state.",
    ),
]
ControlShare = Annotated[
    float,
    typer.Option(
        min=0, max=0.5, callback=finite, help="Share of rounds without drafts, the baseline of the measured speedup."
    ),
]
PlainShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.5,
        callback=finite,
        help="Share of rounds, in stretches, that serve plainly: the baseline of the end-to-end speedup.",
    ),
]
HeadOffShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.5,
        callback=finite,
        help="Local engine: share of drafting rounds without the draft head, which measures what the head adds.",
    ),
]
BranchShare = Annotated[
    float,
    typer.Option(
        min=0,
        max=MAX_BRANCH_SHARE,
        callback=finite,
        envvar="SLIPSTREAM_BRANCH_SHARE",
        help="Share of rejected proposals kept in traces, with features and target distribution.",
    ),
]
ContextWindow = Annotated[int, typer.Option(min=1, help="Prompt positions kept in a trace.")]
ServeDtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    typer.Option(help="Number type of the target; float16 only with SGLang, float64 only with the local engine."),
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

Slots = Annotated[int, typer.Option(min=1, max=256, help="Local engine: requests decoded together.")]
ContextLength = Annotated[int, typer.Option(min=16, help="Local engine: prompt and completion tokens together.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Local engine: CPU threads; default: all cores but one.")]
ShareGroups = Annotated[
    bool,
    typer.Option(
        "--share-groups",
        envvar="SLIPSTREAM_SHARE_GROUPS",
        help="Share answers of a prompt group with other engines through Redis, while they are generated.",
    ),
]

SglangPython = Annotated[Path | None, typer.Option(help="Python that has SGLang; default: this one or .venv-sglang's.")]
CaptureBytes = Annotated[int, typer.Option(min=0, help="SGLang: maximum bytes of traces per second; 0: no limit.")]
CaptureFloor = Annotated[
    float,
    typer.Option(
        min=0.0001,
        max=1,
        callback=finite,
        envvar="SLIPSTREAM_CAPTURE_FLOOR",
        help="Minimum share of traces kept if Redis or the trainer cannot take all; 1 keeps all.",
    ),
]
TraceTtl = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        envvar="SLIPSTREAM_TRACE_TTL_HOURS",
        help="Hours until traces leave the stream and text leaves the engine; 0: never.",
    ),
]
CaptureFilter = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        envvar="SLIPSTREAM_CAPTURE_FILTER",
        help="Function of text and tenant; False drops a trace before it leaves the process.",
    ),
]
StartTimeout = Annotated[float, typer.Option(min=1, callback=finite, help="SGLang: maximum seconds until it is ready.")]


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


def check_output(path: Path | None, *inputs: Path | None) -> None:
    """Raise ConfigError, before the work starts, where an output file cannot be written, or is one of the inputs."""
    if path is None:
        return
    try:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path.parent} does not exist: create it or choose another folder for {path.name}")
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: give a file in it")
        is_there = path.exists()
        sources = [source for source in inputs if source is not None and source.exists()] if path.is_file() else []
        if any(path.samefile(source) for source in sources):
            raise ConfigError(f"{path} is read, too: choose another file to write")
    except OSError as error:
        raise _unwritable(path, error) from None
    if not os.access(path if is_there else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: check its permissions, or choose another file")


def write_json(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write a command's figures to the file of `--json`, if one is given. Raises ConfigError."""
    if path is not None:
        try:
            path.write_text(json.dumps(document, indent=2) + "\n")
        except OSError as error:
            raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): choose another file")
