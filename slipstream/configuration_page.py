"""Writes the page of all settings and options: `python -m slipstream.configuration_page docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slipstream.cli import app
from slipstream.settings import Group, commands, groups, variables

_INTRODUCTION = """\
# Configuration

This page is generated from the code by `make docs`; a test fails where it is stale.

What concerns one start is an option of the command; what an operator sets once is an environment variable. An option on
the command line stands before its variable. A value that cannot be used ends the start with one line that names the
variable, and exit code 2; `slipstream doctor` checks them all and points out variables that nothing reads.

Exit codes: 0 done, 1 something failed while it ran or `doctor` found a fault, 2 something has to be changed first (an
option, a setting, the model, Redis, the store).

`slipstream --install-completion` makes the shell complete commands and options; `--show-completion` prints what it
would install.
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_INTRODUCTION, "## Environment variables\n", *_settings(), "## Commands\n", *_commands()])


def _settings() -> Iterator[str]:
    for group in groups():
        yield f"### {group.title}\n"
        if group.class_name:
            yield f"`{group.class_name}`\n"
        yield _table(("variable", "type", "default", "meaning"), _rows(group))


def _rows(group: Group) -> Iterator[tuple[str, ...]]:
    for each in group.settings:
        yield f"`{each.variable}`", each.kind, each.default, each.meaning


def _commands() -> Iterator[str]:
    for name, command in commands(app):
        arguments = [option for option in command.params if option.param_type_name == "argument"]
        usage = " ".join(option.metavar or option.name.upper() for option in arguments)
        yield f"### `{name}`\n"
        yield f"{_paragraph(command.help)}\n"
        if usage:
            yield f"Arguments: `{usage}`\n"
        rows = [_option(option) for option in command.params if option.param_type_name == "option"]
        if rows:
            yield _table(("option", "variable", "default", "meaning"), rows)


def _option(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in option.opts)
    environment = ", ".join(f"`{name}`" for name in variables(option))
    default = "required" if option.required else _default(option)
    return names, environment, default, option.help or ""


def _default(option: Any) -> str:
    if option.is_flag:
        return "on" if option.default else "off"
    return "–" if option.default is None else f"{option.default}"


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
