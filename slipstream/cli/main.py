"""The `slipstream` command. Services import torch, so their modules are imported by the command that needs them.

Exit codes: 0 done; 1 something failed while it ran, or `doctor` found a fault; 2 the operator has to fix something
first: an option, a setting, the model, Redis, the store. Every error is one line that names the fix.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.cli import config, demo, doctor, drafts, keys, replay, rollout, services, tenants, traces
from slipstream.cli.options import AsJson
from slipstream.cli.panels import WithPanels
from slipstream.logs import configure_logs
from slipstream.terminal import console, prepare_streams, print_json
from speculator.errors import ConfigError, DraftError, LifecycleError, SlipstreamError, StoreError, StreamError
from speculator.tracing import close_spans

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the draft model of a speculative-decoding server in step with live traffic.",
)
_SERVICES, _STEERING, _TRACES = "Serve and learn", "Look and steer", "Traces and rollouts"
for service in (demo.demo, services.serve, services.train, services.sglang, services.gateway):
    app.command(cls=WithPanels, rich_help_panel=_SERVICES)(service)
app.command(rich_help_panel=_STEERING)(doctor.doctor)
app.command(rich_help_panel=_TRACES)(replay.replay)
app.command(rich_help_panel=_TRACES)(rollout.rollout)
app.add_typer(drafts.draft_app, name="draft")
app.add_typer(drafts.app, name="drafts", rich_help_panel=_STEERING)
app.add_typer(config.app, name="config", rich_help_panel=_STEERING)
app.add_typer(keys.app, name="keys", rich_help_panel=_STEERING)
app.add_typer(traces.app, name="traces", rich_help_panel=_TRACES)
app.add_typer(tenants.app, name="tenants", rich_help_panel=_TRACES)


def _version() -> str:
    try:
        return version("slipstream-spec")
    except PackageNotFoundError:
        raise ConfigError("slipstream-spec is not installed here: run `make demo` or pip install it") from None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(_version())
        raise typer.Exit


@app.callback()
def _begin(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Configure the logs of every command."""
    # `doctor` reports bad log settings as a finding.
    with suppress(ConfigError) if context.invoked_subcommand == "doctor" else nullcontext():
        configure_logs()


@app.command("version", rich_help_panel=_STEERING)
def show_version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": _version()})
    else:
        typer.echo(_version())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default this process's; an error ends in one line and the exit code above."""
    prepare_streams()
    try:
        app(arguments)
    except (ConfigError, StreamError, StoreError, DraftError, LifecycleError) as error:
        _end(error, 2)
    except SlipstreamError as error:
        _end(error, 1)
    except OSError as error:
        # Of `tempfile`, which some libraries ask when they are imported.
        if "No usable temporary directory" in str(error):
            _end("no temporary directory is writable: set TMPDIR to one that is", 2)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # Else Python tries again at its end to write what standard output still holds.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _end(f"cannot write the output ({error.strerror}): free some space", 1)
    finally:
        close_spans()


def _end(error: SlipstreamError | str, code: int) -> None:
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(code)
