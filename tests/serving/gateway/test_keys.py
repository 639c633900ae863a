"""The file with the API keys: what is in it, what is refused, and that two writers lose nothing."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from serving.gateway.keys import ApiKey, Keyring, change_keys, digest, new_secret, read_keys
from speculator.errors import ConfigError
from tests.serving.gateway.keyfile import KeyFile

GOOD = {"name": "a", "sha256": "0" * 64}


def written(path: Path, *keys: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"version": 1, "keys": keys}))
    path.chmod(0o600)
    return path


def test_secrets_are_long_random_and_not_in_the_file(tmp_path: Path) -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(len(secret) == len("sk-slipstream-") + 43 for secret in secrets)
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("a")
    assert "secret-of-a" not in keys.path.read_text()
    assert Keyring(keys.path).find(b"secret-of-a") == read_keys(keys.path)[0]
    assert digest(b"secret-of-a") in keys.path.read_text()


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("a")
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    keys.path.chmod(0o444)
    keys.add("b")
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o444
    assert {file.name for file in tmp_path.iterdir()} == {"keys.json", ".keys.json.lock"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_changes_the_file_of_another_user_and_it_stays_theirs(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("a")
    os.chown(keys.path, 12345, 23456)
    keys.add("b")
    found = keys.path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 23456, 0o600)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "keys.json", GOOD)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod go-w {file}"):
        read_keys(file)


@pytest.mark.parametrize(
    "keys",
    [
        ({**GOOD, "name": ""},),
        ({**GOOD, "name": "a b"},),
        ({**GOOD, "name": "a\n"},),
        ({**GOOD, "name": "x" * 65},),
        ({**GOOD, "sha256": "0" * 63},),
        ({**GOOD, "sha256": "0" * 64 + "\n"},),
        ({**GOOD, "sha256": "X" * 64},),
        ({**GOOD, "tenant": 'a"b'},),
        ({**GOOD, "requests_per_minute": 0},),
        ({**GOOD, "max_concurrent": -1},),
        ({**GOOD, "capture": "no"},),
        ({**GOOD, "expires_s": 10**15},),
        ({**GOOD, "expires": 5},),
        ({**GOOD, "lineage": "code"},),
        ({"name": "a"},),
        (GOOD, {**GOOD, "sha256": "1" * 64}),
        (GOOD, {**GOOD, "name": "b"}),
    ],
)
def test_a_wrong_key_makes_the_whole_file_wrong(tmp_path: Path, keys: tuple[dict[str, Any], ...]) -> None:
    file = written(tmp_path / "keys.json", *keys)
    with pytest.raises(ConfigError, match=str(file)) as refused:
        read_keys(file)
    assert "\n" not in str(refused.value)
    before = file.read_bytes()
    with pytest.raises(ConfigError):
        change_keys(file, lambda keys: keys)
    assert file.read_bytes() == before


def test_a_file_that_cannot_be_one_of_keys_is_not_read_whole(tmp_path: Path) -> None:
    file = written(tmp_path / "keys.json", GOOD)
    with file.open("a") as opened:
        opened.write(" " * (4 * 1024 * 1024))
    with pytest.raises(ConfigError, match="is too large"):
        read_keys(file)


def test_a_key_is_over_at_its_time() -> None:
    ends = ApiKey(name="a", sha256="0" * 64, expires_s=1000)
    assert [ends.is_expired(now_s) for now_s in (999.9, 1000.0, 1000.1)] == [False, True, True]
    assert not ApiKey(name="a", sha256="0" * 64).is_expired(1e12)


def test_writers_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    def add(number: int) -> None:
        key = ApiKey(name=f"key-{number}", sha256=digest(str(number).encode()))
        change_keys(file, lambda keys: (*keys, key))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in read_keys(file)) == sorted(f"key-{number}" for number in range(20))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        change_keys(tmp_path / "no" / "keys.json", lambda keys: keys)


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (link := tmp_path / "link.json").symlink_to(tmp_path / "keys.json")
    keys = KeyFile(link)
    keys.add("a")
    keys.add("b")
    assert link.is_symlink()
    assert [key.name for key in read_keys(tmp_path / "keys.json")] == ["a", "b"]
