"""A process that has imported what `slipstream serve` and `slipstream train` need, and becomes one by forking.

Importing takes a service of a toy target most of its time (tests/fixtures/preloaded.py).
"""

from __future__ import annotations

import runpy
import sys

from tests.fixtures.preloaded import Order, take_orders

_MODULES = (
    "slipstream.cli.main",
    "slipstream.start.gateway",
    "slipstream.start.learning",
    "slipstream.start.local",
    "slipstream.start.sglang",
    "trainer.process",
)


def _run(order: Order) -> None:
    """Run `python -m MODULE WORDS`."""
    module, *words = order.words
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    take_orders(_MODULES, _run)
