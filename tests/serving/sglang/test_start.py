"""Starts that the plugin refuses, and settings that it understands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import structlog

from serving.sglang.plugin import contract, hooks
from serving.sglang.plugin.checks import check_draft_options, check_server, verification_of
from serving.sglang.plugin.normed_residual import check_layer
from serving.sglang.pointer import refuse_second
from serving.sglang.settings import PluginSettings, buffer_bytes, is_enabled, load_settings
from speculator.draft.checkpoint import target_fingerprint
from speculator.errors import ConfigError, DraftMismatchError, SlipstreamError, StreamError
from speculator.redis.client import connect, open_client
from speculator.redis.control_plane import CanaryHolder, DraftPointer
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.toy import make_toy_model


@pytest.fixture(scope="module")
def store(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    store = DraftStore(tmp_path_factory.mktemp("drafts"))
    ensure_lineage(store, model_dir, target_fingerprint(model_dir), draft_vocab_size=24)
    return store


def arguments(model_dir: Path, store: DraftStore, **changes: Any) -> SimpleNamespace:
    """The arguments of a server that the plugin accepts."""
    values = {
        "model_path": str(model_dir),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(store.root / "versions" / "000001"),
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_use_rejection_sampling": False,
        "pp_size": 1,
        "dp_size": 1,
        "disaggregation_mode": "null",
        "enable_dp_attention": False,
        "enable_multi_layer_eagle": False,
        "tokenizer_worker_num": 1,
        "use_ray": False,
        "grpc_mode": False,
        "smg_grpc_mode": False,
        "enable_memory_saver": False,
        "hicache_storage_backend": None,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "context_length": None,
    }
    return SimpleNamespace(**values | changes)


def test_a_good_start(model_dir: Path, store: DraftStore) -> None:
    check_server(arguments(model_dir, store), PluginSettings(store=store.root))


def test_a_draft_of_the_whole_vocabulary_may_be_drawn_from(model_dir: Path, tmp_path: Path) -> None:
    """`drafts init` with more tokens than the target has makes one of as many."""
    whole = DraftStore(tmp_path)
    ensure_lineage(whole, model_dir, target_fingerprint(model_dir), draft_vocab_size=1000)
    rejecting = arguments(model_dir, whole, speculative_use_rejection_sampling=True)
    check_server(rejecting, PluginSettings(store=whole.root))
    assert not whole.load(1)["d2t"].any(), "draft ids are the target's"
    # 0.5.17 has no block verification.
    assert verification_of(rejecting) == "rejection"
    rejecting.speculative_use_block_verification = True
    assert verification_of(rejecting) == "block"
    assert verification_of(arguments(model_dir, whole)) == "target_only"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_algorithm": None}, "Slipstream improves EAGLE3 drafts"),
        ({"speculative_accept_threshold_single": 0.9}, "--speculative-accept-threshold-single is 0.9"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc is 0.5"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"enable_dp_attention": True}, "DP attention"),
        ({"dp_size": 2}, "put sglang-router in front"),
        (
            {"speculative_use_rejection_sampling": True},
            "version 1 has 24 of 47 tokens: make a store by `slipstream drafts init --draft-vocab-size 47`",
        ),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num is 2: workers run without hooks"),
        ({"use_ray": True}, "--use-ray"),
        ({"grpc_mode": True}, "--grpc-mode"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_flexkv": True}, "--enable-flexkv shares what it stores between tenants"),
        ({"speculative_draft_model_path": "/somewhere/else"}, "no version of the draft store"),
    ],
)
def test_unsafe_or_unsupported_starts(model_dir: Path, store: DraftStore, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_server(arguments(model_dir, store, **changes), PluginSettings(store=store.root))


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("True", True), ("0", False), ("", False)])
@pytest.mark.parametrize(
    "name", ["SGLANG_RUST_SERVER", "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "SGLANG_RETURN_ORIGINAL_LOGPROB"]
)
def test_variables_of_sglang_that_may_not_say_yes(
    model_dir: Path, store: DraftStore, name: str, value: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name) if is_refused else contextlib.nullcontext():
        check_server(arguments(model_dir, store), PluginSettings(store=store.root))


def test_a_draft_without_the_targets_rope_scaling_is_served_up_to_its_window(
    model_dir: Path, store: DraftStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang multiplies the target's context by the factor of its rope scaling."""
    folder, scaled = tmp_path / "model", DraftStore(tmp_path / "drafts")
    shutil.copytree(model_dir, folder)
    values = json.loads((folder / "config.json").read_text())
    rope = {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(values | rope))
    ensure_lineage(scaled, folder, target_fingerprint(folder), draft_vocab_size=24)
    check_server(arguments(folder, scaled), PluginSettings(store=scaled.root))
    # As if it had been made for this target, before drafts had the longer window.
    settings = PluginSettings(store=store.root, target_fingerprint=target_fingerprint(model_dir))
    with pytest.raises(DraftMismatchError, match=r"window is 512 tokens, .* context 1024: add --context-length 512"):
        check_server(arguments(folder, store), settings)
    check_server(arguments(folder, store, context_length=512), settings)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    check_server(arguments(folder, store), settings)


