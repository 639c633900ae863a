"""Which Python has SGLang, and whether the plugin is installed beside it.

SGLang pins its own torch, so it usually lives in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from speculator.errors import ConfigError

_PROJECT = Path(__file__).resolve().parents[3]
_PROBE_TIMEOUT_S = 60.0

_PROBE = """
import importlib.metadata as metadata, importlib.util, json
plugins = metadata.entry_points(group="sglang.srt.plugins")
print(json.dumps({
    "has_sglang": importlib.util.find_spec("sglang") is not None,
    "plugins": [plugin.name for plugin in plugins if plugin.value.startswith("serving.sglang")],
}))
"""


def find_interpreter(given: Path | None = None) -> Path:
    """The interpreter to run SGLang with; raises ConfigError naming the fix where there is none."""
    if given is not None:
        return given
    if find_spec("sglang") is not None:
        return Path(sys.executable)
    beside = _PROJECT / ".venv-sglang" / "bin" / "python"
    if os.access(beside, os.X_OK):
        return beside
    raise ConfigError(
        "SGLang is not installed here: pip install 'slipstream-spec[sglang]', or pass --sglang-python the interpreter "
        "of an environment that has it"
    )


def check_interpreter(python: Path) -> None:
    """Raise ConfigError unless SGLang would load the plugin: without it, it would serve and learn nothing."""
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} is not a Python that runs: check --sglang-python") from error
    if not found["has_sglang"]:
        raise ConfigError(f"{python} has no SGLang: install sglang there, or pass another --sglang-python")
    if not found["plugins"]:
        raise ConfigError(f"{python} has SGLang without the plugin: install slipstream-spec there too")
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and not allowed & set(found["plugins"]):
        raise ConfigError(f"SGLANG_PLUGINS leaves the plugin out: add {found['plugins'][0]} to it, or unset it")
