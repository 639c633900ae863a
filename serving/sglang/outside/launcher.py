"""Start SGLang as a child process with the plugin configured, wait until it serves, and end it with its workers.

SGLang pins its own torch, so it usually has an environment of its own: `find_interpreter` and `check_interpreter` say
whether the plugin is installed there. SGLang's processes share one process group of their own, so that Ctrl-C reaches
us first. When we are killed, the kernel ends SGLang's main process and SGLang its workers.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx

from serving.capture.sampling import DEFAULT_BRANCH_SHARE, DEFAULT_FLOOR
from speculator.errors import ConfigError, EngineDeadError
from speculator.host import end_with_parent, free_port, path_option

REFUSAL = "slipstream: "
"""How the plugin's line begins when it refuses to let SGLang start."""
_RESERVED = (
    *("--model-path", "--model", "--served-model-name", "--host", "--port", "--api-key"),
    *("--speculative-draft-model-path", "--speculative-draft-model"),
)
"""Flags that the gateway and the plugin rely on."""
# The only backends whose CPU kernels can verify a tree; without AMX, SGLang overrides a plain `--attention-backend`.
# `--sleep-on-idle` leaves the cores to a trainer beside it.
_ON_CPU = (
    *("--attention-backend", "torch_native", "--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx", "--speculative-draft-attention-backend", "intel_amx"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--sleep-on-idle", "--max-total-tokens", "20000"),
)
_POLL_S = 0.2
_TAIL_LINES = 30


@dataclass(frozen=True, kw_only=True)
class SglangStart:
    """An operator's settings of an SGLang server and of the plugin in it."""

    python: Path | None
    """Interpreter of the environment that has SGLang and Slipstream; None looks for one."""
    model_dir: Path
    model_name: str
    depth: int
    dtype: str
    device: str
    redis_url: str
    store: Path
    capture: bool
    suffix_depth: int
    """Most proposals from earlier text."""
    control_share: float
    plain_share: float
    context_window: int
    capture_bytes_per_s: int
    """0 sets no limit."""
    stream_max_bytes: int
    trace_ttl_hours: float = 0
    capture_filter: str | None = None
    share_groups: bool = False
    capture_floor: float = DEFAULT_FLOOR
    branch_share: float = DEFAULT_BRANCH_SHARE
    extra: tuple[str, ...] = ()
    """Arguments of SGLang's own, passed last."""

    def __post_init__(self) -> None:
        for argument in self.extra:
            if (flag := argument.partition("=")[0]) in _RESERVED:
                raise ConfigError(f"{flag} is set by slipstream: leave it out after --")


@dataclass(frozen=True, kw_only=True)
class SglangOptions(SglangStart):
    """One SGLang server that can be started: its interpreter is known, and which draft it loads first."""

    draft_dir: Path
    """The version in the store that is loaded first."""
    engine_id: str
    model_key: str
    target_fingerprint: str


def command(options: SglangOptions, *, port: int, adaptive_config: Path, host: str = "127.0.0.1") -> list[str]:
    return [
        *(str(options.python), *path_option(), "-m", "sglang.launch_server"),
        *("--model-path", str(options.model_dir), "--served-model-name", options.model_name),
        *("--host", host, "--port", str(port), "--enable-metrics"),
        *("--dtype", options.dtype, "--device", options.device),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(options.draft_dir)),
        *("--speculative-num-steps", str(options.depth), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(options.depth + 1)),
        # Otherwise options in `extra` for the target's weights would apply to the draft as well.
        *("--speculative-draft-model-quantization", "unquant", "--speculative-draft-load-format", "safetensors"),
        *("--speculative-adaptive", "--speculative-adaptive-config", str(adaptive_config)),
        *(_ON_CPU if options.device == "cpu" else ()),
        *options.extra,
    ]


def tp_size(words: Sequence[str]) -> int:
    """The number of GPUs over which SGLang splits the target, by its arguments."""
    for flag, value in itertools.pairwise([part for word in words for part in word.split("=", 1)]):
        if flag in ("--tp-size", "--tp", "--tensor-parallel-size") and value.isdecimal():
            return max(int(value), 1)
    return 1


