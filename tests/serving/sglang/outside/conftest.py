"""Options of an SGLang process that is a stand-in, and the environment in which it is found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.sglang.outside.launcher import SglangOptions
from tests.serving.sglang.outside.fake_sglang import MODEL, install

MakeOptions = Callable[..., SglangOptions]


@pytest.fixture
def fake_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the stand-in's package; what is started from here on finds it."""
    folder = tmp_path / "site"
    for name, value in install(folder).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def make_options(tmp_path: Path) -> MakeOptions:
    def make(**changes: Any) -> SglangOptions:
        values: dict[str, Any] = {
            "python": Path(sys.executable),
            "model_dir": Path("/models/target"),
            "model_name": MODEL,
            "draft_dir": Path("/store/versions/000007"),
            "depth": 3,
            "dtype": "bfloat16",
            "device": "cuda",
            "redis_url": "redis://127.0.0.1:6379/0",
            "store": Path("/store"),
            "engine_id": "host-1",
            "model_key": "target-abc",
            "target_fingerprint": "f" * 64,
            "capture": False,
            "suffix_depth": 16,
            "control_share": 0.02,
            "plain_share": 0.03,
            "context_window": 512,
            "capture_bytes_per_s": 0,
            "stream_max_bytes": 1000,
        }
        return SglangOptions(**{**values, **changes})

    return make


def started() -> dict[str, Any]:
    """What the stand-in found when it was started."""
    record: dict[str, Any] = json.loads(Path(os.environ["FAKE_SGLANG_RECORD"]).read_text())
    return record
