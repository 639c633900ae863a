"""`slipstream drafts`: the versions of a store as their operator sees and steers them."""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from slipstream.drafts_tables import details_tables, difference_tables, or_dash, overview_table
from slipstream.layout import DEFAULT_REDIS_URL
from slipstream.models import resolve_model
from slipstream.options import AsJson
from speculator.errors import ConfigError

if TYPE_CHECKING:
    from speculator.redis.control_plane import DraftPointer
    from speculator.versions.operator import DraftDesk, Outcome

app = typer.Typer(no_args_is_help=True, help="Draft versions: look at them, choose which one is served.")

Version = Annotated[int, typer.Argument(min=1, help="Number of a draft version.")]
StoreOption = Annotated[Path, typer.Option("--store", envvar="SLIPSTREAM_STORE", help="Directory of the versions.")]
RedisOption = Annotated[str, typer.Option("--redis-url", envvar="SLIPSTREAM_REDIS_URL", help="Redis of the engines.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Target as `serve` got it: what engines run is kept under its name.")
]

STORE = Path("drafts")


@app.command("list")
def list_versions(
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """All versions, oldest first; without --model or without Redis, what is on disk alone."""
    with _desk(store, redis_url, model) as desk:
        overview = desk.overview()
    _print(overview, as_json, lambda: overview_table(overview))


@app.command()
def show(
    version: Version,
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """One version: where it comes from, the gate's numbers, and every change of its state with its reason."""
    with _desk(store, redis_url, model) as desk:
        details = desk.show(version)
    _print(details, as_json, lambda: details_tables(details))


@app.command()
def diff(a: Version, b: Version, store: StoreOption = STORE, as_json: AsJson = False) -> None:
    """What changed from one version to another: tensors, config, manifest."""
    with _desk(store, DEFAULT_REDIS_URL, None) as desk:
        difference = desk.diff(a, b)
    _print(difference, as_json, lambda: difference_tables(difference))


@app.command()
def promote(
    version: Version,
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines serve a version; one in quarantine is released. Engines go on watching it."""
    with _desk(store, redis_url, model) as desk:
        _say("promoted", desk.promote(version, actor=operator()), as_json)


@app.command()
def rollback(
    reason: Annotated[str, typer.Option(help="Kept in the version's history.")],
    version: Annotated[int | None, typer.Option(min=1, help="Default: the one that engines should run.")] = None,
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Take a version out of service, and have engines serve the last good one instead."""
    with _desk(store, redis_url, model) as desk:
        _say("rolled back", desk.rollback(actor=operator(), reason=reason, version=version), as_json)


@app.command()
def pin(
    version: Version,
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines serve one version, whatever the trainer publishes, until `unpin`."""
    with _desk(store, redis_url, model) as desk:
        _say("pinned", desk.pin(version, actor=operator()), as_json)


@app.command()
def unpin(
    store: StoreOption = STORE,
    redis_url: RedisOption = DEFAULT_REDIS_URL,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Have engines serve what the trainer publishes again."""
    with _desk(store, redis_url, model) as desk:
        _say("unpinned", desk.unpin(actor=operator()), as_json)


@app.command()
def export(
    version: Version,
    out: Annotated[Path, typer.Option(help="Folder to write: a checkpoint as SGLang and Hugging Face load it.")],
    store: StoreOption = STORE,
    as_json: AsJson = False,
) -> None:
    """Write a version as a folder of its own, after verifying it."""
    with _desk(store, DEFAULT_REDIS_URL, None) as desk:
        folder = desk.export(version, out, actor=operator())
    _print({"folder": str(folder)}, as_json, lambda: [str(folder)])


@contextlib.contextmanager
def _desk(store_dir: Path, redis_url: str, model: str | None) -> Iterator[DraftDesk]:
    from speculator.draft.checkpoint import model_key
    from speculator.redis.client import connect
    from speculator.redis.control_plane import DraftPointer
    from speculator.versions.operator import DraftDesk
    from speculator.versions.store import DraftStore

    store = DraftStore(store_dir)
    newest = store.latest()
    if newest is None:
        raise ConfigError(f"{store_dir} holds no draft versions: check --store")
    fingerprint = store.manifest(newest).target_fingerprint
    with contextlib.ExitStack() as opened:

        @cache
        def pointer() -> DraftPointer:
            if model is None:
                raise ConfigError("no Redis was asked: pass --model, the target that the engines serve")
            # The fingerprint is the newest draft's: reading a large target's weights takes minutes.
            key = model_key(resolve_model(model), fingerprint)
            return DraftPointer(opened.enter_context(connect(redis_url)), key)

        yield DraftDesk(store, pointer)


def operator() -> str:
    try:
        return f"operator:{getpass.getuser()}"
    except (KeyError, OSError):
        # A container's user need not have a name.
        return f"operator:{os.getuid()}"


def _print(document: Any, as_json: bool, tables: Callable[[], list[Any]]) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(document)).decode())
        return
    console = Console()
    for table in tables():
        console.print(table, highlight=False, markup=False, soft_wrap=isinstance(table, str))


def _say(what: str, outcome: Outcome, as_json: bool) -> None:
    state = "unknown" if outcome.state is None else outcome.state.value
    line = f"{what}: draft version {outcome.version}, {state}; engines should run {or_dash(outcome.desired)}"
    _print(outcome, as_json, lambda: [line])
