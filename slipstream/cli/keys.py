"""`slipstream keys`: add, list and revoke API keys. A running gateway reads its file again after every change."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from slipstream.cli.options import AsJson, finite
from slipstream.terminal import print_json, print_table
from speculator.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="API keys of the gateway: make, list and revoke them.")

Name = Annotated[str, typer.Argument(help="Name of the key: letters, digits, '.', '_' and '-'.")]
File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="SLIPSTREAM_GATEWAY_KEYS_FILE", help="File that the gateway reads; it holds no secrets."
    ),
]

_DAY_S = 86_400


@app.command()
def add(
    name: Name,
    file: File,
    tenant: Annotated[str | None, typer.Option(help="Tenant of its traffic; default: the key's name.")] = None,
    capture: Annotated[bool, typer.Option(help="Allow its requests to be recorded, if `serve` records.")] = True,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Allow models, metrics and the live page's figures; no generation.")
    ] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests a minute; default: no limit.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; default: the gateway's share per key.")
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Days until it expires; default: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print its secret, once: it is stored nowhere."""
    from serving.gateway.keys import ApiKey, change_keys, make_key, new_secret

    lifetime_s = None if expires_days is None else round(expires_days * _DAY_S)
    if lifetime_s == 0:
        raise ConfigError(f"--expires-days {expires_days:g} makes a key that has expired: give a positive number")
    secret = new_secret()
    key = make_key(
        name,
        secret,
        tenant=tenant or name,
        capture=capture,
        read_only=read_only,
        requests_per_minute=requests_per_minute,
        max_concurrent=max_concurrent,
        lifetime_s=lifetime_s,
    )

    def with_it(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        if any(other.name == name for other in keys):
            raise ConfigError(f"there is a key {name!r} already: choose another name, or revoke that one first")
        return (*keys, key)

    change_keys(file, with_it)
    if as_json:
        print_json({**_shown(key), "key": secret})
    else:
        typer.echo(secret)


@app.command("list")
def list_keys(file: File, as_json: AsJson = False) -> None:
    """List all keys and what they may do, without secrets."""
    from serving.gateway.keys import read_keys

    keys = [_shown(key) for key in read_keys(file)]
    if as_json:
        print_json(keys)
    else:
        # `slipstream keys revoke` needs a whole name.
        print_table(_table(keys), may_fold=False)


@app.command()
def revoke(name: Name, file: File, as_json: AsJson = False) -> None:
    """Remove a key: the next request with it is refused. Running answers finish."""
    from serving.gateway.keys import ApiKey, change_keys

    def without_it(keys: tuple[ApiKey, ...]) -> list[ApiKey]:
        rest = [key for key in keys if key.name != name]
        if len(rest) == len(keys):
            raise ConfigError(f"there is no key {name!r}: `slipstream keys list` shows all")
        return rest

    change_keys(file, without_it)
    if as_json:
        print_json({"revoked": name})
    else:
        typer.echo(f"revoked {name}")


def _shown(key: Any) -> dict[str, Any]:
    """An ApiKey as a dict without its digest."""
    shown = msgspec.structs.asdict(key)
    del shown["sha256"]
    return {**shown, "is_expired": key.is_expired(time.time())}


def _table(keys: list[dict[str, Any]]) -> Table:
    columns = ("name", "tenant", "may", "captured", "a minute", "at once", "made", "expires")
    # Without borders, a row with usual names fits into 80 columns.
    table = Table(*columns, box=None, pad_edge=False)
    for key in keys:
        expires = "never" if key["expires_s"] is None else _day(key["expires_s"])
        table.add_row(
            key["name"],
            key["tenant"],
            "read" if key["read_only"] else "generate",
            "yes" if key["capture"] else "no",
            str(key["requests_per_minute"] or "–"),
            str(key["max_concurrent"] or "–"),
            _day(key["created_s"]),
            f"{expires}, over" if key["is_expired"] else expires,
        )
    return table


def _day(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d")
