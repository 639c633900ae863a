"""The bodies that clients send, strictly typed: a number is never a string, a boolean never a number.

OpenAI fields that this server cannot honour are refused rather than ignored, unless they carry the value that asks
for nothing (`tools: []`, `frequency_penalty: 0`), which clients and frameworks send by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from serving.engine import CapturePolicy

MAX_STOP = 4
MAX_STOP_CHARS = 1000
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

Neutral = Mapping[str, tuple[object, ...]]
"""Unsupported fields and the values, beside null, that ask for nothing."""

UNSUPPORTED: Neutral = {
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

UNSUPPORTED_IN_CHAT: Neutral = {
    **UNSUPPORTED,
    "audio": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}

UNSUPPORTED_IN_COMPLETIONS: Neutral = {**UNSUPPORTED, "echo": (False,), "logprobs": (), "suffix": ()}

UNSUPPORTED_IN_MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def invalid(kind: str, message: str, *within: str | int) -> PydanticCustomError:
    """A validation error located `within` the value being validated."""
    # The message goes in as a value, so that braces in a client's field name stay braces.
    return PydanticCustomError(kind, "{message}", {"message": message, "within": within})


def _refuse_extras(extras: dict[str, Any] | None, unsupported: Neutral) -> None:
    for name, value in (extras or {}).items():
        if name not in unsupported:
            raise invalid("unknown_parameter", "this server knows no such parameter; leave it out", name)
        # `False == 0` in Python, and `logprobs: 0` is a request where `logprobs: false` is none.
        neutral = value is None or any(type(value) is type(each) and value == each for each in unsupported[name])
        if not neutral:
            raise invalid("unsupported_parameter", "this server cannot honour this parameter; leave it out", name)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = () if value is None else value if isinstance(value, list) else [value]
    for index, string in enumerate(strings):
        where = (index,) if isinstance(value, list) else ()
        if not isinstance(string, str):
            raise invalid("stop_type", "must be a string or a list of strings", *where)
        if not string:
            raise invalid("stop_empty", "a stop string must not be empty", *where)
        if len(string) > MAX_STOP_CHARS:
            raise invalid("stop_length", f"a stop string has at most {MAX_STOP_CHARS} characters", *where)
    if len(strings) > MAX_STOP:
        raise invalid("stop_count", f"at most {MAX_STOP} stop strings")
    return tuple(strings)


def _content(value: object) -> str:
    """The text of a message; the parts of a list are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid("content_type", "must be a string or a non-empty list of text parts")
    return "".join(_part_text(part, index) for index, part in enumerate(value))


def _part_text(part: object, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid("content_type", 'must be an object like {"type": "text", "text": "..."}', index)
    if part["type"] != "text":
        raise invalid("unsupported_parameter", "only parts of type 'text' are supported", index, "type")
    if not isinstance(part.get("text"), str):
        raise invalid("content_type", "must be a string", index, "text")
    if unknown := sorted(part.keys() - {"type", "text"}):
        raise invalid("unknown_parameter", "this server knows no such parameter; leave it out", index, unknown[0])
    text: str = part["text"]
    return text


Prompt = str | tuple[int, ...]


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt (a string or token ids) or a list of them, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise invalid("prompt_type", "must be a string, token ids, or a non-empty list of either")
    if type(value[0]) is int:
        return (_token_ids(value),)
    return tuple(prompt_of(each, index) for index, each in enumerate(value))


def prompt_of(value: object, *within: int) -> Prompt:
    """A string or token ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("prompt_type", "must be a string or a list of token ids", *within)
    return _token_ids(value, *within)


def _token_ids(values: list[object], *within: int) -> tuple[int, ...]:
    for index, value in enumerate(values):
        if type(value) is not int:
            raise invalid("token_type", "must be a token id: a whole number", *within, index)
        if not 0 <= value <= INT32_MAX:
            raise invalid("token_range", f"must be between 0 and {INT32_MAX}", *within, index)
    return tuple(values)  # type: ignore[arg-type]


_STRINGS_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1}
TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_STRINGS_SCHEMA, "maxItems": MAX_STOP}, {"type": "null"}]}),
]
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "minItems": 1}]}),
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _STRINGS_SCHEMA, TOKENS_SCHEMA, {"type": "array", "items": TOKENS_SCHEMA}]}
    ),
]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class _Open(Strict):
    """Keeps fields that it does not declare, to tell an unsupported one from an unknown one."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """As vLLM has it: with `include_usage`, each event says what was used so far, and not only the last one."""
    include_obfuscation: bool = False
    """OpenAI's random padding of events; accepted so that clients may turn it off, and it is never added."""


class Capture(Strict):
    """The `slipstream` object: how this request may be used for training."""

    capture: bool = True
    group_id: str = Field(default="", max_length=256)
    domain: str = Field(default="", max_length=64)

    def policy(self, *, tenant: str, may_capture: bool) -> CapturePolicy:
        """The key says whose request it is, and its no to capture stands."""
        return CapturePolicy(
            capture=self.capture and may_capture, tenant=tenant, group_id=self.group_id, domain=self.domain
        )


class Extension(Capture):
    """The same where the gateway makes the stream's events itself."""

    tokens: bool = False
    """Have each event of a stream say where its tokens come from."""


class Message(_Open):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="after")
    def _refuse_extras(self) -> Self:
        _refuse_extras(self.model_extra, UNSUPPORTED_IN_MESSAGE)
        return self

    def for_template(self) -> dict[str, str]:
        # OpenAI renamed "system" to "developer"; chat templates know the old name.
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class GenerationBody(_Open):
    """What both generating endpoints accept."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    n: Count | None = None
    stop: Stop = ()
    seed: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    ignore_eos: bool | None = None
    """As vLLM and SGLang have it: go on after the end of the text, up to the limit. Load generators ask for it."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    slipstream: Extension = Extension()

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed where 'stream' is true", "stream_options")
        if self.slipstream.tokens and not self.stream:
            raise invalid("tokens", "only allowed where 'stream' is true", "slipstream", "tokens")
        return self

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_usage_on(self) -> bool:
        """Whether each event of the stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        _refuse_extras(self.model_extra, UNSUPPORTED_IN_CHAT)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            message = "give either 'max_completion_tokens' or its old name 'max_tokens', not both"
            raise invalid("max_tokens", message, "max_tokens")
        return self


class CompletionBody(GenerationBody):
    prompt: Prompts
    best_of: Count | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        _refuse_extras(self.model_extra, UNSUPPORTED_IN_COMPLETIONS)
        if self.best_of is not None and self.best_of != self.num_samples:
            raise invalid("unsupported_parameter", "only supported where it equals 'n'; leave it out", "best_of")
        return self


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI `requestBody` of `model`, its references resolved."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolved(value) for key, value in node.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolved(schema)}}}}
