"""What the compose file's SGLang service passes on, by SGLang's own parser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose import GPU, ROOT, argv, load, variables

sglang_arguments = pytest.importorskip("sglang.srt.server_args", reason="SGLang is not installed here")


def test_sglang_knows_the_words() -> None:
    from serving.sglang.outside.launcher import SglangOptions, command

    example = variables(ROOT / ".env.example")
    words = argv(load(GPU, example)["services"]["sglang"]["command"])
    unused: dict[str, Any] = {
        "redis_url": "",
        "engine_id": "",
        "model_key": "",
        "target_fingerprint": "",
        "capture": False,
        "suffix_depth": 16,
        "control_share": 0.02,
        "plain_share": 0.03,
        "context_window": 512,
        "capture_bytes_per_s": 0,
        "stream_max_bytes": 1,
    }
    options = SglangOptions(
        python=Path("python"),
        model_dir=Path("/models/toy"),
        model_name=words[words.index("--name") + 1],
        draft_dir=Path("/store/versions/000001"),
        depth=int(words[words.index("--depth") + 1]),
        dtype="bfloat16",
        device="cuda",
        store=Path("/store"),
        extra=tuple(words[words.index("--") + 1 :]),
        **unused,
    )
    started = command(options, host="0.0.0.0", port=30000, adaptive_config=Path("/tmp/adaptive.json"))
    parser = argparse.ArgumentParser()
    sglang_arguments.ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(started[started.index("sglang.launch_server") + 1 :])
    assert (parsed.host, parsed.port, parsed.context_length) == ("0.0.0.0", 30000, 8192)
    assert parsed.mem_fraction_static == 0.8
