from __future__ import annotations

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
