"""Real SGLang as a child process, on the GPU where there is one and on the CPU elsewhere, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from speculator.draft.eagle3 import is_fast
from speculator.host import free_port, split_lines
from tests.fixtures.preloaded import ForkedProcess, Preloaded
from tests.sglang.preloaded import read_on_import

OPS_DIR = Path(__file__).parent / "ops"
IS_ON_GPU = torch.cuda.is_available()
_COMMON_FLAGS = ("--sleep-on-idle", "--skip-server-warmup", *("--max-total-tokens", "20000"))
_CPU_FLAGS = (
    *("--device", "cpu"),
    # Named one by one: SGLang replaces a plain `--attention-backend intel_amx` where the CPU has no AMX.
    *("--attention-backend", "torch_native"),
    *("--prefill-attention-backend", "intel_amx"),
    *("--decode-attention-backend", "intel_amx"),
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    *_COMMON_FLAGS,
)
_GPU_FLAGS = (
    *("--attention-backend", "triton"),
    *("--sampling-backend", "pytorch"),
    # Several servers start at a time: each is bounded by its number of tokens, and has to take the others' weights in.
    *("--mem-fraction-static", "0.9"),
    *("--cuda-graph-max-bs-decode", "8"),
    *("--cuda-graph-backend-prefill", "disabled"),
    *_COMMON_FLAGS,
)
DEVICE_FLAGS = _GPU_FLAGS if IS_ON_GPU else _CPU_FLAGS
"""What real SGLang must be told: on a CPU that it has the operators in `ops`, on a GPU to do without FlashInfer, which
compiles for minutes; overlap scheduling and graphs stay on there."""


def environment() -> dict[str, str]:
    """The variables of real SGLang; on a CPU its operators are among them, and one thread a process."""
    if IS_ON_GPU:
        return {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    inherited = os.environ.get("PYTHONPATH")
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(OPS_DIR), inherited))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # SGLang compiles one small function of the draft's with a C++ compiler, twenty seconds into the first request.
        "TORCHDYNAMO_DISABLE": "1",
        # Three processes import 7,500 modules each: keeping their bytecode halves a start.
        "PYTHONDONTWRITEBYTECODE": "",
        **dict.fromkeys(threads, "1"),
    }


def ranks_environment(count: int) -> dict[str, str]:
    """The variables of real SGLang in so many ranks on a CPU: a core each, as far as they go, and no NCCL."""
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(count))
    return {"SGLANG_CPU_OMP_THREADS_BIND": bound, "SGLANG_NCCL_SO_PATH": "none"}


def speculative_flags(draft_dir: Path, *, num_steps: int = 3, topk: int = 1) -> list[str]:
    """EAGLE-3 with `num_steps` draft steps; verifies a chain, or for `topk` > 1 a tree as large as `topk` chains."""
    return [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(draft_dir)),
        *("--speculative-draft-attention-backend", "triton" if IS_ON_GPU else "intel_amx"),
        *("--speculative-num-steps", str(num_steps)),
        *("--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(1 + topk * num_steps)),
    ]


def dtype_flags() -> list[str]:
    """The checkpoint's own bfloat16, or float32 where PyTorch takes several times as long for that on this CPU."""
    return [] if IS_ON_GPU or is_fast(torch.device("cpu")) else ["--dtype", "float32"]


@functools.cache
def _preloaded(variables: tuple[tuple[str, str], ...]) -> Preloaded:
    return Preloaded("tests.sglang.preloaded", {**os.environ, **environment(), **dict(variables)})


class ServerEndedError(RuntimeError):
    """SGLang ended or was not ready in time; carries the end of its log."""


class SglangServer:
    """One SGLang server on a free loopback port; `with` starts it, waits until it serves, and ends all its processes.

    On a CPU it is forked from a process that has imported SGLang with the same variables (tests/sglang/preloaded.py).

    Raises ServerEndedError when it ends by itself or is not ready after `ready_timeout_s`.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        log_path: Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 480.0,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._words = [
            *("--model-path", str(model_dir), "--host", "127.0.0.1", "--port", str(self.port)),
            # Its own choice is free when it looks and bound a second later: two that start together may take the same.
            *("--nccl-port", str(free_port())),
            *DEVICE_FLAGS,
            *flags,
        ]
        self._own_env = dict(env or {})
        self._ready_timeout_s = ready_timeout_s
        # SGLang may close an idle connection just as a request goes out on it.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=120, limits=limits, trust_env=False)
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        # SGLang leaves the sockets between its processes behind.
        self._sockets = tempfile.TemporaryDirectory(prefix="sglang-")
        env = {**os.environ, **environment(), **self._own_env, "TMPDIR": self._sockets.name}
        if not IS_ON_GPU:
            preloaded = _preloaded(tuple(sorted(read_on_import(self._own_env).items())))
            self._process = preloaded.start(self._words, env, self.log_path)
        else:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "sglang.launch_server", *self._words],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """The launcher's process id, which is also its process group's."""
        assert self._process is not None
        return self._process.pid

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def server_info(self) -> dict[str, Any]:
        """SGLang's own account of its settings and, under `internal_states`, of each scheduler."""
        return self._json(self._client.get("/server_info"))

    def max_running_requests(self) -> int:
        """How many requests its scheduler takes at a time."""
        limit = self.server_info()["internal_states"][0]["effective_max_running_requests_per_dp"]
        assert isinstance(limit, int)
        return limit

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The whole native answer to a text or to token ids: `text`, `output_ids`, `meta_info`.

        Greedy and at most 64 tokens unless `sampling` (SGLang's `sampling_params`) says otherwise.
        """
        return self._json(self._client.post("/generate", json=_body(prompt, sampling)))

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> Iterator[dict[str, Any]]:
        """The same answer as it grows: each item holds everything so far."""
        body = {**_body(prompt, sampling), "stream": True}
        with self._client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            for line in split_lines(response.iter_bytes()):
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        assert response.is_success, f"{response.status_code}: {response.text}\n{self._log_tail()}"
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while not self._is_ready():
            assert self._process is not None
            if self._process.poll() is not None:
                raise ServerEndedError(f"SGLang ended with code {self._process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise ServerEndedError(f"SGLang not ready after {self._ready_timeout_s:.0f} s:\n{self._log_tail()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        """`/model_info` answers from the first moment on in which the server takes requests, and generates nothing."""
        try:
            return self._client.get("/model_info", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-40:])

    def _stop(self) -> None:
        """End every process of the group at once: SGLang ends its own children no gentler, only ten seconds later."""
        self._client.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._sockets is not None:
            self._sockets.cleanup()


def _body(prompt: str | Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 64, **sampling}
    return {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": params}
