from __future__ import annotations

from pathlib import Path

import pytest

from serving.gateway.config import load_settings
from speculator.errors import ConfigError


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_DEFAULT_MAX_TOKENS", "99")
    assert load_settings().default_max_tokens == 99


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_bad_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_MAX_SAMPLES", value)
    with pytest.raises(ConfigError) as refused:
        load_settings()
    assert "set SLIPSTREAM_GATEWAY_MAX_SAMPLES or unset it" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "taken"), [("", ""), ("/", ""), ("slipstream", "/slipstream"), ("/a/b-1/", "/a/b-1"), ("//x", "/x")]
)
def test_a_prefix_is_written_in_any_way(monkeypatch: pytest.MonkeyPatch, given: str, taken: str) -> None:
    assert load_settings(root_path=given).root_path == taken
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ROOT_PATH", given)
    assert load_settings().root_path == taken
    for other in ("/a b", "https://x/y", "/a?b"):
        with pytest.raises(ConfigError, match=r"--root-path \(SLIPSTREAM_GATEWAY_ROOT_PATH\) is not usable"):
            load_settings(root_path=other)


def test_a_key_of_the_environment_may_end_in_a_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", "0123456789abcdef\n")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", " one\r\n")
    given = load_settings()
    keys = given.admin_key, given.api_key, load_settings(api_key="two\n").api_key
    assert [key and key.get_secret_value() for key in keys] == ["0123456789abcdef", "one", "two"]
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "\n")
    with pytest.raises(ConfigError, match=r"--api-key \(SLIPSTREAM_API_KEY\) is not usable"):
        load_settings()


def test_the_admin_key_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=r"ADMIN_KEY_FILE names .* cannot be read"):
        load_settings()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        load_settings()
    file.write_text("too short\n")
    with pytest.raises(ConfigError, match=r"ADMIN_KEY_FILE names .* is not usable .* at least 16") as refused:
        load_settings()
    assert "too short" not in str(refused.value)
    file.write_text("0123456789abcdef\n")
    key = load_settings().admin_key
    assert key is not None
    assert key.get_secret_value() == "0123456789abcdef"
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", "0123456789abcdef")
    with pytest.raises(ConfigError, match="both set"):
        load_settings()


def test_one_key_may_be_given_or_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key(**given: str) -> str | None:
        found = load_settings(**given).api_key
        return None if found is None else found.get_secret_value()

    assert key() is None
    assert key(api_key="given") == "given"
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "set")
    (tmp_path / "admin").write_text("0123456789abcdef\n")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY_FILE", str(tmp_path / "admin"))
    assert (key(), key(api_key="given")) == ("set", "given")
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_KEYS_FILE", "keys.json")
    with pytest.raises(ConfigError, match="both set"):
        load_settings()
    monkeypatch.delenv("SLIPSTREAM_GATEWAY_KEYS_FILE")
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "")
    for given in ({}, {"api_key": ""}, {"api_key": " "}):
        with pytest.raises(ConfigError, match=r"--api-key \(SLIPSTREAM_API_KEY\) is not usable"):
            load_settings(**given)
