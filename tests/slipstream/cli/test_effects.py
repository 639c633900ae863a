"""An option or a variable that has no effect where it is given says so: refused where it was typed, else a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.capture.sampling import DEFAULT_BRANCH_SHARE
from serving.gateway.config import load_settings
from slipstream.cli import effects
from slipstream.logs import configure_logs
from speculator.errors import ConfigError
from tests.slipstream.conftest import SampleEnd
from trainer.config import load_config

Refused = Callable[..., str]
Warned = Callable[..., dict[str, str]]
NOWHERE = "unix:///nowhere/redis.sock"


@pytest.fixture
def warned(invoke: Callable[..., SampleEnd]) -> Warned:
    """Run a command line that cannot begin, and return of what it warned before: the reason of every setting."""
    return lambda *arguments: warnings(invoke(*arguments).err)


def warnings(text: str) -> dict[str, str]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {
        line.get("setting") or line["variable"]: line.get("reason") or line["nearest"]
        for line in lines
        if line["level"] == "warning"
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("drafts", "init", "--if-missing", "--out", "x"), "--if-missing is for --store"),
        (
            ("traces", "prune", "x.rec", "--older-than-hours", 1, "--redis-url", "x"),
            "--redis-url is for pruning a stream",
        ),
        (("doctor", "--sglang-python", "/bin/true"), "--sglang-python is for --engine sglang"),
        (("sglang", "--share-groups", "--suffix-depth", 0), "--share-groups shares text for suffix drafts"),
        (("sglang", "--share-groups", "--capture-filter", "os:getcwd"), "leave one of them out"),
        (("replay", "x.rec", "--steps", 0, "--loss", "forward_kl=1"), "--loss has no effect with --steps 0"),
    ],
)
def test_what_was_typed_without_effect_is_refused(
    refused: Refused, toy_model: Path, words: tuple[object, ...], says: str
) -> None:
    model = () if "traces" in words else ("--model", toy_model)
    assert says in refused(*words, *model)


def test_of_capture_while_it_is_off_is_a_warning(
    warned: Warned, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("serve", "--model", toy_model, "--redis-url", NOWHERE, "--store", tmp_path, "--port", 0)
    monkeypatch.setenv("SLIPSTREAM_CAPTURE_FLOOR", "0.5")
    monkeypatch.setenv("SLIPSTREAM_BRANCH_SHARE", "0.05")
    monkeypatch.setenv("SLIPSTREAM_CAPTURE_FILTER", "")
    found = warned(*common, "--context-window", 64)
    assert found.keys() == {"SLIPSTREAM_CAPTURE_FLOOR", "SLIPSTREAM_BRANCH_SHARE", "--context-window"}
    assert "without --capture" in found["--context-window"]
    assert warned(*common, "--context-window", 64, "--capture") == {}
    monkeypatch.setenv("SLIPSTREAM_BRANCH_SHARE", str(DEFAULT_BRANCH_SHARE))
    assert warned(*common).keys() == {"SLIPSTREAM_CAPTURE_FLOOR"}, "a variable with the default changes nothing"


def test_where_no_round_drafts_that_is_a_warning(warned: Warned, toy_model: Path, tmp_path: Path) -> None:
    common = ("serve", "--model", toy_model, "--redis-url", NOWHERE, "--store", tmp_path, "--port", 0)
    drafting = ("--suffix-depth", 8, "--control-share", 0.1)
    assert warned(*common, *drafting) == warned(*common, "--depth", 0, "--suffix-depth", 0) == {}
    assert warned(*common, "--depth", 0, *drafting).keys() == {"--suffix-depth", "--control-share"}


@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_what_would_be_refused_is_a_warning_of_a_variable_which_may_be_another_services(
    engine: str, warned: Warned, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_SHARE_GROUPS", "1")
    common = ("serve", "--engine", engine, "--model", toy_model, "--port", 0)
    other = ("--redis-url", NOWHERE, "--store", tmp_path) if engine == "local" else ("--sglang-python", "/no/python")
    assert "--suffix-depth" in warned(*common, *other, "--suffix-depth", 0)["SLIPSTREAM_SHARE_GROUPS"]
    assert warned(*common, *other) == {}


def test_an_unknown_variable_is_named_with_the_one_that_was_meant(
    warned: Warned, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LERNING_RATE", "1")
    # Of compose, and as Kubernetes says where its service of that name is.
    monkeypatch.setenv("SLIPSTREAM_SGLANG_GPU", "0")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    store = ("--store", tmp_path / "drafts", "--redis-url", NOWHERE)
    found = warned("serve", "--model", toy_model, *store, "--port", 0)
    assert found == {"SLIPSTREAM_TRAINER_LERNING_RATE": "SLIPSTREAM_TRAINER_LEARNING_RATE"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"METRICS_HOST": "0.0.0.0"}, "METRICS_HOST"),
        ({"METRICS_HOST": "0.0.0.0", "METRICS_PORT": "0"}, ""),
        ({"GOLDEN_EPSILON": "0.1", "GOLDEN_TRACES": "0"}, "GOLDEN_EPSILON"),
        ({"GOLDEN_PATIENCE_S": "5", "GOLDEN": "a.rec"}, "GOLDEN_PATIENCE_S"),
    ],
)
def test_trainer_settings_that_need_another(
    given: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"SLIPSTREAM_TRAINER_{name}", value)
    configure_logs()
    nowhere = Path()
    config = load_config(model_dir=nowhere, redis_url="", model_key="", store_dir=nowhere, state_dir=nowhere)
    effects.check_variables(config, effects.TRAIN)
    assert [*warnings(capsys.readouterr().err)] == ([f"SLIPSTREAM_TRAINER_{named}"] if named else [])


def test_gateway_settings_of_the_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_MAX_PROMPT_TOKENS", "100")
    effects.check_variables(load_settings(), effects.GATEWAY_OF_LOCAL)
    with pytest.raises(ConfigError, match="SLIPSTREAM_GATEWAY_MAX_PROMPT_TOKENS is for --engine local"):
        effects.check_variables(load_settings(), effects.GATEWAY_IN_FRONT)


def test_every_rule_names_what_there_is() -> None:
    from serving.gateway.config import GatewaySettings
    from slipstream.cli.main import app
    from slipstream.settings import commands
    from trainer.config import TrainerConfig

    params = {name: {option.name for option in command.params} for name, command in commands(app)}
    for command, rules in {
        "serve": effects.SERVE,
        "gateway": effects.GATEWAY,
        "replay": effects.REPLAY,
        "drafts init": effects.DRAFT_INIT,
        "traces prune": effects.PRUNE,
        "doctor": effects.DOCTOR,
    }.items():
        for rule in rules:
            assert set(rule.names) <= params[f"slipstream {command}"], command
    for rule in (*effects.GATEWAY_OF_LOCAL, *effects.GATEWAY_IN_FRONT):
        assert set(rule.names) <= GatewaySettings.model_fields.keys()
    for rule in effects.TRAIN:
        assert set(rule.names) <= TrainerConfig.model_fields.keys()
