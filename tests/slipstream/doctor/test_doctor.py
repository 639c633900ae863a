"""`slipstream doctor` in healthy and in broken circumstances."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.doctor.deployment import (
    check_fit,
    check_keys,
    check_redis,
    check_settings,
    check_store,
    check_stream,
    check_trainer,
    judge_server,
)
from slipstream.doctor.finding import Finding, Level, run_check
from slipstream.doctor.machine import (
    check_disk,
    check_gpu,
    check_hooks,
    check_memory,
    check_model,
    check_ports,
    check_sglang,
)
from slipstream.settings import COMPOSE_VARIABLES, known_variables
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import encode_trace
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.traces import make_trace
from tests.serving.gateway.keyfile import KeyFile, an_hour_ago


def found(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    return list(run_check("check", check))


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def the_fault(findings: list[Finding], level: Level = Level.FAILED) -> str:
    """The one that is not well, and its advice."""
    [fault] = [finding for finding in findings if finding.level is level]
    return fault.detail


@pytest.fixture
def store(tmp_path: Path, toy_model: Path) -> DraftStore:
    made = DraftStore(tmp_path / "drafts")
    ensure_lineage(made, toy_model, target_fingerprint(toy_model), draft_vocab_size=16)
    return made


# -- the command -----------------------------------------------------------------------------------------------------


def doctor(*arguments: object) -> tuple[int, dict[str, object], str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_all_is_well(toy_model: Path, redis_url: str, redis_client: redis.Redis, store: DraftStore) -> None:
    code, document, _ = doctor("--model", toy_model, "--redis-url", redis_url, "--store", store.root, "--port", 0)
    assert code == 0, document
    assert document["ok"] is True
    assert isinstance(document["findings"], list)
    names = [finding["name"] for finding in document["findings"]]
    assert {"settings", "torch", "gpu", "model", "local engine", "redis rights", "store", "stream"} <= set(names)
    assert all(finding["level"] in ("ok", "skipped") for finding in document["findings"]), document
    assert redis_client.keys("*doctor*") == [], "nothing is left behind"


def test_each_fault_is_told_and_the_exit_code_says_so(tmp_path: Path, toy_model: Path) -> None:
    code, document, _ = doctor("--model", "/nowhere", "--redis-url", f"unix://{tmp_path}/no.sock", "--port", 0)
    assert code == 1
    assert document["ok"] is False
    assert isinstance(document["findings"], list)
    failed = {finding["name"]: finding["detail"] for finding in document["findings"] if finding["level"] == "failed"}
    assert failed.keys() == {"model", "redis"}
    assert "--model" in failed["model"]
    assert "SLIPSTREAM_REDIS_URL" in failed["redis"]


def test_for_a_person(toy_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["doctor", "--model", str(toy_model), "--port", str(port)]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if line.startswith("failed")]
    assert line.startswith("failed  port: ")
    assert "--port" in line


# -- the machine -------------------------------------------------------------------------------------------------------


def test_little_memory_and_disk() -> None:
    assert "the demo needs" in the_fault(found(lambda: check_memory(needed_gib=1e9)))
    assert "SLIPSTREAM_CACHE" in the_fault(found(lambda: check_disk(needed_gib=1e9)))


def test_the_memory_is_what_a_container_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.doctor.machine.memory_bytes", lambda: 2 << 30)
    assert "2.0 GiB" in the_fault(found(check_memory))


def test_a_gpu_is_needed_for_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert levels(found(lambda: check_gpu(needed=False))) == [Level.OK]
    assert "--engine local" in the_fault(found(lambda: check_gpu(needed=True)))


def test_a_port_in_use_by_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # It accepts nobody: what asks there must give up by itself.
        assert "in use" in the_fault(found(lambda: check_ports([0, taken.getsockname()[1]])))


def test_a_draft_for_a_smaller_window(store: DraftStore, toy_model: Path, tmp_path: Path) -> None:
    assert levels(found(lambda: check_fit(str(toy_model), store.root))) == [Level.OK]
    raised = shutil.copytree(toy_model, tmp_path / "raised")
    config = json.loads((raised / "config.json").read_text())
    (raised / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    assert "is 512, the target's 2048" in the_fault(found(lambda: check_fit(str(raised), store.root)))


# -- settings --------------------------------------------------------------------------------------------------------


def settings() -> list[Finding]:
    return found(lambda: check_settings(known_variables(app)))


def test_unusable_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(settings()) == [Level.OK]
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LEARNING_RATE", "-1")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", "short")
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "loud")
    monkeypatch.setenv("SLIPSTREAM_POLL_S", "never")
    faults = settings()
    assert levels(faults) == [Level.FAILED] * 4
    for variable in ("TRAINER_LEARNING_RATE", "GATEWAY_ADMIN_KEY", "LOG_LEVEL", "POLL_S"):
        assert any(f"SLIPSTREAM_{variable}" in fault.detail for fault in faults), variable
    assert not any("short" in fault.detail for fault in faults)


def test_a_variable_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LERNING_RATE", "0.001")
    assert "is SLIPSTREAM_TRAINER_LEARNING_RATE meant?" in the_fault(settings(), Level.WARNING)
    monkeypatch.delenv("SLIPSTREAM_TRAINER_LERNING_RATE")
    monkeypatch.setenv("SLIPSTREAM_QQQ", "1")
    assert "docs/reference/configuration.md" in the_fault(settings(), Level.WARNING)
    monkeypatch.delenv("SLIPSTREAM_QQQ")
    for known in ("SLIPSTREAM_STORE", "SLIPSTREAM_CACHE"):
        monkeypatch.setenv(known, "/tmp")
    assert levels(settings()) == [Level.OK]


def test_the_variables_of_docker_compose_are_no_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (Path(__file__).resolve().parents[3] / ".env.example").read_text()
    assert set(re.findall(r"^#?(SLIPSTREAM_\w+)=", example, re.MULTILINE)) == COMPOSE_VARIABLES
    monkeypatch.setenv("SLIPSTREAM_MODEL", "some/model")
    assert "docker compose" in the_fault(settings(), Level.SKIPPED)
    assert levels(settings()) == [Level.SKIPPED, Level.OK]


# -- the target --------------------------------------------------------------------------------------------------------


def test_a_model_that_the_local_engine_does_not_run(tmp_path: Path, toy_model: Path) -> None:
    other = Path(shutil.copytree(toy_model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"] * 8}))
    assert "full attention" in the_fault(found(lambda: check_model(str(other), local=True)))
    assert levels(found(lambda: check_model(str(other), local=False))) == [Level.OK] * 2
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    weights = load_file(other / "model.safetensors")
    few = {name: tensor for name, tensor in weights.items() if not re.search(r"layers\.[4-7]\.", name)}
    save_file(few, other / "model.safetensors")
    assert "at least 8" in the_fault(found(lambda: check_model(str(other), local=False)))


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def sick() -> Iterator[Finding]:
        raise AttributeError("no such thing")
        yield

    assert "AttributeError: no such thing" in the_fault(found(sick))


# -- Redis ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_user(redis_url: str, redis_client: redis.Redis) -> Iterator[Callable[[str], str]]:
    """A URL that logs in as a user with the given rights."""

    def make(rights: str) -> str:
        redis_client.execute_command("ACL", "SETUSER", "doctor", "reset", "on", ">secret", *rights.split())
        return redis_url.replace("unix://", "unix://doctor:secret@")

    yield make
    redis_client.execute_command("ACL", "DELUSER", "doctor")


def test_redis_rights(
    redis_url: str, redis_client: redis.Redis, as_user: Callable[[str], str], toy_model: Path
) -> None:
    def rights(granted: str) -> list[Finding]:
        return found(lambda: check_redis(as_user(granted), str(toy_model)))

    assert levels(found(lambda: check_redis(redis_url, str(toy_model)))) == [Level.OK] * 4
    assert levels(rights("~slipstream:* +@all")) == [Level.OK] * 4
    assert "slipstream:*" in the_fault(rights("~other:* +@all"))
    only_engine = rights("~slipstream:* +@all -xreadgroup -info")
    assert levels(only_engine) == [Level.SKIPPED, Level.WARNING]
    assert "not read and settle them" in only_engine[1].detail
    rights("~slipstream:*:desired_draft ~slipstream:*:engines ~slipstream:*:engine:* +@all")
    assert redis_client.keys("*doctor*") == [], "nothing is left behind"


def test_redis_memory_is_judged_by_the_cap_that_is_set(
    redis_url: str, redis_client: redis.Redis, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_client.config_set("maxmemory", 700 << 20)
    try:
        assert "--stream-max-bytes" in the_fault(found(lambda: check_redis(redis_url, str(toy_model))), Level.WARNING)
        monkeypatch.setenv("SLIPSTREAM_STREAM_MAX_BYTES", str(100 << 20))
        assert levels(found(lambda: check_redis(redis_url, str(toy_model)))) == [Level.OK] * 4
        # What `check_settings` reports is no fault of Redis.
        monkeypatch.setenv("SLIPSTREAM_STREAM_MAX_BYTES", "much")
        assert "--stream-max-bytes" in the_fault(found(lambda: check_redis(redis_url, str(toy_model))), Level.WARNING)
    finally:
        redis_client.config_set("maxmemory", 0)


KEEPS = {"redis_version": "8.6.3", "maxmemory": 0, "maxmemory_policy": "noeviction", "used_memory": 1, "aof_enabled": 1}


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"redis_version": "6.0.16"}, Level.FAILED, "6.2 or newer"),
        ({"aof_last_write_status": "err"}, Level.FAILED, "directory"),
        ({"rdb_last_bgsave_status": "err"}, Level.FAILED, "directory"),
        ({"aof_enabled": 0}, Level.WARNING, "appendonly yes"),
        ({"maxmemory_policy": "allkeys-lru"}, Level.WARNING, "noeviction"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": 100 << 20}, Level.FAILED, "noeviction"),
        ({"maxmemory": 700 << 20}, Level.WARNING, "--stream-max-bytes"),
    ],
)
def test_a_redis_that_is_old_or_forgets(changes: dict[str, Any], level: Level, says: str) -> None:
    assert says in the_fault(list(judge_server({**KEEPS, **changes}, 512 << 20)), level)
    assert levels(list(judge_server({**KEEPS, "maxmemory": 800 << 20}, 512 << 20))) == [Level.OK] * 3


def test_a_provider_may_not_say_how_redis_evicts() -> None:
    """As Redis Enterprise."""
    said = {name: value for name, value in KEEPS.items() if not name.startswith("maxmemory")}
    assert levels(list(judge_server(said, 512 << 20))) == [Level.OK, Level.OK, Level.SKIPPED]


# -- store, trainer, stream -------------------------------------------------------------------------------------------


def test_a_damaged_store(store: DraftStore, tmp_path: Path) -> None:
    assert levels(found(lambda: check_store(store.root))) == [Level.OK]
    assert levels(found(lambda: check_store(tmp_path / "none"))) == [Level.OK]
    weights = store.root / "versions" / "000001" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert "version" in the_fault(found(lambda: check_store(store.root)))
    weights.write_bytes(whole)
    (weights.parent / "manifest.json").write_text("{")
    assert "versions 1 are damaged" in the_fault(found(lambda: check_store(store.root)))
    (tmp_path / "file").touch()
    assert "is not writable" in found(lambda: check_store(tmp_path / "file" / "drafts"))[0].detail


def test_a_store_of_barred_versions(store: DraftStore) -> None:
    store.lifecycle.bar(1, actor="test", reason="worse")
    assert "promote" in the_fault(found(lambda: check_store(store.root)))


def test_a_damaged_trainer_state(tmp_path: Path) -> None:
    assert levels(found(lambda: check_trainer(tmp_path))) == [Level.OK]
    (tmp_path / "trainer.safetensors").write_bytes(b"cut off")
    assert str(tmp_path) in the_fault(found(lambda: check_trainer(tmp_path)))


def test_where_the_stream_stands(
    store: DraftStore, toy_model: Path, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    def stream(root: Path = store.root) -> list[Finding]:
        return found(lambda: check_stream(redis_url, str(toy_model), root))

    assert levels(stream(tmp_path / "none")) == [Level.SKIPPED]
    assert "--capture" in stream()[0].detail
    key = model_key(toy_model, target_fingerprint(toy_model))
    traces = TraceStream(redis_client, key, max_bytes=10**8)
    for seed in range(2):
        traces.append(encode_trace(make_trace(seed)), trace_id=f"trace-{seed}")
    [finding] = stream()
    assert finding.level is Level.OK
    assert finding.detail.startswith("2 traces, 0 settled, 2 waiting, 0 lost")
    for engine, role in (("a", "settled"), ("b", "needs traffic")):
        DraftPointer(redis_client, key).report_engine(engine, {"role": role})
    [finding] = stream()
    assert finding.detail.endswith("2 engines report, 1 of them need traffic before they try the newest version")
    redis_client.xtrim(RedisKeys(model_key=key).traces, maxlen=1, approximate=False)
    assert "1 lost" in the_fault(stream(), Level.WARNING)
    (link := tmp_path / "link").symlink_to(toy_model)
    fault = the_fault(found(lambda: check_stream(redis_url, str(link), store.root)))
    assert fault.endswith(f"set --model to the one of {key}")


# -- SGLang ------------------------------------------------------------------------------------------------------------


def test_no_sglang() -> None:
    assert "--sglang-python" in the_fault(found(lambda: check_sglang(Path("/no/python"))))


def test_a_hook_point_that_has_moved(tmp_path: Path) -> None:
    """A stand-in for an interpreter whose SGLang is another one."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'SGLang 0.9.9 has no usable EAGLEWorkerV2.verify: install sglang==0.5.23' >&2\nexit 1\n"
    )
    python.chmod(0o755)
    moved = check_hooks(python)
    assert (moved.level, "install sglang==0.5.23" in moved.detail) == (Level.FAILED, True)
    python.write_text("#!/bin/sh\necho '0.5.23, all 14 places that the plugin hooks are there'\n")
    assert check_hooks(python).level is Level.OK


# -- the gateway's keys ------------------------------------------------------------------------------------------------


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [alone] = found(check_keys)
    assert "only on a loopback address" in alone.detail
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_AUTH_ELSEWHERE", "1")
    elsewhere, admin = found(check_keys)
    assert "loopback" not in elsewhere.detail
    assert "no admin key" in admin.detail
    monkeypatch.delenv("SLIPSTREAM_GATEWAY_AUTH_ELSEWHERE")
    keys = KeyFile(tmp_path / "keys.json")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_KEYS_FILE", str(keys.path))
    assert "cannot be read" in the_fault(found(check_keys))
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", "0123456789abcdef")
    keys.add("old", expires_s=an_hour_ago())
    assert "has no valid key" in the_fault(found(check_keys), Level.WARNING)
    keys.add("new")
    assert "expired: old" in the_fault(found(check_keys), Level.WARNING)
    keys.revoke("old")
    assert levels(found(check_keys)) == [Level.OK]
    monkeypatch.delenv("SLIPSTREAM_GATEWAY_ADMIN_KEY")
    assert "no admin key" in the_fault(found(check_keys), Level.WARNING)
