"""SGLang's refusals as OpenAI's errors.

SGLang answers flat: `{"object": "error", "message": …, "type": …, "param": …, "code": <status>}`; inside a stream the
same stands under "error". A body that does not validate is answered with the text of FastAPI's exception.
"""

from __future__ import annotations

import re

import msgspec

from serving.gateway.errors import UNAVAILABLE_RETRY_AFTER_S, ApiError, describe
from speculator.errors import EngineBusyError

ERROR_EVENT = b'data: {"error"'
"""How an error begins inside a stream. No answer's text can look like it: JSON escapes its quotes."""

_MAX_MESSAGE_CHARS = 1000
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_QUEUE_IS_FULL = ("The request queue is full.", "The request is aborted by a higher priority request.")
_VALIDATION = re.compile(r"""'type': '(\w+)', 'loc': \('body', '(\w+)'.*?\), 'msg': ('[^']*'|"[^"]*")""")
_TOO_MANY = re.compile(r"maximum context length of (\d+) tokens\..*: (\d+) tokens from the input messages and \d+ ")
_NOT_THE_CLIENTS = {401, 403, 405}
"""Said to whoever runs the gateway, since it is the gateway that asked."""


class _Said(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _Nested(msgspec.Struct):
    error: _Said


def refusal(status: int, content: bytes, *, retry_after: str | None = None) -> ApiError:
    """What the client is told where SGLang answered `status` with `content`."""
    try:
        said = msgspec.json.decode(content, type=_Said)
    except _NOT_JSON:
        said = _Said()
    return _translate(status, said, retry_after)


def refusal_in(block: bytes) -> ApiError | None:
    """The error that the first event of `block` is; None where it is an ordinary one."""
    if not block.startswith(ERROR_EVENT):
        return None
    data = block.partition(b"\n\n")[0].removeprefix(b"data: ")
    try:
        said = msgspec.json.decode(data, type=_Nested).error
    except _NOT_JSON:
        said = _Said()
    return _translate(said.code if isinstance(said.code, int) else 500, said, None)


def room_in(refused: ApiError) -> int | None:
    """How many completion tokens would have fitted, where SGLang refuses a request for asking for more; else None."""
    if not (found := _TOO_MANY.search(refused.message)):
        return None
    context_length, num_prompt_tokens = map(int, found.groups())
    return max(context_length - num_prompt_tokens, 0) or None


def _translate(status: int, said: _Said, retry_after: str | None) -> ApiError:
    wait_s = int(retry_after) if retry_after and retry_after.isdigit() else None
    if status == 429 or (status == 503 and said.message in _QUEUE_IS_FULL):
        return describe(EngineBusyError(said.message, retry_after_s=wait_s or 1))
    message = said.message[:_MAX_MESSAGE_CHARS]
    if status == 503:
        # An abort's message is one of SGLang's own sentences.
        message = message or "The engine cannot serve this request now: retry later."
        return ApiError(503, message, code="engine_unavailable", retry_after_s=wait_s or UNAVAILABLE_RETRY_AFTER_S)
    if not 400 <= status < 500 or status in _NOT_THE_CLIENTS:
        # SGLang puts the text of any exception there, with whatever it quotes.
        status = status if status > 500 else 500
        return ApiError(status, "The engine failed to handle the request.", code="engine_error")
    return _clients_fault(status, message or "The engine refuses the request.", said)


def _clients_fault(status: int, message: str, said: _Said) -> ApiError:
    if found := _VALIDATION.search(said.message):
        kind, param, reason = found.groups()
        code = "missing_required_parameter" if kind == "missing" else "invalid_value"
        return ApiError(status, f"{param}: {reason[1:-1]}", code=code, param=param)
    if "context length" in message:
        return ApiError(status, message, code="context_length_exceeded", param=said.param)
    code = {404: "not_found", 413: "body_too_large"}.get(status, "invalid_value")
    return ApiError(status, message, code=code, param=said.param)
