"""`slipstream serve --engine sglang` as a process, in front of a stand-in for SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import httpx
import openai
import pytest
import redis
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from serving.sglang.outside.launcher import SglangStart
from slipstream.start.sglang import with_draft
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lineage import admit, ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.preloaded import ForkedProcess
from tests.fixtures.waiting import PATIENCE_S, url_in, wait_until
from tests.serving.sglang.outside.conftest import MakeOptions, fake_install, make_options, started
from tests.serving.sglang.outside.fake_sglang import EVENTS, WHOLE
from tests.serving.sglang.outside.test_launcher import is_running
from tests.slipstream.conftest import spawn

__all__ = ["fake_install", "make_options"]

Serve = Callable[..., contextlib.AbstractContextManager[ForkedProcess]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "serve.log"


@pytest.fixture
def serve(
    toy_model: Path, redis_url: str, redis_client: redis.Redis, tmp_path: Path, log: Path, fake_install: Path
) -> Serve:
    @contextlib.contextmanager
    def run(*arguments: object) -> Iterator[ForkedProcess]:
        words = ["serve", "--engine", "sglang", "--model", toy_model, "--redis-url", redis_url, "--port", 0]
        words += ["--store", tmp_path / "drafts", "--sglang-python", sys.executable, *arguments]
        log.unlink(missing_ok=True)
        process = spawn(log, *words)
        try:
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)

    return run


def test_a_target_that_lacks_a_tensor_gets_no_first_draft(
    serve: Serve, toy_model: Path, log: Path, tmp_path: Path
) -> None:
    target = shutil.copytree(toy_model, tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors")
    with serve("--model", target) as process:
        assert process.wait(PATIENCE_S) == 2
    assert "up_proj.weight is missing" in log.read_text().splitlines()[-1]
    assert DraftStore(tmp_path / "drafts").latest() is None


def test_from_an_empty_store_to_answers_and_back(
    serve: Serve, toy_model: Path, log: Path, tmp_path: Path, redis_client: redis.Redis
) -> None:
    with serve("--depth", 2, "--capture", "--name", "toy", "--", "--tp-size", 2) as process:
        url = url_in(log)
        store = DraftStore(tmp_path / "drafts")
        fingerprint = target_fingerprint(toy_model)
        assert store.manifest(1).target_fingerprint == fingerprint
        found = started()
        arguments, environment = found["arguments"], found["environment"]
        folder = arguments[arguments.index("--speculative-draft-model-path") + 1]
        assert Path(folder) == tmp_path / "drafts" / "versions" / "000001"
        assert arguments[-2:] == ["--tp-size", "2"]
        assert environment["SLIPSTREAM_CAPTURE"] == "1"
        assert environment["SLIPSTREAM_MODEL_KEY"] == model_key(toy_model, fingerprint)

        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["toy"]
        body = {"model": "toy", "messages": [{"role": "user", "content": "hello"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).content == WHOLE
        stream = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True})
        assert stream.content == b"".join(EVENTS)
        assert httpx.get(f"{url}/ready").json()["draft_version"] == 1

        pointer = DraftPointer(redis_client, model_key(toy_model, fingerprint))
        second = store.write(store.load(1), store.config(1), parent=1, target_fingerprint=fingerprint, info={})
        admit(store, second.version, target_fingerprint=fingerprint, actor="test", reason="a copy")
        pointer.report_engine(environment["SLIPSTREAM_ENGINE_ID"], {"version": 2, "swaps": 4})
        wait_until(lambda: 'slipstream_swaps_total{outcome="installed"} 4.0' in httpx.get(f"{url}/metrics").text)
        assert httpx.get(f"{url}/ready").json()["draft_version"] == 2
        assert store.lifecycle.last_good() == 1, "what becomes of a version is for the plugin to say"

        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not is_running(found["pid"])
    wait_until(lambda: not is_running(found["worker"]))


def test_the_plugins_refusal_is_the_error(serve: Serve, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "refuse")
    with serve() as process:
        assert process.wait(PATIENCE_S) == 2
    assert log.read_text().splitlines()[-1] == "error: slipstream: the draft was made for another target"


@pytest.mark.parametrize(
    ("defaults", "capture", "extra", "warns"),
    [
        ({"min_p": 0.1, "top_p": 0.8}, True, (), True),
        ({"repetition_penalty": 1.05, "min_p": 0.0, "temperature": 0.7}, True, (), False),
        ({"min_p": 0.1}, False, (), False),
        ({"min_p": 0.1}, True, ("--sampling-defaults=openai",), False),
        ([], True, (), False),
    ],
)
def test_defaults_of_the_model_that_leave_nothing_to_learn_from_are_warned_of(
    toy_model: Path,
    tmp_path: Path,
    make_options: MakeOptions,
    defaults: object,
    capture: bool,
    extra: tuple[str, ...],
    warns: bool,
) -> None:
    """SGLang takes them from generation_config.json by default."""
    target = shutil.copytree(toy_model, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps(defaults))
    store, fingerprint = DraftStore(tmp_path / "drafts"), target_fingerprint(target)
    version = ensure_lineage(store, target, fingerprint, draft_vocab_size=16)
    options = make_options(model_dir=target, capture=capture, extra=extra)
    start = SglangStart(**{each.name: getattr(options, each.name) for each in fields(SglangStart)})
    with capture_logs() as logs:
        with_draft(start, Path(sys.executable), store, version, fingerprint=fingerprint, engine_id="e")
    assert any("--sampling-defaults openai" in each.get("fix", "") for each in logs) == warns


def test_the_end_of_sglang_is_ours(serve: Serve, log: Path) -> None:
    with serve() as process:
        url_in(log)
        os.kill(started()["pid"], signal.SIGKILL)
        assert process.wait(PATIENCE_S) == 1
    assert "error: SGLang ended with code 9" in log.read_text()
    assert "Traceback" not in log.read_text()
    wait_until(lambda: not is_running(started()["worker"]))


def test_sigterm_while_sglang_loads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "hang")
    with serve() as process:
        wait_until(lambda: Path(os.environ["FAKE_SGLANG_RECORD"]).exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
    wait_until(lambda: not is_running(started()["worker"]))


def test_a_draft_for_another_target_is_refused_before_sglang_starts(
    serve: Serve, log: Path, tmp_path: Path, toy_model: Path
) -> None:
    from tests.fixtures.toy import make_toy_model

    other = make_toy_model(tmp_path / "other", seed=1)
    ensure_lineage(DraftStore(tmp_path / "drafts"), other, target_fingerprint(other), draft_vocab_size=16)
    with serve() as process:
        assert process.wait(PATIENCE_S) == 2
    said = log.read_text()
    assert f"in {tmp_path / 'drafts'} was trained for target" in said
    assert "check --model, or choose another --store or, if you pass one, --data-dir" in said
    assert not Path(os.environ["FAKE_SGLANG_RECORD"]).exists()


# -- options -------------------------------------------------------------------------------------------------------

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engine", "sglang", "--slots", 4), "--max-running-requests"),
        (("--engine", "sglang", "--context-length", 64), "--context-length"),
        (("--engine", "sglang", "--threads", 1), "--threads is for --engine local"),
        (("--engine", "sglang", "--dtype", "float64"), "float64"),
        (("--engine", "sglang", "--depth", 0), "--depth 0"),
        (("--engine", "sglang", "--", "--port", 1), "--port is set by slipstream"),
        (("--sglang-python", "/bin/true"), "--sglang-python is for --engine sglang"),
        (("--capture-bytes-per-s", 5), "--capture-bytes-per-s is for --engine sglang"),
        (("--start-timeout-s", 5), "--start-timeout-s is for --engine sglang"),
        (("--dtype", "float16"), "float16"),
        (("--share-groups", "--capture-filter", "os:getcwd"), "leave one of them out"),
        (("--engine", "sglang", "--share-groups", "--capture-filter", "os:getcwd"), "leave one of them out"),
        (("--share-groups", "--suffix-depth", 0), "--suffix-depth to 1 or more"),
        (("--engine", "sglang", "--share-groups", "--suffix-depth", 0), "--suffix-depth to 1 or more"),
        (("--", "--tp-size", 2), "'--tp-size' is an argument for --engine sglang"),
    ],
)
@pytest.mark.usefixtures("fake_install")
def test_options_of_the_other_engine_are_refused(
    refused: Refused, toy_model: Path, redis_url: str, tmp_path: Path, words: tuple[object, ...], says: str
) -> None:
    common = ("--model", toy_model, "--redis-url", redis_url, "--store", tmp_path / "drafts", "--port", 0)
    python = ("--sglang-python", sys.executable) if "sglang" in words else ()
    assert says in refused("serve", *common, *python, *words)


@pytest.mark.parametrize("name", ["DEFAULT_MAX_TOKENS", "MAX_PROMPT_TOKENS"])
def test_a_gateway_setting_without_effect_is_refused(
    name: str, refused: Refused, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SLIPSTREAM_GATEWAY_{name}", "64")
    assert name in refused("serve", "--engine", "sglang", "--model", toy_model)


def test_no_sglang(refused: Refused, toy_model: Path) -> None:
    line = refused("serve", "--engine", "sglang", "--model", toy_model, "--port", 0, "--sglang-python", "/no/python")
    assert "--sglang-python" in line