@pytest.mark.parametrize("storage", [{"hicache_storage_backend": "file"}, {"enable_lmcache": True}])
def test_storage_outside_the_server_is_refused_where_tenants_would_share_it(
    model_dir: Path, store: DraftStore, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    storing, settings = arguments(model_dir, store, **storage), PluginSettings(store=store.root)
    monkeypatch.setattr("serving.sglang.plugin.checks.separates_tenants_in_storage", lambda: True)
    check_server(storing, settings)
    monkeypatch.setattr("serving.sglang.plugin.checks.separates_tenants_in_storage", lambda: False)
    with pytest.raises(ConfigError, match="shares between tenants"):
        check_server(storing, settings)


def test_a_layer_that_sglang_lacks_is_missed_only_by_a_draft_that_needs_it(
    model_dir: Path, store: DraftStore, tmp_path: Path
) -> None:
    """No SGLang is installed beside these tests."""
    check_layer(arguments(model_dir, store), PluginSettings(store=store.root))
    needy = DraftStore(tmp_path)
    ensure_lineage(needy, model_dir, target_fingerprint(model_dir), switches=["norm_before_residual"])
    with pytest.raises(ConfigError, match=r"no usable sglang\.srt\.models\.llama_eagle3\.LlamaDecoderLayer\.forward"):
        check_layer(arguments(model_dir, needy), PluginSettings(store=needy.root))


def test_answers_do_not_leave_before_the_capture_filter_has_seen_them(model_dir: Path, store: DraftStore) -> None:
    settings = PluginSettings(store=store.root, share_groups=True, capture_filter="os:getcwd")
    with pytest.raises(ConfigError, match="SLIPSTREAM_SHARE_GROUPS sends answers"):
        check_server(arguments(model_dir, store), settings)


def resolved(**changes: Any) -> SimpleNamespace:
    """What SGLang has decided on for a server of which nothing out of the ordinary was asked."""
    values = {
        "load_format": "auto",
        "speculative_draft_load_format": None,
        "speculative_draft_model_quantization": None,
        "model_loader_extra_config": "{}",
        "json_model_override_args": "{}",
        "decrypted_draft_config_file": None,
        "kv_cache_dtype": "auto",
        "quantization_param_path": None,
        "model_checksum": None,
        "model_impl": "auto",
        "enable_watermark": False,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"model_loader_extra_config": '{"num_threads": 8}'},
        {"load_format": "gguf", "speculative_draft_load_format": "safetensors"},
        {"json_model_override_args": "{ }", "model_impl": "sglang"},
    ],
)
def test_options_of_the_target_that_leave_the_draft_alone(changes: dict[str, Any]) -> None:
    check_draft_options(resolved(**changes), PluginSettings(capture=True))


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"speculative_draft_model_quantization": "fp8"}, "--speculative-draft-model-quantization unquant"),
        ({"load_format": "gguf"}, "--speculative-draft-load-format safetensors"),
        (
            {
                "load_format": "sharded_state",
                "speculative_draft_load_format": "safetensors",
                "model_loader_extra_config": '{"pattern": "x"}',
            },
            "--model-loader-extra-config is meant for --load-format sharded_state",
        ),
        ({"json_model_override_args": '{"rope_scaling": {"factor": 4}}'}, "change config.json in the folder"),
        ({"decrypted_draft_config_file": "config.json"}, "--decrypted-draft-config-file"),
        ({"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": "s.json"}, "--quantization-param-path"),
        ({"model_checksum": "sums.json"}, "--model-checksum"),
        ({"model_impl": "transformers"}, "--model-impl transformers"),
        ({"enable_watermark": True}, "--enable-watermark"),
    ],
)
def test_options_of_the_target_that_break_the_draft(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as refused:
        check_draft_options(resolved(**changes), PluginSettings(capture=True))
    assert "\n" not in str(refused.value)


def test_a_watermark_matters_to_those_who_learn_from_the_text() -> None:
    check_draft_options(resolved(enable_watermark=True), PluginSettings(capture=False))


def test_a_draft_of_another_target(store: DraftStore, tmp_path: Path) -> None:
    other = make_toy_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="was made for target"):
        check_server(arguments(other, store), PluginSettings(store=store.root))


