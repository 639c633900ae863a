"""Console output for people: messages and progress bars on standard error.

Standard output has only results, so that it can go into a pipe. Progress is shown only where standard error is a
terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
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
from rich.table import Table

console = Console(stderr=True)
_NO_LIMIT = 1_000_000
"""Columns; a table takes those that it needs."""


def prepare_streams() -> None:
    """Open standard streams that the caller closed to nowhere, and let standard output show "?" for a character that
    its encoding lacks.

    A closed descriptor would become that of the next file or socket, and what a library prints would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextlib.contextmanager
def spinner(what: str) -> Iterator[Callable[[], None]]:
    """Show a spinner with the elapsed time, on a terminal only. Yields a function that ends it before the end of the
    block.
    """
    with _progress(what) as progress:
        progress.add_task(what)
        yield progress.stop


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar, on a terminal only. Yields a function that sets (number done, total or None)."""
    with _progress(what, BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress(what: str, *columns: ProgressColumn) -> Progress:
    """Only one may run at a time. Log lines appear above it."""
    shown = SpinnerColumn(), TextColumn(what, markup=False), *columns, TimeElapsedColumn()
    return Progress(*shown, console=console, disable=not console.is_terminal, transient=True)


def print_status(line: str) -> None:
    """Print a line on standard error, without markup."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(table: Table, *, may_fold: bool = True) -> None:
    """Print a table on standard output, without markup. No cell is cut.

    A terminal's width folds cells, unless `may_fold` is false. In a pipe or a file, a row is one line.
    """
    for column in table.columns:
        column.overflow = "fold"
    width = None if may_fold and sys.stdout.isatty() else _NO_LIMIT
    Console(width=width, emoji=False).print(table, highlight=False, markup=False)


def print_json(document: Any) -> None:
    """Print a result as JSON on standard output."""
    typer.echo(json.dumps(document, indent=2))
