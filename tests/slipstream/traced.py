"""A `slipstream` command that notes which of our files its functions are in: `python -m tests.slipstream.traced OUT …`.

It begins to note at SIGUSR1, when the service has started, and writes the names to OUT when it ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from slipstream.cli.main import main

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("serving", "trainer", "speculator", "slipstream"))


class Visits:
    """The files in which a function was called since `begin`, by any thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._noting = False

    def begin(self, *_: object) -> None:
        self._noting = True

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """As `sys.setprofile` calls it."""
        if self._noting and event == "call":
            self.files.add(frame.f_code.co_filename)


if __name__ == "__main__":
    out = Path(sys.argv.pop(1))
    visits = Visits()
    signal.signal(signal.SIGUSR1, visits.begin)
    threading.setprofile(visits.note)
    sys.setprofile(visits.note)
    try:
        main()
    finally:
        sys.setprofile(None)
        ours = sorted(name.removeprefix(f"{ROOT}/") for name in visits.files if name.startswith(PACKAGES))
        out.write_text("\n".join(ours), encoding="utf-8")
