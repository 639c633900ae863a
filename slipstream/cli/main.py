"""The `slipstream` command. Services import torch, so their modules are imported by the command that needs them.

Exit codes: 0 done; 1 something failed while it ran, or `doctor` found a fault; 2 the operator has to change something
first: an option, a setting, the model, Redis, the store. Every error is one line that names the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.markup import escape

from slipstream.cli import config, demo, doctor, drafts, keys, replay, rollout, services, tenants, traces
from slipstream.cli.options import AsJson
from slipstream.terminal import console, print_json
from speculator.errors import ConfigError, DraftError, LifecycleError, SlipstreamError, StoreError, StreamError
from speculator.tracing import close_spans

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the draft model of a speculative-decoding server in step with live traffic.",
)
app.command()(demo.demo)
app.command()(services.serve)
app.command()(services.sglang)
app.command()(services.gateway)
app.command()(services.train)
app.command()(replay.replay)
app.command()(rollout.rollout)
app.command()(doctor.doctor)
app.add_typer(drafts.draft_app, name="draft")
app.add_typer(drafts.app, name="drafts")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(traces.app, name="traces")
app.add_typer(tenants.app, name="tenants")


@app.command("version")
def show_version(as_json: AsJson = False) -> None:
    """Print the version."""
    try:
        found = version("slipstream-spec")
    except PackageNotFoundError:
        raise ConfigError("slipstream-spec is not installed here: run `make demo` or pip install it") from None
    if as_json:
        print_json({"version": found})
    else:
        typer.echo(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default this process's; what an operator can fix ends in one line and exit code 2."""
    try:
        app(arguments)
    except (ConfigError, StreamError, StoreError, DraftError, LifecycleError) as error:
        _end(error, 2)
    except SlipstreamError as error:
        _end(error, 1)
    finally:
        close_spans()


def _end(error: SlipstreamError, code: int) -> None:
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(code)
