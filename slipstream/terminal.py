"""What a person at a terminal sees beside the results: one console on standard error, and how far long work is.

Standard output is left to results, so that it can go into a pipe. Where standard error is no terminal, nothing moves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console(stderr=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show that something of unknown length is at work; on a terminal only."""
    with console.status(what) if console.is_terminal else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar that is told how much is done, of how much where that is known; on a terminal only."""
    columns = SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say(line: str) -> None:
    """A line for a person, as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """A result for a program, on standard output."""
    typer.echo(json.dumps(document, indent=2))
