"""The `slipstream` command. Services import torch, so their modules are imported by the command that needs them.

Exit codes: 0 done; 1 something failed while it ran, or `doctor` found a fault; 2 the operator has to change something
first: an option, a setting, the model, Redis, the store. Every error is one line that names the fix.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import typer
from rich.markup import escape

from slipstream import (
    demo_cli,
    doctor_cli,
    draft_cli,
    drafts_cli,
    keys_cli,
    replay_cli,
    rollout_cli,
    serve_cli,
    services_cli,
    tenants_cli,
    traces_cli,
    train_cli,
)
from slipstream.options import AsJson
from slipstream.terminal import console, print_json
from speculator.errors import ConfigError, DraftError, LifecycleError, SlipstreamError, StoreError, StreamError
from speculator.tracing import close_spans

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps the draft model of a speculative-decoding server in step with live traffic.",
)
app.command()(demo_cli.demo)
app.command()(serve_cli.serve)
app.command()(services_cli.sglang)
app.command()(services_cli.gateway)
app.command()(train_cli.train)
app.command()(replay_cli.replay)
app.command()(rollout_cli.rollout)
app.command()(doctor_cli.doctor)
app.add_typer(draft_cli.draft_app, name="draft")
app.add_typer(drafts_cli.app, name="drafts")
app.add_typer(keys_cli.app, name="keys")
app.add_typer(traces_cli.app, name="traces")
app.add_typer(tenants_cli.app, name="tenants")


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


def main() -> None:
    """Run the command line; what an operator can fix ends in one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (ConfigError, StreamError, StoreError, DraftError, LifecycleError) as error:
        _end(error, 2)
    except SlipstreamError as error:
        _end(error, 1)
    finally:
        close_spans()


def _end(error: SlipstreamError, code: int) -> None:
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(code)