def test_a_draft_of_another_shape(model_dir: Path, store: DraftStore, tmp_path: Path) -> None:
    """Told a fingerprint that is not its own, the target still has to fit."""
    other = make_toy_model(tmp_path / "other", hidden_size=64)
    settings = PluginSettings(store=store.root, target_fingerprint=target_fingerprint(model_dir))
    with pytest.raises(DraftMismatchError, match="hidden_size is 32, the target's 64"):
        check_server(arguments(other, store), settings)


def test_a_version_that_is_not_there(model_dir: Path, store: DraftStore) -> None:
    folder = str(store.root / "versions" / "000099")
    with pytest.raises(SlipstreamError):
        check_server(arguments(model_dir, store, speculative_draft_model_path=folder), PluginSettings(store=store.root))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load_settings().capture
    for name, value in {"CAPTURE": "1", "STORE": "/drafts", "CAPTURE_BYTES_PER_S": "1000"}.items():
        monkeypatch.setenv(f"SLIPSTREAM_{name}", value)
    settings = load_settings()
    assert (settings.capture, settings.store, settings.capture_bytes_per_s) == (True, Path("/drafts"), 1000)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("SLIPSTREAM_STORE", "~/drafts")
    assert load_settings().store == Path("/home/somebody/drafts")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CAPTURE", "maybe"),
        ("CAPTURE_TOPK", "0"),
        ("CAPTURE_TOPK", "many"),
        ("CONTROL_SHARE", "0.9"),
        ("POLL_S", "0"),
        ("CAPTURE_FEATURES", "int4"),
        ("CAPTURE_BYTES_PER_S", "-1"),
        ("BRANCH_SHARE", "0.11"),
        ("BRANCH_SHARE", "-0.01"),
    ],
)
def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"SLIPSTREAM_{name}", value)
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_{name}"):
        load_settings()


def test_it_is_off_unless_it_is_turned_on() -> None:
    assert not is_enabled({})
    assert is_enabled({"SLIPSTREAM_ENABLED": "1"})
    with pytest.raises(ConfigError, match="SLIPSTREAM_ENABLED"):
        is_enabled({"SLIPSTREAM_ENABLED": "perhaps"})


