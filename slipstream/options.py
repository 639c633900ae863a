"""Options that several commands share, each with its one name, type and help."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from speculator.errors import ConfigError


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """The callback of a number's option: what is infinite, or no number, counts nothing. Raises ConfigError."""
    if value is not None and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[0]} {value} is no number to count with: give another one")
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
    int, typer.Option(min=0, max=64, help="Local engine: most proposals from earlier text; needs --depth; 0: none.")
]
VocabFrom = Annotated[
    Path | None,
    typer.Option(help='JSON lines with "domain" and "prompt": choose a fresh draft\'s vocabulary by them.'),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