def adaptive_config(depth: int, suffix_depth: int) -> dict[str, dict[str, list[int]]]:
    """SGLang's config of candidate depths for every batch size: 0, each twice the one before, and `depth`; for earlier
    text half of `suffix_depth`, and all of it.

    SGLang captures graphs of verification and of the draft for each of them at its start, and keeps their memory.
    """
    doubled = itertools.takewhile(lambda steps: steps < depth, (1 << power for power in itertools.count()))
    of_text = [steps for steps in (suffix_depth // 2, suffix_depth) if steps > depth]
    return {"1": {"candidate_steps": [0, *doubled, depth, *of_text]}}


_OF_GATEWAY = ("SLIPSTREAM_GATEWAY_", "SLIPSTREAM_API_KEY")


def environment(options: SglangOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    # Imported here: `slipstream doctor` looks for an interpreter where PyTorch may be broken.
    from serving.sglang.settings import PREFIX, PluginSettings

    given = {**vars(options), "store": options.store.absolute(), "capture_unmarked": False}
    ours = {
        f"{PREFIX}ENABLED": "1",
        **{f"{PREFIX}{name.upper()}": _word(given[name]) for name in PluginSettings.model_fields if name in given},
        # Otherwise it would generate a token at each health check.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # At its start it requests an answer of itself, and ends where a proxy gets that request.
        "no_proxy": _with_loopback(inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""),
    }
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if options.device == "cpu" else {}
    # The gateway's settings, its keys among them, are none of SGLang's.
    others = {name: value for name, value in inherited.items() if not name.startswith(_OF_GATEWAY)}
    return {**others, **on_cpu, **ours}


def _word(value: object) -> str:
    """A setting as the plugin reads it from the environment."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def _with_loopback(no_proxy: str) -> str:
    return no_proxy if no_proxy == "*" else f"{no_proxy},127.0.0.1,::1".lstrip(",")


class SglangProcess:
    """One SGLang server from its start to `stop`; everything it prints goes on to our standard error.

    Start it from a thread that lives as long as it should: the kernel takes the end of that thread for ours.
    """

    def __init__(self, options: SglangOptions) -> None:
        self._port = free_port()
        self._scratch = tempfile.TemporaryDirectory(prefix="slipstream-sglang-")
        candidates = Path(self._scratch.name) / "adaptive.json"
        candidates.write_text(json.dumps(adaptive_config(options.depth, options.suffix_depth)))
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._refusal: str | None = None
        try:
            self._process = subprocess.Popen(
                command(options, port=self._port, adaptive_config=candidates),
                env=environment(options, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            self._scratch.cleanup()
            raise ConfigError(f"{options.python} cannot be run ({error.strerror}): check --sglang-python") from error
        assert self._process.stdout is not None, "it is a pipe"
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), name="sglang-output")
        self._reader.daemon = True
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def is_alive(self) -> bool:
        return self._exit_status() is None

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return once requests are served.

        Raises ConfigError with the plugin's own line where it refused, or when the time is over, and EngineDeadError
        with the last lines of output where SGLang ended for another reason.
        """
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5, trust_env=False) as client:
            while time.monotonic() < deadline:
                self.check()
                with suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return
                time.sleep(_POLL_S)
        raise ConfigError(
            f"SGLang was not healthy after {timeout_s:.0f} s: see its output, or raise --start-timeout-s\n{self._end()}"
        )

    def check(self) -> None:
        """Raise ConfigError when the plugin has refused, EngineDeadError when SGLang has ended for another reason."""
        status = self._exit_status()
        if status is not None:
            # Output of its last processes may still arrive.
            self._reader.join(timeout=2)
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        if status is not None:
            raise EngineDeadError(f"SGLang ended with code {status}; its last lines:\n{self._end()}")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Terminate SGLang, and after it has ended or after `timeout_s` kill it and its workers."""
        if self._process.returncode is None:
            self._process.terminate()
            deadline = time.monotonic() + timeout_s
            while self.is_alive and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            # The main process has not been waited for yet, so its number is still that of its group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=2)
        self._scratch.cleanup()

    def __enter__(self) -> SglangProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _exit_status(self) -> int | None:
        """Exit code, or the number of the signal; None while it runs. Leaves the process for `stop` to wait for."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return None if ended is None else ended.si_status

    def _read(self, output: IO[bytes]) -> None:
        """Never stops reading: a full pipe would hold SGLang up."""
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                self._tail.append(line)
                if self._refusal is None and line.startswith(REFUSAL):
                    self._refusal = line
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"{line}\n")
                    sys.stderr.flush()

    def _end(self) -> str:
        return "\n".join(self._tail)


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
        # A bare name is of the PATH, which `os.execve` does not search.
        return Path(shutil.which(given) or given)
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
            [str(python), *path_option(), "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=True,
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
