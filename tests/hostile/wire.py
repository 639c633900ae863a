"""Bytes on a socket that are no HTTP, or HTTP that says one thing and does another."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from functools import partial
from urllib.parse import urlsplit

from tests.hostile.api import API_KEY
from tests.hostile.bodies import hostile_bodies
from tests.hostile.judge import DEADLINE_S, Choose, FailureError, Inputs, Outcome, garbled

PATH = "/v1/chat/completions"
_BODY = b'{"model": "double", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}'
_LENGTH = str(len(_BODY)).encode()
_HOST = b"Host: 127.0.0.1"
_KEY = b"Authorization: Bearer " + API_KEY.encode()


def request(
    *lines: bytes, start: bytes = b"POST " + PATH.encode() + b" HTTP/1.1", body: bytes = _BODY, length: bytes = _LENGTH
) -> bytes:
    """A valid request, but for what is given; an empty `length` leaves the header out."""
    headers = [_HOST, _KEY, b"Content-Type: application/json", b"Connection: close", *lines]
    headers += [b"Content-Length: " + length] if length else []
    return b"\r\n".join([start, *headers, b"", body])


def chunked(*lines: bytes, body: bytes) -> bytes:
    return request(b"Transfer-Encoding: chunked", *lines, body=body, length=b"")


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "line breaks": b"\r\n" * 1000,
    "noise": bytes(range(256)) * 40,
    "zeros": bytes(100_000),
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/9.9": request(start=b"POST / HTTP/9.9"),
    "no version": request(start=b"POST /"),
    "upgrade to h2c": request(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABk"),
    "upgrade to a websocket": request(b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: eA=="),
    "CONNECT": request(start=b"CONNECT 127.0.0.1:22 HTTP/1.1"),
    "TRACE": request(start=b"TRACE / HTTP/1.1", body=b"", length=b""),
    "method of noise": request(start=b"\xff\xfe / HTTP/1.1"),
    "long method": request(start=b"A" * 100_000 + b" / HTTP/1.1"),
    "another host's path": request(start=b"POST http://169.254.169.254/latest/meta-data HTTP/1.1"),
    "climbing path": request(start=b"GET /page/../../../../etc/passwd HTTP/1.1", body=b"", length=b""),
    "encoded climbing path": request(start=b"GET /page/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1", body=b"", length=b""),
    "null in the path": request(start=b"GET /page/%00index.html HTTP/1.1", body=b"", length=b""),
    "bytes in the path": request(start=b"GET /v1/models/\xff\xfe HTTP/1.1", body=b"", length=b""),
    "broken escape in the path": request(start=b"GET /v1/models/%f HTTP/1.1", body=b"", length=b""),
    "not UTF-8 in the path": request(start=b"GET /v1/models/%ff%fe HTTP/1.1", body=b"", length=b""),
    "long path": request(start=b"GET /" + b"a" * 200_000 + b" HTTP/1.1", body=b"", length=b""),
    "long query": request(start=b"GET /slipstream/live?since=" + b"9" * 60_000 + b" HTTP/1.1", body=b"", length=b""),
    "broken query": request(start=b"GET /slipstream/live?since=%ff&=&&since HTTP/1.1", body=b"", length=b""),
    "no host": request().replace(_HOST + b"\r\n", b""),
    "two hosts": request(b"Host: other"),
    "another host": request().replace(_HOST, b"Host: evil.example"),
    "many headers": request(*(b"x-%d: y" % number for number in range(20_000))),
    "long header": request(b"x: " + b"y" * 500_000),
    "header without an end": request()[:60] + b"z" * 500_000,
    "key of bytes": request().replace(_KEY, b"Authorization: Bearer \xff\xfe\x80"),
    "header with a null": request(b"x: a\x00b"),
    "header with a lone line feed": request(b"x: a\nauthorization: Bearer b"),
    "folded header": request(b"x: a\r\n  b"),
    "space before the colon": request(b"x : y"),
    "empty header name": request(b": y"),
    "two content types": request(b"Content-Type: text/plain"),
    "two keys": request(b"authorization: Bearer b"),
    "no key": request().replace(_KEY + b"\r\n", b""),
    "part of the key": request().replace(_KEY, _KEY[:-1]),
    "basic authorisation": request().replace(_KEY, b"Authorization: Basic !!!"),
    "long key": request().replace(_KEY, b"Authorization: Bearer " + b"k" * 30_000),
    "forwarded": request(b"X-Forwarded-For: 127.0.0.1, ::1", b"X-Forwarded-Proto: https", b"Forwarded: for=_x"),
    "trace parent of nonsense": request(b"traceparent: 00-zz-zz-zz", b"tracestate: " + b"a=b," * 1000),
    "negative length": request(length=b"-1"),
    "length of words": request(length=b"ten"),
    "length beyond 64 bits": request(length=b"9" * 30),
    "length with a sign": request(length=b"+10"),
    "length in hexadecimal": request(length=b"0x10"),
    "two lengths": request(b"Content-Length: 3"),
    "length too short": request(length=b"10"),
    "length too long": request(length=b"1000"),
    "length and chunks": request(b"Transfer-Encoding: chunked"),
    "unknown transfer coding": request(b"Transfer-Encoding: gzip, chunked", length=b""),
    "transfer coding twice": chunked(b"Transfer-Encoding: identity", body=b"0\r\n\r\n"),
    "chunks": chunked(body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)),
    "chunks of one byte": chunked(body=b"".join(b"1\r\n%c\r\n" % byte for byte in _BODY) + b"0\r\n\r\n"),
    "empty chunks": chunked(body=b"0\r\n\r\n"),
    "chunk length of words": chunked(body=b"zz\r\nhello\r\n0\r\n\r\n"),
    "negative chunk length": chunked(body=b"-5\r\nhello\r\n0\r\n\r\n"),
    "chunk length beyond 64 bits": chunked(body=b"f" * 40 + b"\r\nhello\r\n"),
    "chunk that is too short": chunked(body=b"ffff\r\nhello"),
    "chunk with a long extension": chunked(body=b"5;" + b"x" * 300_000 + b"\r\nhello\r\n0\r\n\r\n"),
    "trailers": chunked(body=b"0\r\nauthorization: Bearer x\r\n\r\n"),
    "a smuggled request": request() + request(start=b"POST /admin/drafts/unpin HTTP/1.1"),
    "a hundred requests at once": request().replace(b"Connection: close\r\n", b"") * 100,
    "expects to go on": request(b"Expect: 100-continue"),
    "expects nonsense": request(b"Expect: 200-maybe"),
    "leaves in the headers": request()[:70],
    "leaves in the body": request()[:-20],
}


def bodies_as_requests() -> dict[str, bytes]:
    """The table of bodies, sent as it is: no client library has looked at it before."""
    return {
        name: request(
            *(f"{key}: {value}".encode() for key, value in headers.items()), body=raw, length=b"%d" % len(raw)
        )
        for name, raw, headers in hostile_bodies(PATH)
        if "content-type" not in headers
    }


def mutate(choose: Choose) -> bytes:
    """A valid request with a few bytes changed, removed, doubled or added."""
    return garbled(request(b"x-request-id: 7"), choose, inserted=(b"\r\n", b"\n", b"\x00", b":", b" ", b"\xff"))


def inputs(url: str, table: Mapping[str, bytes], choose: Choose, count: int) -> Inputs:
    """What `table` has, then `count` mutated requests."""
    for name, raw in table.items():
        yield name, partial(exchange, url, raw)
    for number in range(count):
        yield f"mutated {number}", partial(exchange, url, mutate(choose))


def exchange(url: str, raw: bytes) -> Outcome:
    """Send the bytes, say that no more will come, and read to the end: the statuses, or that there was no answer."""
    address = urlsplit(url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 80), timeout=DEADLINE_S) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:
            # It has seen enough and closed, or reset: there may still be an answer.
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
        answer = _read(connection)
    statuses = [line.split(b" ")[1].decode() for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    if any(status.startswith("5") for status in statuses):
        raise FailureError(f"answered {statuses} to {raw[:80]!r}")
    return statuses[0] if statuses else "closed"


def _read(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionError:
        pass  # Closed with bytes unread on its side.
    return answer
