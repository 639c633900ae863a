"""`slipstream tenants`: whose traffic is kept; what it does is in tenants.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.drafts_cli import STORE, StoreOption, operator
from slipstream.layout import DEFAULT_REDIS_URL
from slipstream.models import resolve_model
from slipstream.options import AsJson, Model, RedisUrl, finite
from slipstream.terminal import print_json
from speculator.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Tenants: remove what is kept of their traffic.")


@app.callback()
def _group() -> None:
    """Keeps `erase` a subcommand while it is the only one."""


@app.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="As its key names it; `default` where there are no keys.")],
    model: Model,
    redis_url: RedisUrl = DEFAULT_REDIS_URL,
    store: StoreOption = STORE,
    state: Annotated[
        Path, typer.Option(envvar="SLIPSTREAM_TRAINER_STATE_DIR", help="The trainer's directory, if it is here.")
    ] = Path("trainer-state"),
    recording: Annotated[list[Path] | None, typer.Option(help="A recording to remove it from; give each one.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Erase; without it, only say what would go.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0, callback=finite, help="How long engines and trainers may take to answer.")
    ] = 120,
    as_json: AsJson = False,
) -> None:
    """Remove a tenant's traces from stream, trainer, engines and recordings, and list the drafts that learnt from it.

    With the base's store, from all lineages too. Exit code 1 where something is left to do, which the output names;
    repeating it is safe.
    """
    from slipstream import tenants
    from speculator.checkpoint import model_key
    from speculator.lineages import below, lineages_of
    from speculator.redis_client import connect
    from speculator.store import DraftStore

    drafts = DraftStore(store)
    newest = drafts.latest()
    if newest is None:
        raise ConfigError(f"{store} holds no draft versions: check --store")
    fingerprint, model_dir = drafts.manifest(newest).target_fingerprint, resolve_model(model)
    documents = {}
    with connect(redis_url) as client:
        for each in (drafts, *(DraftStore(below(store, name)) for name in lineages_of(store))):
            eraser = tenants.Eraser(
                tenant=tenant,
                client=client,
                model_key=model_key(model_dir, fingerprint, each.lineage),
                store=each,
                state=below(state, each.lineage),
                recordings=tuple(recording or ()) if each is drafts else (),
                actor=operator(),
                timeout_s=timeout_s,
            )
            documents[each.lineage] = eraser.erase() if yes else eraser.look()
    document, *_ = documents.values()
    lineages = {name: found for name, found in documents.items() if found is not document}
    if as_json:
        print_json({**document, "lineages": lineages} if lineages else document)
    else:
        typer.echo(tenants.sentences(document))
        for name, found in lineages.items():
            typer.echo(f"lineage {name}:\n{tenants.sentences(found)}")
    if any(found.get("left") for found in documents.values()):
        raise typer.Exit(1)
