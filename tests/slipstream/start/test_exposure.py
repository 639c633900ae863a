"""A start that would let anybody in is refused: exit code 2, and one line that names the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from serving.gateway.config import GatewaySettings
from slipstream.start.exposure import check_exposure, check_sglang_exposure, is_loopback, is_weak
from speculator.errors import ConfigError
from tests.serving.gateway.keyfile import KeyFile

Refused = Callable[..., str]

STRONG = "0f9c" * 4 + "ab12cd34ef56"
HERE = "redis://127.0.0.1:6379/0"
PUBLIC = ["0.0.0.0", "::", "192.168.1.7", "2001:db8::1", "gateway.example", ""]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = KeyFile(tmp_path / "keys.json")
    file.add("user")
    return file.path


def reason(host: str, settings: GatewaySettings, redis_url: str = HERE) -> str:
    """Why the start is refused; empty where it is not."""
    try:
        check_exposure(host, redis_url, settings)
    except ConfigError as error:
        return str(error)
    return ""


def safe(keys: Path) -> GatewaySettings:
    return GatewaySettings(keys_file=keys, admin_key=SecretStr(STRONG))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_on_loopback_nothing_is_needed(host: str) -> None:
    assert is_loopback(host)
    assert reason(host, GatewaySettings(), "redis://elsewhere") == ""


@pytest.mark.parametrize("host", PUBLIC)
def test_elsewhere_keys_and_an_admin_key_are(host: str, keys: Path) -> None:
    assert not is_loopback(host)
    assert "SLIPSTREAM_GATEWAY_KEYS_FILE" in reason(host, GatewaySettings())
    assert "SLIPSTREAM_GATEWAY_KEYS_FILE" in reason(host, GatewaySettings(admin_key=SecretStr(STRONG)))
    assert "SLIPSTREAM_GATEWAY_ADMIN_KEY" in reason(host, GatewaySettings(keys_file=keys))
    assert reason(host, safe(keys)) == ""
    trusting = GatewaySettings(auth_elsewhere=True, admin_key=SecretStr(STRONG))
    assert reason(host, trusting) == ""
    assert "SLIPSTREAM_GATEWAY_ADMIN_KEY" in reason(host, GatewaySettings(auth_elsewhere=True))
    assert "no password" in reason(host, trusting, "redis://far:6379/0")


@pytest.mark.parametrize(
    "admin_key", ["changeme-changeme", "password12345678", "x" * 32, "Slipstream-admin-key", "abababababababab"]
)
def test_an_admin_key_that_can_be_guessed_is_refused(admin_key: str, keys: Path) -> None:
    assert is_weak(admin_key)
    told = reason("0.0.0.0", GatewaySettings(keys_file=keys, admin_key=SecretStr(admin_key)))
    assert "the admin key can be guessed" in told
    assert admin_key not in told


def test_a_redis_that_anybody_reaches_is_refused(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(url: str) -> str:
        return reason("0.0.0.0", safe(keys), url)

    for good in (
        HERE,
        "unix:///run/redis.sock",
        "redis:///0",
        f"redis://:{STRONG}@far/0",
        f"redis://u:{STRONG}@far/0",
        "rediss://far",
    ):
        assert told(good) == ""
    for weak in ("redis", "changeme1234", "password", "short"):
        assert "can be guessed" in told(f"redis://u:{weak}@127.0.0.1/0")
        assert f":{weak}@" not in told(f"redis://u:{weak}@127.0.0.1/0")
    assert "no password" in told("redis://far:6379/0")
    assert "no password" in told("redis://user@far:6379/0")
    several = "redis+sentinel://127.0.0.1,far/m"
    assert "Redis at far has no password" in told(several)
    assert told(several.replace("://", f"://:{STRONG}@")) == ""
    assert told(several.replace("redis", "rediss")) == ""
    file = tmp_path / "password"
    file.write_text(STRONG)
    monkeypatch.setenv("SLIPSTREAM_REDIS_PASSWORD_FILE", str(file))
    assert told("redis://user@far:6379/0") == ""
    assert "no password" in told("redis://far:6379/0"), "the file is the user's, and nobody is named"
    file.write_text("default-password")
    assert "can be guessed" in told("redis://user@far:6379/0")


def test_drawn_keys_are_not_weak() -> None:
    from serving.gateway.keys import new_secret

    assert not any(is_weak(new_secret().removeprefix("sk-slipstream-")) for _ in range(1000))


def test_a_broken_file_of_keys_ends_the_start_everywhere(tmp_path: Path) -> None:
    assert "cannot be read" in reason("127.0.0.1", GatewaySettings(keys_file=tmp_path / "none"))


def test_the_commands_refuse(refused: Refused, toy_model: Path) -> None:
    for words in (("serve",), ("serve", "--engine", "sglang"), ("gateway", "--sglang", "http://127.0.0.1:1")):
        line = refused(*words, "--model", toy_model, "--host", "0.0.0.0", "--port", 0)
        assert "others can reach --host 0.0.0.0 and there are no API keys" in line


@pytest.mark.parametrize("host", PUBLIC)
def test_sglang_itself_is_for_a_private_network(host: str) -> None:
    check_sglang_exposure("127.0.0.1", "redis://elsewhere", is_private=False)
    with pytest.raises(ConfigError, match="--private-network"):
        check_sglang_exposure(host, HERE, is_private=False)
    check_sglang_exposure(host, HERE, is_private=True)
    with pytest.raises(ConfigError, match="has no password"):
        check_sglang_exposure(host, "redis://elsewhere", is_private=True)


@pytest.mark.parametrize("host", PUBLIC)
def test_elsewhere_one_key_for_all_is_enough(host: str) -> None:
    assert reason(host, GatewaySettings(api_key=SecretStr(STRONG))) == ""
    assert "--api-key can be guessed" in reason(host, GatewaySettings(api_key=SecretStr("changeme")))
    weak = GatewaySettings(api_key=SecretStr(STRONG), admin_key=SecretStr("password-password"))
    assert "the admin key can be guessed" in reason(host, weak)
    assert "no password" in reason(host, GatewaySettings(api_key=SecretStr(STRONG)), "redis://far:6379/0")
