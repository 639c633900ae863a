"""Files of prompts and of rollout groups that something has happened to."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import httpx

from slipstream.cli.rollout import read_groups
from slipstream.demo.topics import read_prompts
from speculator.errors import ConfigError
from tests.hostile.judge import Choose, FailureError, Inputs, Outcome, garbled

_TEXTS = (
    *("hello", "a\u2028b", "c\u0085d\u2029", "\x0b\x0c\x1c\x1d\x1e", "é世\U0001f600", "line\nend\r\n", '"\\', "\ufeff"),
    "",
)
_VALUES: tuple[object, ...] = (None, True, 7, -1.5, "", [], {}, ["a"], {"a": None}, 10**30)
_PARTS = (
    *(b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe", b"\xe2\x80\xa8", b"\xc2\x85"),
    *(b"\r", b"\n", b"\r\n", b"\x0c", b"\x1e", b"\\ud800", b"\\u2028", b"\\", b'"', b"{", b"}", b"[", b"]", b",", b":"),
    *(b"#", b"'", b"%s", b"null", b"NaN", b"-Infinity", b"1e999"),
    *(b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"\t" * 100),
)
_ENCODINGS = (*["utf-8"] * 8, "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252")


def inputs(path: Path, choose: Choose, count: int) -> Inputs:
    """Files of prompts and of rollout groups in turn, each written to `path`."""
    for number in range(count):
        yield str(number), partial(read, path, broken(choose), as_groups=number % 2 > 0)


def broken(choose: Choose) -> bytes:
    """A file with something wrong in it, or with nothing but odd text."""
    lines = [_line(choose) for _ in range(choose(5))]
    text = ("\n", "\n", "\n", "\r\n", "\r", "\n\n \t\n", "\u2028")[choose(7)].join(lines)
    raw = (text + "\n" * choose(2)).encode(_ENCODINGS[choose(len(_ENCODINGS))], "replace")
    return garbled(raw, choose, inserted=_PARTS) if raw and choose(2) else raw


def _line(choose: Choose) -> str:
    fields: dict[str, object] = {"domain": _TEXTS[choose(len(_TEXTS))], "prompt": _TEXTS[choose(len(_TEXTS))], "n": 2}
    if choose(3) == 0:
        fields[("domain", "prompt", "n", "id", "a\u2028")[choose(5)]] = _VALUES[choose(len(_VALUES))]
    if choose(6) == 0:
        del fields[("domain", "prompt")[choose(2)]]
    line = json.dumps(fields, ensure_ascii=bool(choose(3) == 0))
    return line if choose(20) else json.dumps(_VALUES[choose(len(_VALUES))])


def read(path: Path, raw: bytes, *, as_groups: bool) -> Outcome:
    """What becomes of the file: what it holds can be sent, or one line says what is wrong and where."""
    path.write_bytes(raw)
    try:
        if as_groups:
            sent = [*read_groups(path, {"max_tokens": 4}).values()]
        else:
            sent = [{"domain": prompt.domain, "prompt": prompt.text} for prompt in read_prompts(path)]
    except ConfigError as refusal:
        said = str(refusal)
        if str(path) not in said or len(said.splitlines()) != 1:
            raise FailureError(said) from refusal
        return "refused"
    httpx.Request("POST", "http://127.0.0.1", json=sent)
    return "read"
