"""A process that dies at a chosen step: from then on nothing that it does reaches the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_STEPS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
"""Whatever the store's modules change in a folder, they change with these; a file's content counts as its fsync."""


class Crash(BaseException):
    """Not an Exception: no handler of errors may save what a kill would not spare."""


@contextlib.contextmanager
def dying_before(step: int) -> Iterator[None]:
    """Call number `step`, from 0, to the file system raises Crash, and so does every later one."""
    num_made = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_made
            if num_made >= step:
                raise Crash(name)
            num_made += 1
            # Nobody cuts the power here: only the order of the calls matters.
            return None if name == "fsync" else call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in _STEPS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield
