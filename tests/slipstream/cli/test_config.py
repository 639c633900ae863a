"""`--config FILE.yaml`: the names of the flags, behind flags and variables; and what `config show` says of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app

Refused = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "slipstream.yaml"


def shown(*words: object) -> dict[str, tuple[Any, str]]:
    result = CliRunner().invoke(app, ["config", "show", "--json", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return {row["name"]: (row["value"], row["from"]) for row in json.loads(result.stdout)}


def test_flag_before_variable_before_file_before_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("model: M\nslots: 3\nport: 8001\nredis-url: redis://file\nlearn: true\ncapture_floor: 0.5\n")
    monkeypatch.setenv("SLIPSTREAM_REDIS_URL", "redis://variable")
    said = shown("serve", "--config", file, "--port", 8002)
    assert said["port"] == (8002, "flag")
    assert said["redis-url"] == ("redis://variable", "SLIPSTREAM_REDIS_URL")
    assert said["slots"] == (3, "file")
    assert said["capture-floor"] == (0.5, "file")
    assert (said["learn"], said["model"]) == ((True, "file"), ("M", "file"))
    assert said["host"] == ("127.0.0.1", "default")


def test_every_service_takes_one_and_no_secret_is_shown(file: Path) -> None:
    file.write_text("model: M\n")
    assert shown("train", "--config", file)["model"] == ("M", "file")
    assert shown("sglang", "--config", file)["model"] == ("M", "file")
    file.write_text("model: M\nsglang: [http://a, http://b]\napi-key: of-all\n")
    said = shown("gateway", "--config", file)
    assert said["sglang"] == (["http://a", "http://b"], "file")
    assert said["api-key"] == ("(secret)", "file")
    for url in ("redis://me:of-all@h:1/0", "redis://h:1/0?password=of-all&db=1"):
        assert "of-all" not in shown("gateway", "--config", file, "--redis-url", url)["redis-url"][0]
    text = CliRunner().invoke(app, ["config", "show", "gateway", "--config", str(file)]).stdout
    assert "of-all" not in text
    assert "http://a" in text


def test_no_part_of_a_password_is_shown() -> None:
    for given, told in {
        "redis://u:p@ss@h:1/0": "redis://u@h:1/0",
        "rediss://:pass@h:1/0?ssl_ca_certs=/x": "rediss://h:1/0?ssl_ca_certs=%2Fx",
        "redis://u:pa/ss@h:1/0": "(unreadable)",
        "redis://h:1/0?password=pass&db=0": "(unreadable)",
        "redis://h:1/?password=pass": "redis://h:1/",
        "redis+cluster://u:pass@h:1": "(unreadable)",
    }.items():
        assert shown("train", "--model", "M", "--redis-url", given)["redis-url"] == (told, "flag")


def test_what_a_server_that_learns_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, toy_model: Path, file: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    root = tmp_path / "slipstream" / "toy"
    said = shown("serve", "--learn", "--model", toy_model)
    assert said["capture"] == (True, "flag")
    assert said["data-dir"] == (str(root), "default")
    assert said["store"] == (str(root / "drafts"), "default")
    assert said["redis-url"] == (f"unix://{root}/redis/redis.sock", "default")
    monkeypatch.setenv("SLIPSTREAM_STORE", "/elsewhere")
    assert shown("serve", "--learn", "--model", "some/id")["data-dir"][0] == str(tmp_path / "slipstream" / "some/id")
    assert shown("serve", "--learn", "--model", "M")["store"] == ("/elsewhere", "SLIPSTREAM_STORE")
    said = shown("serve", "--learn", "--model", "M", "--data-dir", "/data", "--redis-url", "redis://h:1")
    assert (said["store"], said["redis-url"]) == (("/data/drafts", "flag"), ("redis://h:1", "flag"))
    file.write_text("learn: true\n")
    assert shown("serve", "--config", file, "--model", "M")["capture"] == (True, "file")
    assert shown("serve", "--model", "M")["capture"] == (False, "default")


def test_arguments_of_sglang_are_its_own() -> None:
    said = shown("serve", "--model", "M", "--engine", "sglang", "--", "--json", "--port", "5", "--tp", "2")
    assert said["sglang-arguments"] == (["--json", "--port", "5", "--tp", "2"], "flag")
    assert said["port"] == (8000, "default")


def test_one_value_of_an_option_that_may_be_repeated_needs_no_list(file: Path) -> None:
    file.write_text("model: M\nsglang: http://a\n")
    assert shown("gateway", "--config", file)["sglang"] == (["http://a"], "file")


@pytest.mark.parametrize("value", ["012345670123", "1.10", "no", "0x1F", "1_000", "1:30", "2026-01-02", "!!int 007"])
def test_a_value_is_taken_as_it_is_written(file: Path, value: str) -> None:
    """As on the command line: YAML itself would read most of these as other numbers, or as False."""
    file.write_text(f"model: M\nname: {value}\nshare-groups: no\ncapture: yes\nslots:\nseed: null\nport: 08001\n")
    said = shown("serve", "--config", file)
    assert said["name"] == (value.removeprefix("!!int "), "file")
    assert (said["share-groups"][0], said["capture"][0], said["port"][0]) == (False, True, 8001)
    assert said["slots"][0] == shown("serve", "--model", "M")["slots"][0]
    assert said["seed"][0] is None


def test_a_folder_at_home_by_flag_variable_or_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    file.write_text("model: M\nlearn: true\ndata-dir: ~/data\nstore: ~/drafts\n")
    assert shown("serve", "--config", file)["data-dir"] == ("/home/somebody/data", "file")
    assert shown("serve", "--config", file)["store"] == ("/home/somebody/drafts", "file")
    assert shown("serve", "--config", file, "--data-dir=~/x")["data-dir"] == ("/home/somebody/x", "flag")
    monkeypatch.setenv("SLIPSTREAM_STORE", "~/y")
    monkeypatch.setenv("SLIPSTREAM_TRAINER_STATE_DIR", "~/state")
    said = shown("train", "--model", "M")
    assert said["store"] == ("/home/somebody/y", "SLIPSTREAM_STORE")
    assert said["state"] == ("/home/somebody/state", "SLIPSTREAM_TRAINER_STATE_DIR")


def test_an_option_by_either_of_its_names(file: Path) -> None:
    file.write_text("model: M\nserved-model-name: other\n")
    assert shown("serve", "--config", file)["name"] == ("other", "file")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: M\nslot: 3\n", "no option slot: is slots meant?"),
        ("model: M\nfrobnicate: 3\n", "no option frobnicate: see `slipstream serve --help`"),
        ("model: M\nslots: 3\nslots: 4\n", "'slots' appears twice"),
        ("model: M\nname: a\nserved-model-name: b\n", "name and served-model-name set the same option"),
        ("model: {a: 1}\n", "model has nested names"),
        ("model: [M, N]\n", "model has a list that it does not take"),
        ("model: M\nsglang-arguments: [[--tp, 2]]\n", "sglang-arguments has a list that it does not take"),
        ("model: " + "[" * 3000, "not valid YAML"),
        ("<<: {model: M}\n", "no option <<"),
        ("- model\n", "not a mapping of options"),
        ("model: [\n", "not valid YAML"),
        ("config: other.yaml\nmodel: M\n", "no option config"),
    ],
)
def test_what_a_file_may_not_say(refused: Refused, file: Path, text: str, says: str) -> None:
    file.write_text(text)
    assert says in refused("serve", "--config", file)


def test_a_value_of_a_wrong_kind_and_a_file_that_is_not_there(
    invoke: Callable[..., Any], refused: Refused, file: Path
) -> None:
    file.write_text("model: M\nslots: many\n")
    ended = invoke("serve", "--config", file)
    assert ended.code == 2
    assert "--slots" in ended.err
    assert "cannot be read" in refused("serve", "--config", file.with_name("none.yaml"))
    assert "is not a service" in refused("config", "show", "rollout")


def test_what_has_no_effect_is_refused_as_from_the_command_line(refused: Refused, file: Path, toy_model: Path) -> None:
    file.write_text(f"model: {toy_model}\ndata-dir: somewhere\n")
    assert "--data-dir is for --learn" in refused("serve", "--config", file)


def test_a_file_with_a_key_is_for_its_owner_alone(refused: Refused) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        file = Path(name) / "slipstream.yaml"
        file.write_text("model: M\n")
        file.chmod(0o644)
        assert shown("serve", "--config", file)["model"] == ("M", "file")
        file.write_text("model: M\napi-key: of-all\n")
        assert f"chmod o-r {file}" in refused("serve", "--config", file)
