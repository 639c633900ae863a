"""`slipstream keys`: what it prints, once, and what it leaves in the file."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serving.gateway.keys import Keyring
from slipstream.cli.main import app
from tests.slipstream.conftest import SampleEnd

Refused = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `slipstream keys`, with the file in the environment; returns what it printed."""
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_KEYS_FILE", str(tmp_path / "keys.json"))

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["keys", *map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_a_key_is_made_listed_and_revoked(keys: Callable[..., str], tmp_path: Path) -> None:
    secret = keys("add", "alice").strip()
    assert re.fullmatch(r"sk-slipstream-[A-Za-z0-9_-]{43}", secret)
    file = tmp_path / "keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ring = Keyring(file)
    found = ring.find(secret.encode())
    assert found is not None
    assert (found.name, found.tenant, found.capture, found.read_only) == ("alice", "alice", True, False)
    listed = keys("list")
    assert "alice" in listed
    for told in (listed, keys("list", "--json"), file.read_text()):
        assert secret not in told
    assert found.sha256 not in keys("list", "--json")
    assert keys("revoke", "alice") == "revoked alice\n"
    assert ring.find(secret.encode()) is None
    assert json.loads(keys("list", "--json")) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_listed_name_is_whole_for_revoke(
    is_terminal: bool, keys: Callable[..., str], invoke: Callable[..., SampleEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys("add", "n" * 60, "--tenant", "t" * 60)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _, row = invoke("keys", "list").out.splitlines()
    assert row.split()[:2] == ["n" * 60, "t" * 60]


def test_every_option_is_in_the_file(keys: Callable[..., str], tmp_path: Path) -> None:
    options = ("--tenant", "team", "--no-capture", "--requests-per-minute", 60, "--max-concurrent", 4)
    made: dict[str, Any] = json.loads(keys("add", "bob", *options, "--expires-days", 1.5, "--json"))
    assert made.pop("key").startswith("sk-slipstream-")
    assert made["expires_s"] - made["created_s"] == 129_600
    expected = {
        "tenant": "team",
        "capture": False,
        "read_only": False,
        "requests_per_minute": 60,
        "max_concurrent": 4,
    }
    assert expected.items() <= made.items()
    scraper = json.loads(keys("add", "scraper", "--read-only", "--expires-days", 1, "--json"))
    file = tmp_path / "keys.json"
    file.write_text(file.read_text().replace(str(scraper["expires_s"]), str(scraper["created_s"])))
    assert json.loads(keys("list", "--json"))[0] == made
    scraper = json.loads(keys("list", "--json"))[1]
    assert (scraper["read_only"], scraper["is_expired"]) == (True, True)
    _, running, over = keys("list").splitlines()
    assert over.split()[0] == "scraper"
    assert over.endswith(", over")
    assert not running.endswith(", over")


def test_what_cannot_be_done_is_one_line(refused: Refused, keys: Callable[..., str], tmp_path: Path) -> None:
    keys("add", "alice")
    before = (tmp_path / "keys.json").read_bytes()
    assert "alice" in refused("keys", "add", "alice")
    assert "'bob'" in refused("keys", "revoke", "bob")
    assert "$.name" in refused("keys", "add", "no/name")
    assert "$.tenant" in refused("keys", "add", "carol", "--tenant", "a b")
    assert "$.expires_s" in refused("keys", "add", "carol", "--expires-days", 10**9)
    for days in (0, 1e-6):
        assert "give a positive number" in refused("keys", "add", "carol", "--expires-days", days)
    assert "--expires-days inf" in refused("keys", "add", "carol", "--expires-days", "inf")
    assert CliRunner().invoke(app, ["keys", "add", "carol", "--expires-days", "nan"]).exit_code == 2
    assert (tmp_path / "keys.json").read_bytes() == before
    assert "cannot be read" in refused("keys", "list", "--file", tmp_path / "none")
    (tmp_path / "keys.json").write_text("{")
    for words in (("list",), ("add", "bob"), ("revoke", "alice")):
        assert "is not a file of API keys" in refused("keys", *words)
