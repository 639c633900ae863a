"""SGLang's own load generator, `sglang.bench_serving`, unmodified, against one server."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.demo.topics import Prompt
from tests.sglang.server import SglangServer

_LONGEST_PROMPT = 3500
"""Longest prompt in characters; a longer one is cut at its beginning."""
_CLIENTS = 4


@dataclass(frozen=True)
class Served:
    """What it reports of one run."""

    tokens_per_s: float
    """Of answers, prompts included in the time."""
    accept_length: float
    completed: int


def with_prompts(server: SglangServer, model_dir: Path, prompts: Sequence[Prompt], max_tokens: int) -> Served:
    """Ask for greedy answers to these prompts, which end where the target ends them."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "asked.jsonl"
        # It does not send the second message.
        turns = ([{"content": prompt.text[-_LONGEST_PROMPT:]}, {"content": "An answer."}] for prompt in prompts)
        asked.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))
        dataset = ["--dataset-name", "custom", "--dataset-path", str(asked), "--apply-chat-template"]
        dataset += ["--sharegpt-output-len", str(max_tokens), "--disable-ignore-eos"]
        return _run(server, model_dir, len(prompts), dataset)


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
    return _run(server, model_dir, count, dataset)


def _run(server: SglangServer, model_dir: Path, count: int, dataset: Sequence[str]) -> Served:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.jsonl"
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url),
            *("--model", str(model_dir), "--num-prompts", str(count), "--max-concurrency", str(_CLIENTS)),
            *("--warmup-requests", "0", "--output-file", str(found), *dataset),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
        result = json.loads(found.read_text())
    return Served(result["output_throughput"], result["accept_length"] or 1.0, result["completed"])
