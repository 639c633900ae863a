"""The commands `slipstream tenants …`; slipstream/tenants.py does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.drafts import STORE, operator
from slipstream.cli.options import AsJson, InDataDir, Model, RedisUrl, Store, at_home, finite
from slipstream.models import resolve_model
from slipstream.settings import DEFAULT_REDIS_URL
from slipstream.terminal import print_json
from speculator.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Tenants: remove what is kept of their traffic.")


@app.callback()
def _group() -> None:
    """Keeps `erase` a subcommand while it is the only one."""


@app.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="Tenant, as its key names it; `default` without keys.")],
    model: Model,
    data_dir: InDataDir = None,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: Store = STORE,
    state: Annotated[
        Path,
        typer.Option(
            callback=at_home,
            envvar="SLIPSTREAM_TRAINER_STATE_DIR",
            help="Directory of the trainer, if it is on this machine.",
        ),
    ] = Path("trainer-state"),
    recording: Annotated[list[Path] | None, typer.Option(help="Recording to remove it from; may be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Erase; without it, only print what would go.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="Maximum seconds to wait for engines, gateways and trainers.")
    ] = 120,
    as_json: AsJson = False,
) -> None:
    """Delete a tenant's traces from stream, trainer, engines and recordings; list the drafts that learned from it.

    Exit code 1 if something is left to do, which the output names; repeating it is safe.
    """
    from slipstream import tenants
    from speculator.draft.checkpoint import model_key
    from speculator.redis.client import connect
    from speculator.redis.model_names import check_name
    from speculator.versions.store import DraftStore

    drafts = DraftStore(store)
    newest = drafts.latest()
    if newest is None:
        raise ConfigError(f"{store} holds no draft versions: check --store, or --data-dir")
    key = model_key(resolve_model(model), drafts.manifest(newest).target_fingerprint)
    with connect(redis_url) as client:
        check_name(client, key)
        eraser = tenants.Eraser(
            tenant=tenant,
            client=client,
            model_key=key,
            store=drafts,
            state=state,
            recordings=tuple(recording or ()),
            actor=operator(),
            timeout_s=timeout_s,
        )
        document = eraser.erase() if yes else eraser.preview()
    if as_json:
        print_json(document)
    else:
        typer.echo(tenants.sentences(document))
    if document["left"]:
        raise typer.Exit(1)
