"""Whatever the server behind the gateway says instead of an error, the client gets an error that is one."""

from __future__ import annotations

import pytest

from serving.gateway.upstream import refusal, refusal_in

NONSENSE = (b"", b"<html>", b"null", b"[]", b'{"message": "\xff\xfe"}', b'{"message": 7}', b'{"a": ' + b"[" * 100_000)


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: ascii(content[:20]))
@pytest.mark.parametrize(("status", "told"), [(400, 400), (404, 404), (401, 500), (500, 500), (503, 503)])
def test_a_refusal_of_nonsense(status: int, told: int, content: bytes) -> None:
    assert refusal(status, content).status == told


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: ascii(content[:20]))
def test_an_error_event_of_nonsense(content: bytes) -> None:
    failure = refusal_in(b'data: {"error": ' + content + b"}\n\n")
    assert failure is not None
    assert failure.status == 500