def _register(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from serving.sglang.plugin.hooks import register; register(); print('went on')"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_a_disabled_plugin_does_nothing() -> None:
    done = _register(SLIPSTREAM_ENABLED="0")
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_a_refusal_ends_the_process_with_one_line() -> None:
    done = _register(SLIPSTREAM_ENABLED="1", SLIPSTREAM_CAPTURE="maybe")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("slipstream: SLIPSTREAM_CAPTURE is not usable")


@pytest.mark.parametrize(
    ("path", "parameters", "says"),
    [
        ("json.decoder.NoSuchDecoder.decode", ("self",), "SGLang 9.9 has no usable json.decoder.NoSuchDecoder"),
        ("json.loads", ("text",), "json.loads takes s, expected text"),
    ],
)
def test_a_name_of_sglang_that_is_gone_or_takes_something_else(
    path: str, parameters: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        contract.check_sglang_functions([contract.SglangFunction(path, parameters)], "9.9")


def test_a_class_of_sglang_that_lacks_a_field() -> None:
    known = contract.SglangRecord("serving.engine.CapturePolicy", ("tenant", "domain"))
    contract.check_sglang_records([known], "9.9")
    with pytest.raises(ConfigError, match=r"serving.engine.CapturePolicy has no color, size: install sglang=="):
        contract.check_sglang_records([dataclasses.replace(known, fields=("tenant", "color", "size"))], "9.9")
    of_methods = contract.SglangRecord("serving.speedup.ControlShare", ("is_control", "_share"))
    contract.check_sglang_records([of_methods], "9.9")
    with pytest.raises(ConfigError, match=r"serving.speedup.ControlShare has no finished: "):
        contract.check_sglang_records([dataclasses.replace(of_methods, fields=("is_control", "finished"))], "9.9")
    with pytest.raises(ConfigError, match=r"no usable serving.engine.Nobody"):
        contract.check_sglang_records([dataclasses.replace(known, path="serving.engine.Nobody")], "9.9")


def test_a_server_on_a_gpu_needs_no_functions_of_a_cpu_nor_the_reverse() -> None:
    on_cpu = contract.functions_of({"SGLANG_USE_CPU_ENGINE": "1"})
    assert set(on_cpu) ^ set(contract.functions_of({})) == {*contract.CPU_FUNCTIONS, *contract.GPU_FUNCTIONS}


_ATTENTION = {"attention_backend": "triton", "prefill_attention_backend": None, "decode_attention_backend": None}


@pytest.mark.parametrize(
    ("changes", "settings", "group"),
    [
        ({}, {}, "GPU"),
        ({"attention_backend": None}, {}, "GPU"),
        ({"attention_backend": "flashinfer", "decode_attention_backend": "triton"}, {}, "GPU"),
        ({"attention_backend": "flashinfer"}, {"capture": True}, "CAPTURE"),
        ({"attention_backend": "flashinfer", "speculative_adaptive": True}, {"suffix_depth": 4}, "TEXT"),
        ({"attention_backend": "flashinfer"}, {"suffix_depth": 4}, ""),
        ({"attention_backend": "flashinfer", "speculative_adaptive": True}, {}, ""),
    ],
)
def test_a_server_needs_the_hooks_of_what_it_is_started_with(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], settings: dict[str, Any], group: str
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name in ("GPU", "CPU", "TEXT", "CAPTURE"):
        monkeypatch.setattr(contract, f"{name}_FUNCTIONS", [contract.SglangFunction(f"nowhere.of.{name}", ())])
    assert not contract.are_usable(contract.TEXT_FUNCTIONS)
    args = SimpleNamespace(**{"speculative_adaptive": False, **_ATTENTION, **changes})
    expected = pytest.raises(ConfigError, match=f"nowhere.of.{group} ") if group else contextlib.nullcontext()
    with expected:
        contract.check_needed(args, PluginSettings(**settings))


@pytest.mark.parametrize("is_usable", [True, False])
def test_hooks_that_this_sglang_lacks_are_left_out_until_a_server_needs_them(
    monkeypatch: pytest.MonkeyPatch, is_usable: bool
) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(contract, "are_usable", lambda _: is_usable)
    registered = set[str]()
    registry = SimpleNamespace(register=lambda path, *_: registered.add(path))
    kinds = {kind: kind for kind in ("BEFORE", "AFTER", "AROUND")}
    hooks.add_hooks(PluginSettings(capture=True, suffix_depth=4), registry, kinds)
    chosen = {contract.TREE.path, contract.PROCESSED.path, contract.TRITON_PLAN.path}
    assert registered & chosen == (chosen if is_usable else set())
    assert contract.VERIFY.path in registered


def test_a_hook_that_sglang_could_not_put_in_place_is_named() -> None:
    paths = [contract.VERIFY.path, contract.STEP.path]
    registered = {path: [object()] for path in paths}
    contract.check_hooked(SimpleNamespace(_hooks=registered, _patched=set(paths)))
    with pytest.raises(ConfigError, match=r"could not be hooked at .*forward_batch_generation"):
        contract.check_hooked(SimpleNamespace(_hooks=registered, _patched=set(paths[:1])))


def test_another_plugin_on_the_same_names() -> None:
    registry = SimpleNamespace(_hooks={contract.VERIFY.path: [object()]})
    with pytest.raises(ConfigError, match=r"another SGLang plugin hooks .*verify"):
        contract.check_not_hooked(registry)
    contract.check_not_hooked(SimpleNamespace(_hooks={}))


def test_a_second_server_under_the_same_name(redis_url: str, redis_client: redis.Redis) -> None:
    refuse_second(redis_url, "m", "engine")
    reports = DraftPointer(connect(redis_url), "m")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        reports.report_engine("engine", {"process": f"{socket.gethostname()}:{other.pid}"})
        with pytest.raises(ConfigError, match=r"engine id engine is in use by .*SLIPSTREAM_ENGINE_ID"):
            refuse_second(redis_url, "m", "engine")
        refuse_second(redis_url, "m", "another")
        other.communicate(b"\n", timeout=30)
    refuse_second(redis_url, "m", "engine")  # it has ended; its report has not yet expired
    reports.report_engine("engine", {"process": f"{socket.gethostname()}:{os.getpid()}"})
    refuse_second(redis_url, "m", "engine")  # as in a container that was started again, where numbers come again
    reports.report_engine("engine", {"process": "elsewhere:1"})
    with pytest.raises(ConfigError, match="elsewhere"):
        refuse_second(redis_url, "m", "engine")


@pytest.mark.parametrize("url", ["unix://{tmp_path}/nobody.sock", "redis+sentinel://127.0.0.1:1/m"])
def test_redis_may_be_away_at_the_start(url: str, tmp_path: Path) -> None:
    url = url.format(tmp_path=tmp_path)
    refuse_second(url, "m", "engine")
    pointer = DraftPointer(open_client(url), "m")
    with pytest.raises(StreamError, match="cannot be reached"):
        pointer.desired()
    with pytest.raises(StreamError, match="cannot be reached"):
        pointer.hold_canary(CanaryHolder(engine_id="e", process="p", version=2), ttl_s=1, on_probation=True)


@pytest.mark.parametrize("url", ["redis://a..b:1/0", "redis+sentinel://a..b:1/m"])
def test_an_invalid_host_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="URL is malformed"):
        refuse_second(url, "m", "engine")


def test_lines_of_the_plugin_are_sglangs(caplog: pytest.LogCaptureFixture) -> None:
    hooks.log_as_sglang()
    try:
        structlog.get_logger("serving.swap").warning("draft version %d is late", 3)
        structlog.get_logger("serving.swap").error("failed", part="swap", exc_info=ValueError("a prompt"))
    finally:
        structlog.reset_defaults()
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("serving.swap", "draft version 3 is late"),
        ("serving.swap", "failed part=swap"),
    ]


def test_the_buffer_is_a_share_of_the_memory_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 256 << 20 <= buffer_bytes(PluginSettings()) <= max(physical // 20, 256 << 20)
    assert buffer_bytes(PluginSettings(buffer_bytes=1000)) == 1000
    monkeypatch.setattr("serving.sglang.settings.memory_bytes", lambda: 128 << 30)
    assert buffer_bytes(PluginSettings()) == (128 << 30) // 20
