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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

console = Console(stderr=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[], None]]:
    """Show that something of unknown length is at work, and since when; on a terminal only. What is yielded ends it
    before the end of the block.
    """
    with _progress(what) as progress:
        progress.add_task(what)
        yield progress.stop


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A bar that is told how much is done, of how much where that is known; on a terminal only."""
    with _progress(what, BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress(what: str, *columns: ProgressColumn) -> Progress:
    """One at a time. What is logged meanwhile stands above it."""
    shown = SpinnerColumn(), TextColumn(what, markup=False), *columns, TimeElapsedColumn()
    return Progress(*shown, console=console, disable=not console.is_terminal, transient=True)


def say(line: str) -> None:
    """A line for a person, as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """A result for a program, on standard output."""
    typer.echo(json.dumps(document, indent=2))
