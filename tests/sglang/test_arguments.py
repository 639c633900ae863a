"""What SGLang makes of its arguments for the draft, and what the plugin says to it before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import prepare_server_args

from serving.sglang.plugin import contract
from serving.sglang.plugin.checks import check_draft_options, check_server, resolved
from serving.sglang.settings import PluginSettings
from slipstream.doctor.finding import Level
from slipstream.doctor.machine import check_hooks
from speculator.errors import ConfigError
from speculator.versions.store import DraftStore
from tests.sglang.server import DEVICE_FLAGS, environment, speculative_flags


def of_server(model_dir: Path, draft_dir: Path, *flags: str) -> Any:
    """The arguments of a server with these flags, once SGLang has decided on all of them."""
    args = prepare_server_args(["--model-path", str(model_dir), *DEVICE_FLAGS, *speculative_flags(draft_dir), *flags])
    args.resolve_once()
    return resolved(args)


def check(model_dir: Path, draft_dir: Path, *flags: str) -> None:
    check_draft_options(of_server(model_dir, draft_dir, *flags), PluginSettings())


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


def test_this_sglang_has_the_hooks_that_its_arguments_need(
    model_dir: Path, draft_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", environment().get("SGLANG_USE_CPU_ENGINE", "0"))
    args = of_server(model_dir, draft_dir, "--speculative-adaptive")
    contract.check_needed(args, PluginSettings(capture=True, suffix_depth=8))
    monkeypatch.setattr(contract, "TEXT_FUNCTIONS", [contract.SglangFunction("sglang.srt.nothing", ())])
    contract.check_needed(args, PluginSettings(capture=True))
    with pytest.raises(ConfigError, match=r"no usable sglang\.srt\.nothing"):
        contract.check_needed(args, PluginSettings(suffix_depth=8))


@pytest.mark.parametrize("flags", [("--dp-size", "2", "--enable-dp-attention"), ("--attn-dp-size", "2")])
def test_dp_attention_is_refused_by_either_name(
    model_dir: Path, draft_store: DraftStore, draft_dir: Path, flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="DP attention"):
        check_server(of_server(model_dir, draft_dir, "--tp-size", "2", *flags), PluginSettings(store=draft_store.root))


_IN_SGLANGS_PROCESS = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
from sglang.srt.server_args import prepare_server_args

servers, decided = json.loads(sys.argv[1])
*served, last = [prepare_server_args(flags) for flags in servers]
for args in served:
    args.resolve_once()
    decided_on = resolved_view(args)
    print("limit", decided_on.max_running_requests, decided_on.enable_mixed_chunk, flush=True)
last.resolve_once()
declare_resolution(last, "SGLang itself", **decided)
last.check_server_args()
print("went on")
"""


def in_sglangs_process(
    draft_store: DraftStore, servers: list[list[str]], **decided: object
) -> subprocess.CompletedProcess[str]:
    """Each gets as far as its arguments, and the last is checked once SGLang has decided on these."""
    settings = {"SLIPSTREAM_ENABLED": "1", "SLIPSTREAM_STORE": str(draft_store.root)}
    return subprocess.run(
        [sys.executable, "-c", _IN_SGLANGS_PROCESS, json.dumps([servers, decided])],
        env={**os.environ, **environment(), **settings},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_plugin_in_sglangs_own_process(model_dir: Path, draft_store: DraftStore, draft_dir: Path) -> None:
    """As many requests as a server that does not draft takes, or as somebody says, and no mixed chunks; and a refusal
    ends it.
    """
    plain = ["--model-path", str(model_dir), *DEVICE_FLAGS]
    drafting = [*plain, *speculative_flags(draft_dir)]
    asking = [*drafting, "--max-running-requests", "7", "--enable-mixed-chunk"]
    servers = [plain, drafting, asking, [*drafting, "--quantization", "w8a8_int8"]]
    done = in_sglangs_process(draft_store, servers)
    limits = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("limit")]
    assert limits == [["None", "False"], ["None", "False"], ["7", "False"]], done.stderr[-2000:]
    assert "--enable-mixed-chunk is off" in done.stderr
    assert "went on" not in done.stdout
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("slipstream: the draft would be quantized (w8a8_int8)")


def test_what_sglang_decides_on_by_itself_is_refused_as_what_is_given(
    model_dir: Path, draft_store: DraftStore, draft_dir: Path
) -> None:
    """As --speculative-use-block-verification does, which it takes on a GPU alone."""
    drafting = ["--model-path", str(model_dir), *DEVICE_FLAGS, *speculative_flags(draft_dir)]
    done = in_sglangs_process(draft_store, [drafting], speculative_use_rejection_sampling=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith("slipstream: rejection sampling needs a draft of the target's whole")


def test_the_doctor_finds_every_place_in_this_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    found = check_hooks(Path(sys.executable))
    assert found.level is Level.OK, found.detail
    assert found.detail.startswith("0.5.23, all ")
