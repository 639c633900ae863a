"""`slipstream rollout`: send groups of prompts from a file to a server (slipstream/client.py), write the samples."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from slipstream.cli.options import check_output, finite
from slipstream.terminal import print_status, progress_bar
from speculator.errors import ConfigError, SlipstreamError
from speculator.host import json_line, load_function, read_json_lines

if TYPE_CHECKING:
    from slipstream.rollout import Environment


def read_groups(path: Path, defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The groups of a file, by "FILE, line N"; `defaults` fill in missing fields. Raises ConfigError."""
    rows = read_json_lines(path, dict[str, Any], example='{"prompt": "…", "n": 8}')
    groups = {
        f"{path}, line {number}": {"id": str(index), **defaults, **group} for index, (number, group) in enumerate(rows)
    }
    if not groups:
        raise ConfigError(f"{path} has no groups: write one JSON object a line")
    return groups


def rollout(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help='Groups, one per line: {"prompt": "…", "n": 8}.')],
    url: Annotated[str, typer.Option(help="Server: `slipstream serve` or `slipstream gateway`.")] = (
        "http://127.0.0.1:8000"
    ),
    api_key: Annotated[
        str | None, typer.Option(envvar="SLIPSTREAM_API_KEY", help="API key, if the server needs one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; default: the one that the server serves.")] = None,
    job: Annotated[
        str | None, typer.Option(help="Name of the job; a tenant's jobs share the engines; default: one for all.")
    ] = None,
    weight: Annotated[
        float,
        typer.Option(min=0.01, max=100, callback=finite, help="Weight of the job: twice as much, twice the tokens."),
    ] = 1,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of a group whose line has neither n nor seeds.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens where a line has no limit; default: the server's.")
    ] = None,
    logprobs: Annotated[bool, typer.Option(help="Have samples carry the logprobs of their tokens.")] = True,
    out: Annotated[Path | None, typer.Option(help="File for the samples; default: standard output.")] = None,
    retry_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds to keep trying while the server does not answer.")
    ] = 60,
    environment: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS", help="Program that answers turns; see slipstream.rollout.Environment."),
    ] = None,
    step_timeout_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="Maximum seconds that the environment may take per turn.")
    ] = 60,
    retries: Annotated[int, typer.Option(min=0, help="Further attempts at a turn that the environment failed.")] = 0,
) -> None:
    """Send groups from a file to a running server, and write samples as lines of JSON as they end.

    It reconnects where a connection breaks; nothing is generated or written twice. With an environment, samples have
    their `reward`. Exit code 1 if samples were aborted that were not redundant, or the server stays away; 2 if it
    refuses the file.
    """
    from slipstream.client import AsyncRollouts, Rollouts, Sample
    from slipstream.rollout import Conversations

    check_output(out, file)
    groups = read_groups(file, {} if max_tokens is None else {"max_tokens": max_tokens})
    groups = {
        place: group if "n" in group or "seeds" in group else {**group, "n": n} for place, group in groups.items()
    }
    server: dict[str, Any] = {"url": url, "api_key": api_key, "model": model, "job": job, "weight": weight}
    server["retry_s"] = retry_s
    client = Rollouts(**server)
    make = None if environment is None else load_function(environment, "--environment")
    try:
        target = nullcontext(sys.stdout.buffer) if out is None else out.open("ab")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}): check --out") from None
    states: Counter[str] = Counter()
    with client, target as writing, progress_bar("samples") as count:

        def write(sample: Sample, more: dict[str, Any]) -> None:
            if not states and out is not None and out.is_file():
                # Not before: where the server refuses the groups, earlier samples stay.
                writing.truncate(0)
            states["redundant" if sample.finish_reason == "redundant" else sample.state] += 1
            writing.write(json_line({**asdict(sample), **more}) + b"\n")
            writing.flush()
            count(states.total(), None)

        async def converse(make: Callable[[], Environment]) -> None:
            async with AsyncRollouts(**server) as rollouts:
                played = Conversations(
                    rollouts,
                    [*groups.values()],
                    lambda _: make(),
                    step_timeout_s=step_timeout_s,
                    retries=retries,
                    logprobs=logprobs,
                    places=[*groups],
                )
                async for sample in played:
                    write(sample, {"reward": played.rewards.get(sample.key)})

        if make is not None:
            asyncio.run(converse(make))
        else:
            rollout = client.start([*groups.values()], logprobs=logprobs, places=[*groups])
            try:
                for sample in rollout:
                    write(sample, {})
            except KeyboardInterrupt:
                with suppress(SlipstreamError):
                    rollout.cancel()
                raise
    print_status(", ".join(f"{number} {state}" for state, number in sorted(states.items())))
    if states["aborted"]:
        raise typer.Exit(1)
