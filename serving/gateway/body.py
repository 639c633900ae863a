"""Read a request's body: bounded, JSON only, strictly typed.

`Strict` is the base of every body: a null counts as absent, and a field that this server does not support is accepted
if its value changes nothing about the answer. A body that is read with `Ignored` may also have unknown fields, and
some unsupported ones that would change probabilities or details of the answer. They are left out, and noted.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import EllipsisType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import Request
from starlette.types import Receive

from serving.gateway.errors import ApiError
from speculator.errors import RequestError

T = TypeVar("T", bound=BaseModel)

UNKNOWN = "this server knows no such parameter; leave it out"
CANNOT = "this server cannot honour this parameter; leave it out"
Neutral = Mapping[str, tuple[object, ...] | EllipsisType]
"""Fields with the values that change nothing; `...`: all values. A body that declares such a field supports others."""
Ignored = set[str]
"""Collects names of ignored fields of a body; in its place None: such fields are refused."""
_NULL = {"type": "null"}
_MAY_IGNORE = "x-may-ignore"
_DISCARD_FACTOR = 4
"""A body up to so many times the limit is read and dropped: closing early can reset the connection before the client
reads the 413."""
_DISCARD_S = 1.0
_DISCARD_BYTES = 4 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
"""Field names that the log may show: any other may be a user's text."""
_CODES = {
    "json_invalid": "invalid_json",
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}
_MAX_PARAM_CHARS = 100
"""An error quotes at most so much of a client's field name."""


async def read_body(request: Request, model: type[T], *, max_bytes: int, ignored: Ignored | None = None) -> T:
    """The body as a `model`; raises ApiError (408, 413, 415) or RequestError (400) naming the field at fault.

    With `ignored` the body may have unsupported fields: their names are added there.
    """
    return parse(model, await read_json(request, max_bytes=max_bytes), ignored)


async def read_json(request: Request, *, max_bytes: int, limit_s: float = 60) -> bytes:
    """The body of a request whose content type is JSON, without byte order mark; raises ApiError (408, 413, 415)."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Also a protection: a browser lets a foreign page send JSON to a loopback server only after a preflight.
        message = "The body must be JSON: send the header 'content-type: application/json'."
        raise ApiError(415, message, code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415, "The body is compressed, which is not supported: send it uncompressed.", code="unsupported_media_type"
        )
    body, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= max_bytes:
                    body += part
                elif num_bytes > _DISCARD_FACTOR * max_bytes:
                    break
    except TimeoutError:
        # A slow body counts against its key's limit, so its time is bounded.
        raise ApiError(408, f"The body took longer than {limit_s:g} s to arrive.", code="body_too_slow") from None
    if num_bytes > max_bytes:
        message = f"The body is larger than {max_bytes} bytes: shorten the prompt or send fewer prompts at once."
        raise ApiError(413, message, code="body_too_large")
    # Windows tools begin UTF-8 with this mark, which parsers may ignore.
    return bytes(body).removeprefix(codecs.BOM_UTF8)


async def discard_body(receive: Receive) -> None:
    """Read and drop the body of a refused request for a moment, so that the client gets to read the refusal."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes < _DISCARD_BYTES:
                message = await receive()
                if not message.get("more_body"):
                    return
                num_bytes += len(message["body"])


def parse(model: type[T], raw: bytes, ignored: Ignored | None = None) -> T:
    """`raw` as a `model`; raises RequestError for the first thing that is wrong with it."""
    try:
        return model.model_validate_json(raw, context=ignored)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
    param, kind = _param(first)[:_MAX_PARAM_CHARS], first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    message = UNKNOWN if kind == "extra_forbidden" else first["msg"]
    raise RequestError(f"{param}: {message}" if param else message, param=param or None, code=code)


def _param(details: ErrorDetails) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    parts = (*details["loc"], *details.get("ctx", {}).get("within", ()))
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def invalid(kind: str, message: str, *within: str | int) -> PydanticCustomError:
    """A validation error located `within` the value being validated."""
    # The message goes in as a value, so that braces in a client's field name stay braces.
    return PydanticCustomError(kind, "{message}", {"message": message, "within": within})


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def changes_nothing(value: object, neutral: tuple[object, ...] | EllipsisType) -> bool:
    if neutral is ...:
        return True
    plain = without_nulls(value) if isinstance(value, dict) else value
    # `False == 0` in Python, and `logprobs: 0` is a request where `logprobs: false` is none.
    return any(plain == each and isinstance(plain, bool) == isinstance(each, bool) for each in neutral)


def requested_fields(
    model: type[Strict], fields: Mapping[str, Any], ignored: Ignored | None, *within: int
) -> dict[str, Any]:
    """The fields of a body that this server acts on. Raises for an unsupported field whose value would change the
    answer, unless it may be ignored.
    """
    asked = without_nulls(fields)
    acted_on = _supported_fields(model)
    for name in list(asked):
        is_known = name in model.neutral
        if is_known and changes_nothing(asked[name], model.neutral[name]):
            del asked[name]
        elif name in acted_on:
            continue
        elif ignored is not None and (name in model.ignorable if is_known else model.ignores_unknown):
            ignored.add(f"{model.place}{name if _NAME.fullmatch(name) else '?'}")
            del asked[name]
        elif is_known:
            raise invalid("unsupported_parameter", CANNOT, *within, name)
    return asked


@functools.cache
def _supported_fields(model: type[Strict]) -> frozenset[str]:
    """The field names of a model, by alias."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add to a model's schema what `Strict` accepts beyond the fields: nulls, and fields that change nothing."""
    assert issubclass(model, Strict)
    properties = schema.setdefault("properties", {})
    for name in properties.keys() - set(schema.get("required", ())):
        if _NULL not in properties[name].get("anyOf", ()):
            properties[name] = {"anyOf": [properties[name], _NULL]}
    for name, values in model.neutral.items():
        taken = {} if values is ... else {"enum": [*values, None]}
        properties[name] = {"anyOf": [properties[name], taken]} if name in properties else taken
    if model.model_config.get("extra") == "ignore":
        schema["additionalProperties"] = True
    if model.ignores_unknown:
        schema[_MAY_IGNORE] = sorted(model.ignorable)


class Strict(BaseModel):
    """Base of bodies: a field that is null, or whose value changes nothing, counts as absent."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_describe
    )
    neutral: ClassVar[Neutral] = {}
    ignores_unknown: ClassVar[bool] = False
    """Whether a body that is read with `Ignored` may have unknown fields."""
    ignorable: ClassVar[Collection[str]] = ()
    """Unsupported fields that such a body may have with any value."""
    place: ClassVar[str] = ""
    """Prefix of its field names in the log: its path in the body."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, fields: object, info: ValidationInfo) -> object:
        return requested_fields(cls, fields, info.context) if isinstance(fields, dict) else fields


def request_body(model: type[BaseModel], *, served: str = "", is_strict: bool = True) -> dict[str, Any]:
    """The OpenAPI `requestBody` of `model`, its references resolved; `served` is the only value of its field `model`.
    Unless `is_strict`, the body may have fields that are ignored.
    """
    schema = dict(_schema_of(model))
    definitions = schema.pop("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        node = {key: resolved(value) for key, value in node.items()}
        if (ignorable := node.pop(_MAY_IGNORE, None)) is not None and not is_strict:
            node["additionalProperties"] = True
            node["properties"] |= {name: {} for name in ignorable}
        return node

    described = resolved(schema)
    if served:
        described["properties"]["model"]["enum"] = [served]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


@functools.cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Pydantic takes milliseconds to make one."""
    return model.model_json_schema()
