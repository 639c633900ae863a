"""Secrets in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculator.errors import ConfigError
from speculator.settings import read_secret


@pytest.mark.parametrize("content", [b"secret", b"secret\n", b"secret\r\n", b"\xef\xbb\xbfsecret\n"])
def test_the_end_of_its_line_and_a_byte_order_mark_are_no_part_of_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    assert read_secret(path, "SLIPSTREAM_KEY_FILE") == "secret"


def test_another_encoding_is_refused_by_file_and_variable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes("secret".encode("utf-16"))
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_KEY_FILE names {path}"):
        read_secret(path, "SLIPSTREAM_KEY_FILE")
