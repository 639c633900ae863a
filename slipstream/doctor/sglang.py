"""SGLang: an interpreter that has it with the plugin, and every place in it that the plugin hooks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from serving.sglang.outside.launcher import check_interpreter, find_interpreter
from slipstream.doctor.finding import Finding, failed, ok

_TIMEOUT_S = 300.0
_HOOKS = """
from importlib.metadata import version
from serving.sglang.plugin.hooks import TARGETS, check_targets
check_targets(version("sglang"))
print(f"{version('sglang')}, all {len(TARGETS)} places that the plugin hooks are there")
"""


def check_sglang(given: Path | None) -> Iterator[Finding]:
    """Importing SGLang takes half a minute; a place that has moved is named."""
    python = find_interpreter(given)
    check_interpreter(python)
    yield ok("sglang", f"with the plugin at {python}")
    try:
        done = subprocess.run([python, "-c", _HOOKS], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield failed("sglang hooks", f"{python} did not import SGLang within {_TIMEOUT_S:.0f} s: try it by hand")
        return
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or ["no output"]
    yield (failed if done.returncode else ok)("sglang hooks", last[0])
