"""The SGLang process: how it is called, how its failures to start are told, and that nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import proxy_bypass

import pytest

from serving.sglang.outside.launcher import (
    SglangProcess,
    adaptive_config,
    check_interpreter,
    command,
    environment,
    find_interpreter,
)
from speculator.errors import ConfigError, EngineDeadError
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.outside.conftest import MakeOptions, started


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- how it is called ----------------------------------------------------------------------------------------------


def test_command_on_a_gpu(make_options: MakeOptions) -> None:
    words = command(make_options(python=Path("/env/bin/python")), port=4321, adaptive_config=Path("/tmp/a.json"))
    assert words == [
        *("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/target"),
        *("--served-model-name", "fake/model-8B", "--host", "127.0.0.1", "--port", "4321", "--enable-metrics"),
        *("--dtype", "bfloat16", "--device", "cuda", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "/store/versions/000007", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--speculative-draft-model-quantization", "unquant", "--speculative-draft-load-format", "safetensors"),
        *("--speculative-adaptive", "--speculative-adaptive-config", "/tmp/a.json"),
    ]


def test_command_on_a_cpu_and_what_the_user_adds_comes_last(make_options: MakeOptions) -> None:
    options = make_options(device="cpu", extra=("--max-total-tokens", "5000", "--tp", "2"))
    words = command(options, port=1, adaptive_config=Path("a"))
    assert words[-4:] == ["--max-total-tokens", "5000", "--tp", "2"]
    assert words.index("--disable-cuda-graph") < len(words) - 4
    backends = [words[at + 1] for at, word in enumerate(words) if word.endswith("attention-backend")]
    assert backends == ["torch_native", "intel_amx", "intel_amx", "intel_amx"]


def test_environment_for_the_plugin(make_options: MakeOptions) -> None:
    inherited = {"PATH": "/bin", "SLIPSTREAM_GATEWAY_ADMIN_KEY": "a key", "SLIPSTREAM_API_KEY": "another"}
    made = environment(make_options(store=Path("drafts"), capture=True, capture_bytes_per_s=5), inherited)
    assert made == {
        "PATH": "/bin",
        "SLIPSTREAM_ENABLED": "1",
        "SLIPSTREAM_REDIS_URL": "redis://127.0.0.1:6379/0",
        "SLIPSTREAM_STORE": str(Path("drafts").absolute()),
        "SLIPSTREAM_ENGINE_ID": "host-1",
        "SLIPSTREAM_MODEL_KEY": "target-abc",
        "SLIPSTREAM_TARGET_FINGERPRINT": "f" * 64,
        "SLIPSTREAM_CAPTURE": "1",
        "SLIPSTREAM_CAPTURE_UNMARKED": "0",
        "SLIPSTREAM_SUFFIX_DEPTH": "16",
        "SLIPSTREAM_SHARE_GROUPS": "0",
        "SLIPSTREAM_CONTROL_SHARE": "0.02",
        "SLIPSTREAM_PLAIN_SHARE": "0.03",
        "SLIPSTREAM_CONTEXT_WINDOW": "512",
        "SLIPSTREAM_CAPTURE_BYTES_PER_S": "5",
        "SLIPSTREAM_CAPTURE_FLOOR": "0.01",
        "SLIPSTREAM_BRANCH_SHARE": "0.02",
        "SLIPSTREAM_STREAM_MAX_BYTES": "1000",
        "SLIPSTREAM_TRACE_TTL_HOURS": "0",
        "SLIPSTREAM_CAPTURE_FILTER": "",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "no_proxy": "127.0.0.1,::1",
    }
    assert environment(make_options(device="cpu"), {})["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize("given", [{}, {"NO_PROXY": "hub.example.org"}, {"no_proxy": "*"}])
def test_sglang_reaches_itself_past_a_proxy(
    make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(make_options(), {"http_proxy": "http://10.255.255.1:3128", **given}).items():
        monkeypatch.setenv(name, value)
    assert proxy_bypass("127.0.0.1:30000")
    assert bool(proxy_bypass("hub.example.org")) is bool(given)


def test_the_plugin_reads_that_environment(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.sglang.settings import is_enabled, load_settings

    options = make_options(capture=True, context_window=99, share_groups=True, branch_share=0.1)
    made = environment(options, {})
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert is_enabled(made)
    given = ("capture", "share_groups", "control_share", "plain_share", "branch_share")
    for name in ("redis_url", "store", "engine_id", "model_key", "target_fingerprint", *given):
        assert getattr(settings, name) == getattr(options, name)
    assert (settings.context_window, settings.capture_bytes_per_s, settings.stream_max_bytes) == (99, 0, 1000)


@pytest.mark.parametrize("flag", ["--port", "--host=0.0.0.0", "--model-path", "--api-key", "--served-model-name=x"])
def test_flags_that_the_gateway_relies_on_are_refused(make_options: MakeOptions, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0]):
        make_options(extra=("--tp", "2", flag))


# -- from start to stop --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_install")
def test_start_and_stop(make_options: MakeOptions, capfd: pytest.CaptureFixture[str]) -> None:
    with SglangProcess(make_options()) as process:
        process.wait_until_healthy(30)
        found = started()
        assert found["pid"] == process.pid
        assert found["arguments"][found["arguments"].index("--port") + 1] == process.url.rpartition(":")[2]
        assert found["environment"]["SLIPSTREAM_ENABLED"] == "1"
        assert found["file"] == {"1": {"candidate_steps": [0, 1, 2, 3, 8, 16]}}
        assert os.getpgid(found["worker"]) == process.pid
        process.check()
        assert process.is_alive
    assert not process.is_alive
    assert not is_running(found["pid"])
    wait_until(lambda: not is_running(found["worker"]))
    assert "a line that says nothing" in capfd.readouterr().err
    process.stop()


@pytest.mark.usefixtures("fake_install")
def test_a_refusal_is_the_error(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "refuse")
    with SglangProcess(make_options()) as process, pytest.raises(ConfigError) as refused:
        process.wait_until_healthy(30)
    assert str(refused.value) == "slipstream: the draft was made for another target"
    wait_until(lambda: not is_running(started()["worker"]))


@pytest.mark.usefixtures("fake_install")
def test_a_crash_shows_the_last_lines(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "crash")
    with SglangProcess(make_options()) as process, pytest.raises(EngineDeadError) as dead:
        process.wait_until_healthy(30)
    assert "ended with code 1" in str(dead.value)
    assert "RuntimeError: no accelerator" in str(dead.value)


@pytest.mark.usefixtures("fake_install")
def test_an_sglang_that_never_serves_is_ended(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hang")
    with SglangProcess(make_options()) as process:
        wait_until(lambda: Path(os.environ["FAKE_SGLANG_RECORD"]).exists())
        with pytest.raises(ConfigError, match="--start-timeout-s"):
            process.wait_until_healthy(0.5)
    wait_until(lambda: not is_running(started()["pid"]))


@pytest.mark.usefixtures("fake_install")
def test_stop_insists(make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "stubborn")
    process = SglangProcess(make_options())
    process.wait_until_healthy(30)
    began = time.monotonic()
    process.stop(timeout_s=0.5)
    assert 0.4 < time.monotonic() - began < 10
    assert not is_running(process.pid)
    wait_until(lambda: not is_running(started()["worker"]))


@pytest.mark.usefixtures("fake_install")
def test_its_death_is_noticed_and_its_workers_still_end(make_options: MakeOptions) -> None:
    with SglangProcess(make_options()) as process:
        process.wait_until_healthy(30)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_alive)
        assert is_running(started()["worker"])
        with pytest.raises(EngineDeadError, match="code 9"):
            process.check()
    wait_until(lambda: not is_running(started()["worker"]))


@pytest.mark.usefixtures("fake_install")
def test_it_ends_when_we_are_killed(make_options: MakeOptions) -> None:
    program = (
        "import os, sys\n"
        "from serving.sglang.outside.launcher import *\nfrom tests.serving.sglang.outside.conftest import *\n"
        "process = SglangProcess(eval(os.environ['OPTIONS']))\n"
        "process.wait_until_healthy(30)\nprint('up', flush=True)\ninput()\n"
    )
    values = repr(make_options()).replace("PosixPath", "Path")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "OPTIONS": values},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        wait_until(lambda: not is_running(started()["pid"]))
    os.kill(started()["worker"], signal.SIGKILL)


def test_an_interpreter_that_is_not_there(make_options: MakeOptions) -> None:
    with pytest.raises(ConfigError, match="--sglang-python"):
        SglangProcess(make_options(python=Path("/no/such/python")))


# -- which interpreter ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_install")
def test_an_interpreter_with_sglang_and_plugin_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_interpreter(Path(sys.executable))
    monkeypatch.setenv("SGLANG_PLUGINS", "another, one")
    with pytest.raises(ConfigError, match="SGLANG_PLUGINS"):
        check_interpreter(Path(sys.executable))
    monkeypatch.setenv("SGLANG_PLUGINS", "another,slipstream")
    check_interpreter(Path(sys.executable))


@pytest.mark.parametrize(
    ("says", "fix"),
    [
        ('{"has_sglang": false, "plugins": []}', "install sglang"),
        ('{"has_sglang": true, "plugins": []}', "install slipstream-spec"),
        ("nothing", "--sglang-python"),
    ],
)
def test_an_interpreter_that_lacks_something_names_the_fix(tmp_path: Path, says: str, fix: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{says}'\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=fix):
        check_interpreter(python)
    with pytest.raises(ConfigError, match="--sglang-python"):
        check_interpreter(tmp_path / "none")


def test_the_interpreter_beside_the_project_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.sglang.outside.launcher.find_spec", lambda name: None)
    monkeypatch.setattr("serving.sglang.outside.launcher._PROJECT", tmp_path)
    assert find_interpreter(Path("/given")) == Path("/given")
    assert find_interpreter(Path("sh")).is_absolute(), "as a shell finds it; `exec_sglang` must not search"
    with pytest.raises(ConfigError, match="--sglang-python"):
        find_interpreter()
    beside = tmp_path / ".venv-sglang" / "bin" / "python"
    beside.parent.mkdir(parents=True)
    beside.write_text("")
    beside.chmod(0o755)
    assert find_interpreter() == beside
    monkeypatch.setattr("serving.sglang.outside.launcher.find_spec", lambda name: "found")
    assert find_interpreter() == Path(sys.executable)


@pytest.mark.parametrize(
    ("depth", "suffix_depth", "steps"),
    [
        *((1, 0, [0, 1]), (2, 0, [0, 1, 2]), (3, 0, [0, 1, 2, 3]), (4, 0, [0, 1, 2, 4]), (9, 0, [0, 1, 2, 4, 8, 9])),
        *((4, 16, [0, 1, 2, 4, 8, 16]), (4, 6, [0, 1, 2, 4, 6]), (4, 3, [0, 1, 2, 4])),
    ],
)
def test_the_depths_to_choose_from_are_few(depth: int, suffix_depth: int, steps: list[int]) -> None:
    assert adaptive_config(depth, suffix_depth) == {"1": {"candidate_steps": steps}}
