"""Read `--config FILE.yaml` of the services; `slipstream config show` prints where each value comes from.

    flag > variable of the environment > file > default

A file has the names of the flags, without their dashes: `model: DIR`, `learn: true`, `redis-url: …`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
import yaml
from rich.table import Table
from typer.core import TyperCommand

from slipstream.cli.options import AsJson
from slipstream.settings import variables
from slipstream.terminal import print_json, print_table
from speculator.errors import ConfigError
from speculator.host import check_private, expanded

app = typer.Typer(no_args_is_help=True, help="What a service would be started with.")
_SECRET, _HIDDEN = ("api_key",), "(secret)"
_SOURCES = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file", "DEFAULT": "default"}


class _Loader(yaml.BaseLoader):
    """Keeps values as they are written, as on the command line: YAML would read 0123 as 83, 1.10 as 1.1 and `no` as
    False. Refuses a repeated key, where YAML would take the last value.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ConfigError(f"{twice[0]!r} appears twice in {self.name}: leave one of them out")
        return super().construct_mapping(node, deep)


_NULL = "tag:yaml.org,2002:null"
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|)$"), ["~", "n", ""])
_Loader.add_constructor(_NULL, lambda *_: None)


def _read(path: Path) -> dict[str, Any]:
    """Parse the file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            loader = _Loader(file)
            try:
                found = loader.get_single_data()
            finally:
                loader.dispose()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check --config") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML ({' '.join(str(error).split())})") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a mapping of options: write lines such as `model: DIR`")
    return found


def load_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of `--config`: its values become the defaults of the other options. Raises ConfigError."""
    if path is None or context.resilient_parsing:
        return path
    fields = {
        option.removeprefix("--"): parameter.name or ""
        for parameter in context.command.params
        for option in (*parameter.opts, *([parameter.name.replace("_", "-")] if parameter.name else []))
        if parameter.name not in ("config", "help")
    }
    repeatable = {
        parameter.name
        for parameter in context.command.params
        if getattr(parameter, "multiple", False) or parameter.nargs == -1
    }
    given: dict[str, tuple[str, Any]] = {}
    for name, value in _read(Path(path)).items():
        key = str(name).replace("_", "-")
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1)
            hint = f"is {nearest[0]} meant?" if nearest else f"see `slipstream {context.command.name} --help`"
            raise ConfigError(f"{path}: {context.command.name} has no option {name}: {hint}")
        if isinstance(value, Mapping):
            raise ConfigError(f"{path}: {name} has nested names: write one value after it")
        if isinstance(value, list) and (
            fields[key] not in repeatable or not all(isinstance(item, str) for item in value)
        ):
            raise ConfigError(f"{path}: {name} has a list that it does not take: write one value after it")
        if fields[key] in given:
            raise ConfigError(f"{path}: {given[fields[key]][0]} and {name} set the same option: leave one of them out")
        given[fields[key]] = str(name), value
    if any(field in given for field in _SECRET):
        check_private(path, "--config")
    context.default_map = {
        field: [value] if field in repeatable and isinstance(value, str) else value
        for field, (_, value) in given.items()
    }
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        is_eager=True,
        callback=load_defaults,
        help="YAML file with option values; a flag or a variable overrides it.",
    ),
]


class _Show(TyperCommand):
    """Keeps `--` and what follows for the service: SGLang's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args += args[end:]
        left: list[str] = ctx.args
        return left


@app.command(cls=_Show, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def show(
    context: typer.Context,
    service: Annotated[
        str, typer.Argument(metavar="SERVICE", help="Service (serve, gateway, sglang or train) and its options.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the values that a service would start with, and where each comes from; nothing starts."""
    # Imported here: these modules import this one.
    from slipstream.cli.main import app as slipstream
    from slipstream.cli.services import source_of

    commands: Mapping[str, Any] = getattr(typer.main.get_command(slipstream), "commands")  # noqa: B009
    if service not in ("serve", "gateway", "sglang", "train"):
        raise ConfigError(f"{service} is not a service: choose serve, gateway, sglang or train")
    command = commands[service]
    asked = command.make_context(f"slipstream {service}", list(context.args))
    learning = _learning(asked) if asked.params.get("learn") else {}
    rows = []
    for option in command.params:
        if option.name in ("config", "help"):
            continue
        value, source = learning.get(option.name, (asked.params[option.name], source_of(asked, option.name)))
        where = _SOURCES.get(source, "default")
        if option.name in _SECRET and value is not None:
            value = _HIDDEN
        elif option.name == "redis_url":
            value = _without_secrets(value)
        if where == "variable":
            where = next(iter(variables(option)), where)
        rows.append({"name": option.name.replace("_", "-"), "value": value, "from": where})
    if as_json:
        print_json([{**row, "value": _plain(row["value"])} for row in rows])
        return
    table = Table("option", "value", "from")
    for row in rows:
        table.add_row(row["name"], "–" if row["value"] is None else str(row["value"]), row["from"])
    print_table(table)


def _learning(asked: typer.Context) -> dict[str, tuple[Any, str]]:
    """What `serve --learn` uses in place of its options: (value, source) by option."""
    from slipstream.cli.services import is_in_data_dir, source_of
    from slipstream.start.learning import DataDir, default_data_dir
    from speculator.draft.checkpoint import model_name
    from speculator.redis.embedded import socket_url

    given, source = asked.params, source_of(asked, "data_dir")
    # An id is the name of its model, and need not be looked up.
    name = given["name"] or (model_name(folder) if (folder := expanded(given["model"])).is_dir() else given["model"])
    root = given["data_dir"] or default_data_dir(name)
    data = DataDir(root.absolute())
    places = {"redis_url": socket_url(data.redis), "store": data.store}
    return {
        "data_dir": (root, source),
        "capture": (True, source_of(asked, "learn")),
        **{option: (place, source) for option, place in places.items() if is_in_data_dir(asked, option)},
    }


def _without_secrets(redis_url: str) -> str:
    from speculator.redis.client import RedisUrl

    try:
        parsed = RedisUrl.parse(redis_url)
    except (ConfigError, ValueError):
        return "(unreadable)"
    options = {name: value for name, value in parsed.options.items() if "password" not in name and name != "db"}
    user = options.pop("username", "")
    shown = parsed.shown.replace("://", f"://{user}@", 1) if user else parsed.shown
    return shown + ("?" + urlencode(options) if options else "")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
