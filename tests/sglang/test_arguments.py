"""What SGLang makes of its arguments for the draft, and what the plugin says to it before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.server_args import prepare_server_args

from serving.sglang.checks import check_draft_options, resolved
from serving.sglang.settings import PluginSettings
from speculator.errors import ConfigError
from tests.sglang.server import CPU_FLAGS, speculative_flags


def check(model_dir: Path, draft_dir: Path, *flags: str) -> None:
    args = prepare_server_args(["--model-path", str(model_dir), *CPU_FLAGS, *speculative_flags(draft_dir), *flags])
    args.resolve_once()
    check_draft_options(resolved(args), PluginSettings())


@pytest.mark.parametrize("flags", [(), ("--quantization", "w8a8_int8", "--load-format", "pt")])
def test_what_our_launcher_says_keeps_the_draft_out(model_dir: Path, draft_dir: Path, flags: tuple[str, ...]) -> None:
    ours = ("--speculative-draft-model-quantization", "unquant", "--speculative-draft-load-format", "safetensors")
    check(model_dir, draft_dir, *ours, *flags)


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--quantization", "w8a8_int8"), "--speculative-draft-model-quantization unquant"),
        (("--load-format", "pt"), "--speculative-draft-load-format safetensors"),
        (("--json-model-override-args", '{"rope_theta": 1}'), "change config.json in the folder of --model-path"),
    ],
)
def test_what_would_reach_the_draft_is_refused(
    model_dir: Path, draft_dir: Path, flags: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        check(model_dir, draft_dir, *flags)
