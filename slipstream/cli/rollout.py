"""`slipstream rollout`: groups of samples from a file, answered by a server. Its work is in slipstream/rollout.py."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import finite
from slipstream.terminal import counting, say
from speculator.errors import ConfigError
from speculator.host import json_line


def rollout(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help='A group a line: {"prompt": "…", "n": 8}.')],
    url: Annotated[str, typer.Option(help="The server: `slipstream serve` with the local engine.")] = (
        "http://127.0.0.1:8000"
    ),
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="Where the server asks for one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the one that the server serves.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of a group whose line says neither n nor seeds.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a sample whose line does not say; default: the server's.")
    ] = None,
    logprobs: Annotated[bool, typer.Option(help="Have samples say how likely their tokens were.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the samples here; default: standard output.")] = None,
    retry_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="How long to try when the server does not answer any more.")
    ] = 60,
) -> None:
    """Send a file of groups to a running server, and write finished samples as lines of JSON, as they end.

    A connection that breaks is made again, and nothing is generated or written twice. Exit code 1 where samples were
    aborted or the server is gone for good, 2 where it refuses the file.
    """
    from slipstream.rollout import RolloutClient, read_groups

    groups = read_groups(file, {} if max_tokens is None else {"max_tokens": max_tokens})
    groups = {
        place: group if "n" in group or "seeds" in group else {**group, "n": n} for place, group in groups.items()
    }
    client = RolloutClient(groups, url=url, api_key=api_key, model=model, logprobs=logprobs, retry_s=retry_s)
    try:
        target = nullcontext(sys.stdout.buffer) if out is None else out.open("wb")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): check --out") from None
    with target as writing, counting("samples") as count:

        def write(sample: dict[str, Any]) -> None:
            writing.write(json_line(sample) + b"\n")
            writing.flush()
            count(sample["number"] + 1, None)

        states = client.run(write)
    say(", ".join(f"{number} {state}" for state, number in sorted(states.items())))
    if states["aborted"]:
        raise typer.Exit(1)
