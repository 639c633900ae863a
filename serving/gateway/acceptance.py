"""Rewrite SGLang's answers: read the usage, and add acceptance as `metrics.speculative_decoding`
(serving/acceptance.py).

SGLang reports acceptance in a field of its own, if a request asks for it; in a stream in a separate event, which
clients do not expect, before the one with the usage. Its number of proposed tokens is right only because the plugin
counts them: SGLang alone assumes that every verification proposed the most that it could.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from serving.acceptance import Acceptance

ASK = "return_spec_tokens_details"
"""The request field that asks SGLang for that report."""
_DETAILS = "spec_tokens_details"
_MARK = b'"spec_tokens_details"'
"""Marks the report in raw JSON. No answer's text can contain it: JSON escapes its quotes."""
_USED = re.compile(rb'"usage":\s*\{')
_NULL, _NO_CHOICES = msgspec.Raw(b"null"), msgspec.Raw(b"[]")
_EVENT, _END = b"data: ", b"\n\n"


class _Details(msgspec.Struct):
    spec_verify_ct: int = 0
    spec_cap_length: float = 0.0
    """Mean number of tokens that a verification proposed."""
    spec_correct_drafts_histogram: list[int] = []


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    """Prompt tokens at /v1/responses and /v1/messages; the latter leaves out tokens of a cached prefix."""
    cache_read_input_tokens: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or self.input_tokens + self.cache_read_input_tokens
        self.completion_tokens = self.completion_tokens or self.output_tokens


class _Named(msgspec.Struct):
    """An event of /v1/responses or /v1/messages, or the object inside it."""

    usage: Usage | None = None
    response: _Named | None = None
    message: _Named | None = None


class AcceptanceRewriter:
    """Rewrites one answer, whole or streamed. Content of an unexpected form passes unchanged."""

    def __init__(self, *, keep: bool, hide_usage: bool) -> None:
        """`keep`: the client asked for SGLang's own field, too. `hide_usage`: it did not ask for a stream's usage."""
        self._keep, self._hide_usage = keep, hide_usage
        self._found: Acceptance | None = None
        self.usage: Usage | None = None
        """Tokens of prompt and answer; None until SGLang has reported them."""

    def whole(self, content: bytes) -> bytes:
        self.usage = _usage_of(_decoded(content) or {})
        if _MARK not in content:
            return content
        fields = self._read_report(content)
        return content if fields is None else msgspec.json.encode(self._with_acceptance(fields))

    def events(self, block: bytes) -> bytes:
        """Rewrite a block of whole events."""
        if self._found is None and _MARK not in block and not _USED.search(block):
            return block
        return b"".join(map(self._event, block.split(_END)[:-1]))

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(_EVENT + b"{"):
            self._note_usage(event.partition(_EVENT)[2])
            return event + _END
        if _MARK in event:
            fields = self._read_report(event.removeprefix(_EVENT))
            if fields is None or "sglext" in fields:
                return event + _END
            return b""
        fields = _decoded(event.removeprefix(_EVENT))
        if fields is None or (usage := _usage_of(fields)) is None:
            return event + _END
        self.usage = usage
        if self._hide_usage and fields.get("choices") == _NO_CHOICES:
            return b""
        if self._found is None:
            return event + _END
        return _EVENT + msgspec.json.encode(self._with_acceptance(fields)) + _END

    def _note_usage(self, content: bytes) -> None:
        """Merge usage events: /v1/messages reports prompt tokens in one event and answer tokens in another."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            named = msgspec.json.decode(content, type=_Named)
            if (usage := (named.response or named.message or named).usage) is not None:
                before = self.usage or Usage()
                self.usage = Usage(
                    prompt_tokens=max(before.prompt_tokens, usage.prompt_tokens),
                    completion_tokens=max(before.completion_tokens, usage.completion_tokens),
                )

    def _read_report(self, content: bytes) -> dict[str, Any] | None:
        """Read SGLang's report. Returns the fields, without it unless the client wants it; None if there is none."""
        fields = _decoded(content)
        said = None if fields is None else _decoded(bytes(fields.get("sglext", _NULL)))
        if fields is None or said is None or (note := said.get(_DETAILS)) is None:
            return None
        try:
            details = msgspec.json.decode(note, type=list[_Details] | _Details | None)
        except msgspec.MsgspecError:
            return None
        if details is not None:
            self._found = Acceptance.over(map(_acceptance_of, details if isinstance(details, list) else [details]))
        if not self._keep:
            rest = {name: value for name, value in said.items() if name != _DETAILS and value != _NULL}
            fields = {**fields, "sglext": msgspec.Raw(msgspec.json.encode(rest))} if rest else _without(fields)
        return fields

    def _with_acceptance(self, fields: dict[str, Any]) -> dict[str, Any]:
        if self._found is None:
            return fields
        usage = _decoded(bytes(fields.get("usage", _NULL)))
        if usage is not None:
            details = _decoded(bytes(usage.get("completion_tokens_details", _NULL))) or {}
            usage = {**usage, "completion_tokens_details": {**self._found.usage_details(), **details}}
            fields = {**fields, "usage": usage}
        return {**fields, "metrics": self._found.metrics()}


def _without(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "sglext"}


def _usage_of(fields: Mapping[str, Any]) -> Usage | None:
    try:
        return msgspec.json.decode(fields.get("usage", _NULL), type=Usage | None)
    except msgspec.MsgspecError:
        return None


def _acceptance_of(details: _Details) -> Acceptance:
    acceptance = Acceptance(num_proposed=round(details.spec_cap_length * details.spec_verify_ct))
    for num_accepted, count in enumerate(details.spec_correct_drafts_histogram):
        acceptance.add(0, num_accepted, count)
    return acceptance


def _decoded(content: bytes) -> dict[str, Any] | None:
    """The fields of a JSON object, each as raw JSON; None for anything else."""
    try:
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw] | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
