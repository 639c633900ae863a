"""Writes the tables of docs/configuration.md: `python -m slipstream.configuration_page docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slipstream.cli.main import app
from slipstream.settings import commands, groups, variables

MARKER = "<!-- What follows is written by `make docs`; a test compares. -->\n"


def page(path: Path, generated: str) -> str:
    """A page of docs/ with what stands below its marker written anew. Raises ValueError where it has no marker."""
    head, marker, _ = path.read_text().partition(MARKER)
    if not marker:
        raise ValueError(f"{path} has no line {MARKER!r}")
    return f"{head}{marker}\n{generated}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


def configuration() -> str:
    """All environment variables and all options of all commands."""
    parts = ["## Environment variables\n"]
    for title, settings in groups().items():
        parts += [f"### {title}\n", table(("variable", "type", "default", "meaning"), map(_setting, settings))]
    return "\n".join([*parts, "## Commands\n", *_commands()])


def _setting(setting: tuple[str, ...]) -> tuple[str, ...]:
    variable, *rest = setting
    return f"`{variable}`", *rest


def _commands() -> Iterator[str]:
    for name, command in commands(app):
        arguments = [option for option in command.params if option.param_type_name == "argument"]
        yield f"### `{name}`\n"
        yield f"{' '.join((command.help or '').split())}\n"
        if arguments:
            yield f"Arguments: `{' '.join(option.metavar or option.name.upper() for option in arguments)}`\n"
        rows = [_option(option) for option in command.params if option.param_type_name == "option"]
        if rows:
            yield table(("option", "variable", "default", "meaning"), rows)


def _option(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in option.opts)
    environment = ", ".join(f"`{name}`" for name in variables(option))
    if option.required:
        default = "required"
    elif option.is_flag:
        default = "on" if option.default else "off"
    else:
        default = "–" if option.default is None else f"{option.default}"
    return names, environment, default, option.help or ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(Path(sys.argv[1]), configuration()))
