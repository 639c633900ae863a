"""SGLang's own load generator, `sglang.bench_serving`, unmodified, against one server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sglang.server import SglangServer

_CLIENTS = 4


@dataclass(frozen=True)
class Served:
    """What it reports of one run."""

    tokens_per_s: float
    """Of answers, prompts included in the time."""
    completed: int


def with_random_tokens(
    server: SglangServer, model_dir: Path, count: int, *, num_tokens: tuple[int, int], seed: int, policy: dict[str, Any]
) -> Served:
    """Send prompts of random tokens under a capture policy; `num_tokens` are those of a prompt and of an answer."""
    prompt, answer = num_tokens
    sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True, "custom_params": {"slipstream": policy}}
    dataset = ["--dataset-name", "random-ids", "--tokenize-prompt", "--seed", str(seed), "--random-range-ratio", "1"]
    dataset += ["--random-input-len", str(prompt), "--random-output-len", str(answer)]
    # In place of its own, which are the same without a policy.
    dataset += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.jsonl"
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url),
            *("--model", str(model_dir), "--num-prompts", str(count), "--max-concurrency", str(_CLIENTS)),
            *("--warmup-requests", "0", "--output-file", str(found), *dataset),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
        result = json.loads(found.read_text())
    return Served(result["output_throughput"], result["completed"])
