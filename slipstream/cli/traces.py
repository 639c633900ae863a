"""The commands `slipstream traces …`; slipstream/traces.py does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.effects import PRUNE, check_options
from slipstream.cli.options import AsJson, InDataDir, Model, RedisUrl, check_output, finite
from slipstream.models import resolve_model
from slipstream.settings import DEFAULT_REDIS_URL
from slipstream.terminal import print_json, print_status, progress_bar
from speculator.errors import ConfigError
from speculator.host import now_ms

app = typer.Typer(no_args_is_help=True, help="Recordings of the trace stream.")

Recording = Annotated[Path, typer.Argument(help="A file that `slipstream traces record` wrote.")]


@app.command()
def record(
    model: Model,
    out: Annotated[Path, typer.Option(help="File to write; an existing recording is continued.")],
    data_dir: InDataDir = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    seconds: Annotated[float, typer.Option(min=0, callback=finite, help="Seconds to go on with new traces.")] = 0,
    note: Annotated[str, typer.Option(help="Note in a new file's header.")] = "",
    as_json: AsJson = False,
) -> None:
    """Copy a stream's traces, prompts and answers included, into a file; the trainer is not disturbed."""
    from slipstream import traces
    from speculator.draft.checkpoint import model_key, model_name, target_fingerprint
    from speculator.recording import RecordingHeader
    from speculator.redis.client import connect
    from speculator.redis.model_names import check_stream

    check_output(out)
    model_dir = resolve_model(model)
    fingerprint = target_fingerprint(model_dir)
    header = RecordingHeader(
        target_fingerprint=fingerprint, model=model_name(model_dir), created_ms=now_ms(), note=note
    )
    with connect(redis_url) as client, progress_bar("traces") as bar:
        key = model_key(model_dir, fingerprint)
        if not seconds:
            # Else the first trace may be yet to come.
            check_stream(client, key)
        source = traces.StreamCopy(client, key)
        counts = traces.record(source, out, header, seconds=seconds, on_traces=lambda read: bar(read, None))
        check_stream(client, key)
    if as_json:
        print_json(counts)
    else:
        typer.echo(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))


@app.command()
def prune(
    context: typer.Context,
    recordings: Annotated[
        list[Path] | None, typer.Argument(help="Files that `slipstream traces record` wrote.")
    ] = None,
    older_than_hours: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, envvar="SLIPSTREAM_TRACE_TTL_HOURS", help="Minimum age of the traces to delete."
        ),
    ] = 0,
    model: Annotated[str | None, typer.Option(help="Target whose stream is pruned, too.")] = None,
    data_dir: InDataDir = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Delete old traces from recordings and, with --model, from a stream; what cannot be read goes, too."""
    from slipstream import traces

    check_options(context, PRUNE)
    if older_than_hours <= 0:
        raise ConfigError("no age to prune by: pass --older-than-hours, or set SLIPSTREAM_TRACE_TTL_HOURS")
    if not recordings and model is None:
        raise ConfigError("nothing to prune: give recordings, or --model for its stream")
    removed = {str(path): traces.prune(path, older_than_hours) for path in recordings or ()}
    if model is not None:
        removed["stream"] = _prune_stream(model, redis_url, older_than_hours)
    if as_json:
        print_json({"removed": removed})
    else:
        typer.echo("\n".join(f"{place}: {count} traces removed" for place, count in removed.items()))


def _prune_stream(model: str, redis_url: str, hours: float) -> int:
    from speculator.draft.checkpoint import model_key, target_fingerprint
    from speculator.redis.client import connect
    from speculator.redis.model_names import check_stream
    from speculator.redis.trace_stream import TraceStream

    model_dir = resolve_model(model)
    with connect(redis_url) as client:
        key = model_key(model_dir, target_fingerprint(model_dir))
        check_stream(client, key)
        stream = TraceStream(client, key, max_bytes=0)
        before = stream.lag().expired
        stream.expire(3600 * hours)
        return stream.lag().expired - before


@app.command()
def info(recording: Recording, as_json: AsJson = False) -> None:
    """Print what a recording holds: traces, tokens, domains, acceptance, draft versions, bytes."""
    from slipstream import traces

    document = traces.summary(recording)
    if as_json:
        print_json(document)
    else:
        typer.echo(traces.sentences(document))


@app.command()
def export(
    recording: Recording,
    out: Annotated[
        Path | None, typer.Option("--out", "--jsonl", help="File for the lines; default: standard output.")
    ] = None,
) -> None:
    """Write traces as JSON lines: tokens, target distributions, rounds; no features."""
    from slipstream import traces
    from speculator.recording import RecordingReader

    check_output(out, recording)
    if out is None:
        traces.export(recording, sys.stdout.buffer)
        sys.stdout.flush()
        return
    # Before `out` is emptied.
    RecordingReader(recording).close()
    with out.open("wb") as file:
        count = traces.export(recording, file)
    print_status(f"{count} traces written to {out}")
