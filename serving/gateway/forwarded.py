"""Request bodies that are forwarded to SGLang: which fields the gateway reads, and which it adds.

The gateway's metadata (serving/request_metadata.py) travels in a header, and in fields that SGLang passes to its
scheduler: `rid`, `cache_salt`, and the capture policy in `custom_params["slipstream"]`, where the plugin reads it.
SGLang's endpoints differ in which of these fields they have; the header goes to all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, model_validator

from serving.engine import CapturePolicy, EngineInfo
from serving.gateway.acceptance import ASK
from serving.gateway.body import Strict, invalid
from serving.gateway.openai.routes import CHAT
from serving.gateway.openai.schema import INT32_MAX, Count, GroupCapture, Stop
from serving.request_metadata import POLICY_KEY, RequestMetadata
from speculator.errors import RequestError
from speculator.tracing import outgoing_headers

_DEFAULT_OF_COMPLETIONS = 16
"""SGLang's default for `max_tokens` of a completion, as OpenAI's; a chat's is the rest of the context."""
_NOT_FOR_CLIENTS = frozenset(
    ("custom_logit_processor", "stop_regex", "ebnf", "bootstrap_host", "bootstrap_port", "bootstrap_room", "extra_key")
)
"""Refused fields: code to run, a pattern that can block SGLang's process for ever, a grammar that can end it since it
allows no token (`root ::= root`), a machine to connect to, and a part of the cache key."""
_NOT_FOR_TEMPLATES = frozenset(
    {
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "self",
    }
)
"""What SGLang itself gives `apply_chat_template`, or what changes what that returns. A template of the client's may
block SGLang's process for ever."""
_MAX_ITEMS = 10_000
"""Of the lists of a field, without token ids. For each bad item SGLang's validation makes up to thirty errors, and a
text of all, during which its process does nothing else: an `input` of 50,000 numbers crashed it."""
_NOT_VALIDATED = frozenset(("schema", "parameters", "input_schema"))
"""Objects whose lists may be long: SGLang takes any."""
_MAX_SALT_CHARS = 256
_NULL, _NO_LIMIT = msgspec.Raw(b"null"), msgspec.Raw(b"-1")
_ZEROS = (msgspec.Raw(b"0"), msgspec.Raw(b"0.0"))
_SCALARS = (type(None), bool, int, float, str)


def _num_items(value: object, *, may_be_ids: bool) -> int:
    """How many items the lists of a field have in all, at any depth, without token ids; or entries its object has."""
    count, rest = len(value) if isinstance(value, dict) else 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            count += sum(type(item) is not int for item in one) if may_be_ids else len(one)
            rest += (item for item in one if isinstance(item, list | dict))
        elif isinstance(one, dict):
            rest += (item for name, item in one.items() if name not in _NOT_VALIDATED)
    return count


def _custom_params(value: object) -> dict[str, Any]:
    """Refuse deeply nested values, whose decoding would end SGLang's scheduler, and numbers that it cannot encode."""
    if not isinstance(value, dict):
        raise invalid("custom_params_type", "must be an object")
    if POLICY_KEY in value:
        raise invalid("unknown_parameter", "this key is the server's own; use the field 'slipstream'", POLICY_KEY)
    for name, each in value.items():
        values = each.values() if isinstance(each, dict) else each if isinstance(each, list) else [each]
        if not all(type(value) in _SCALARS for value in values):
            raise invalid("custom_params_value", "must be a scalar, or a list or object of scalars", name)
        if not all(-(2**63) <= value < 2**64 for value in values if type(value) is int):
            raise invalid("custom_params_value", "whole numbers must fit into 64 bits", name)
    return value


def _template_values(value: object) -> object:
    """Refuse values that are none of the chat template's own."""
    if isinstance(value, dict) and (refused := sorted(_NOT_FOR_TEMPLATES & value.keys())):
        raise invalid("unsupported_parameter", "no client may use this here; leave it out", refused[0])
    return value


def _response_format(value: object) -> object:
    """Refuse what is no object, and a structural tag that holds a grammar, which may be as bad as `ebnf`."""
    if value is not None and not isinstance(value, dict):
        raise invalid("response_format_type", "must be an object")
    rest: list[Any] = [value] if isinstance(value, dict) and value.get("type") == "structural_tag" else []
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            if one.get("type") == "grammar":
                raise invalid("unsupported_parameter", "no client may use a grammar here; use a regex or a JSON schema")
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return value


TemplateValues = Annotated[Any, PlainValidator(_template_values, json_schema_input_type=dict[str, Any])]
ResponseFormat = Annotated[Any, PlainValidator(_response_format, json_schema_input_type=dict[str, Any])]
CustomParams = Annotated[dict[str, Any], PlainValidator(_custom_params, json_schema_input_type=dict[str, Any])]


class ForwardedBody(Strict):
    """The fields that the gateway reads; SGLang accepts or refuses the others."""

    model_config = ConfigDict(extra="ignore")
    limit_field: ClassVar[str] = "max_tokens"
    """The field into which the gateway writes its limit on completion tokens."""
    id_fields: ClassVar[Collection[str]] = ("prompt", "input", "input_ids", "tokens", "stop_token_ids")
    """Fields that may be lists of token ids."""

    model: str
    stream: bool = False
    cache_salt: Annotated[str, Field(max_length=_MAX_SALT_CHARS)] | None = None
    """Separates prefix caches within the tenant."""
    chat_template_kwargs: TemplateValues = None
    slipstream: GroupCapture = GroupCapture()

    @model_validator(mode="before")
    @classmethod
    def _check_lists(cls, fields: object) -> object:
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if _num_items(value, may_be_ids=name in cls.id_fields) > _MAX_ITEMS:
                raise invalid("too_many_items", f"may have at most {_MAX_ITEMS} items, token ids not counted", name)
        return fields

    @property
    def num_samples(self) -> int:
        return 1

    @property
    def has_usage(self) -> bool:
        """Whether the answer has a usage anyway, without the gateway asking SGLang for it."""
        return True

    @property
    def keeps_details(self) -> bool:
        """Whether the client asked for SGLang's own report of the proposals."""
        return False

    @property
    def completion_tokens(self) -> int | None:
        """The largest limit that the request names, whichever field SGLang uses; None where it names none."""
        return None

    def warning(self, *, heeds_seed: bool) -> str | None:
        """A warning for the client if a field of the request has no effect."""
        return None

    def limit_to_add(self, limit: int, route: str, info: EngineInfo) -> int | None:
        """The operator's limit on completion tokens, if the request has none and SGLang's default may exceed it."""
        return None

    def marked(self, marks: RequestMetadata) -> dict[str, Any]:
        """The fields that carry the gateway's metadata in this endpoint's body."""
        return {}


class SampledBody(ForwardedBody):
    """Body of chats and completions."""

    # llama.cpp's value for none.
    neutral = dict.fromkeys(("max_tokens", "max_completion_tokens"), (-1,))

    n: Count = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop = ()
    prompt: Any = None
    seed: Any = None
    temperature: Any = None
    stream_options: Any = None
    return_spec_tokens_details: Any = None
    response_format: ResponseFormat = None
    custom_params: CustomParams = Field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """A list of token ids is one prompt; of any other list each item is a prompt. SGLang validates them."""
        is_list = isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int
        return (len(self.prompt) if is_list else 1) * self.n

    @property
    def has_usage(self) -> bool:
        options = self.stream_options
        return not self.stream or (isinstance(options, dict) and options.get("include_usage") is True)

    @property
    def keeps_details(self) -> bool:
        return self.return_spec_tokens_details is True

    @property
    def completion_tokens(self) -> int | None:
        return max(self.max_tokens or 0, self.max_completion_tokens or 0) or None

    def warning(self, *, heeds_seed: bool) -> str | None:
        """No warning at temperature 0, where a seed has no effect anyway."""
        if self.seed is None or self.temperature == 0:
            return None
        if not heeds_seed:
            return "seed has no effect: SGLang heeds it only where it was started with --enable-deterministic-inference"
        if self.n > 1:
            return "n has no effect beside seed: SGLang gives all samples of a seed the same text; send a seed for each"
        return None

    def limit_to_add(self, limit: int, route: str, info: EngineInfo) -> int | None:
        if route == CHAT:
            is_named, default = self.completion_tokens is not None, info.context_length
        else:
            # For completions SGLang reads only `max_tokens`.
            is_named, default = self.max_tokens is not None, _DEFAULT_OF_COMPLETIONS
        return limit if limit < default and not is_named else None

    def marked(self, marks: RequestMetadata) -> dict[str, Any]:
        params = {**self.custom_params, POLICY_KEY: marks.policy}
        added: dict[str, Any] = {"custom_params": params, "rid": marks.rid, "cache_salt": marks.cache_salt}
        if self.has_usage:
            # SGLang reports acceptance beside the usage.
            added[ASK] = True
        elif isinstance(self.stream_options, dict | None):
            added["stream_options"] = {**(self.stream_options or {}), "include_usage": True}
        return added


def _refuse_stored_answers(value: object) -> None:
    raise invalid("unsupported_parameter", "no answers are kept here: send the whole conversation as 'input'")


def _refuse_store(value: object) -> None:
    # SGLang would give a stored answer to any tenant that names its id.
    if value is not False:
        raise invalid("unsupported_parameter", "no answers are kept here: send 'store': false, or leave it out")


Absent = Annotated[None, PlainValidator(_refuse_stored_answers, json_schema_input_type=None)]


class ResponsesBody(ForwardedBody):
    limit_field = "max_output_tokens"
    id_fields = ()

    max_output_tokens: Count | None = None
    store: Annotated[None, PlainValidator(_refuse_store, json_schema_input_type=bool)] = None
    previous_response_id: Absent = None
    conversation: Absent = None

    @property
    def completion_tokens(self) -> int | None:
        return self.max_output_tokens

    def limit_to_add(self, limit: int, route: str, info: EngineInfo) -> int | None:
        return limit if limit < info.context_length and self.max_output_tokens is None else None

    def marked(self, marks: RequestMetadata) -> dict[str, Any]:
        return {"request_id": f"resp_{marks.rid}", "cache_salt": marks.cache_salt, "store": False}


class MessagesBody(ForwardedBody):
    """Body of Anthropic's endpoint, which requires a limit; the gateway's metadata is in the header alone."""

    max_tokens: Count | None = None

    @property
    def completion_tokens(self) -> int | None:
        return self.max_tokens


def _tokens(value: object) -> object:
    """Refuse numbers that are no token's: SGLang answers them with an error of its own."""
    for index, one in enumerate(value if isinstance(value, list) else ()):
        ids = one if isinstance(one, list) else [one]
        if any(isinstance(token, int) and not 0 <= token <= INT32_MAX for token in ids):
            raise invalid("token_range", f"must be between 0 and {INT32_MAX}", index)
    return value


class TextBody(ForwardedBody):
    """Body of the endpoints that tokenize and detokenize."""

    model: str | None = None  # type: ignore[assignment]
    tokens: Annotated[Any, PlainValidator(_tokens, json_schema_input_type=list[Any])] = None


def metadata_of(
    body: ForwardedBody, *, request_id: str, policy: CapturePolicy, meant: Mapping[str, str | int]
) -> RequestMetadata:
    """The metadata of a request; `meant` names the target that must answer."""
    # No tenant's name has a slash, so a client's salt cannot reach another tenant's cache.
    salt = f"{policy.tenant}/{body.cache_salt}" if body.cache_salt else policy.tenant
    return RequestMetadata(rid=request_id, cache_salt=salt, policy={**asdict(policy), **meant, **outgoing_headers()})


def rewrite(raw: bytes, body: ForwardedBody, marks: RequestMetadata, *, max_tokens: int | None) -> bytes:
    """The body to forward, with `max_tokens` if it is given; the client's own values keep their bytes.

    Raises RequestError for invalid JSON and for a field that no client may use.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        # Valid for the first parser, refused by this one: not JSON, such as NaN.
        raise RequestError(f"Invalid JSON: {error}", code="invalid_json") from None
    # A null counts as absent here, and so does a limit of -1; SGLang refuses some nulls, and that limit.
    fields = {
        name: value
        for name, value in fields.items()
        if value != _NULL and not (value == _NO_LIMIT and name in body.neutral)
    }
    if refused := sorted(_NOT_FOR_CLIENTS & fields.keys()):
        message = f"{refused[0]}: no client may use this here; leave it out"
        raise RequestError(message, param=refused[0], code="unsupported_parameter")
    fields.pop("slipstream", None)
    added = body.marked(marks)
    if max_tokens is not None:
        added[body.limit_field] = max_tokens
    if fields.get("top_p") in _ZEROS:
        # OpenAI takes 0, which leaves the likeliest token alone; SGLang refuses it.
        added |= {"top_p": 1, "top_k": 1}
    return msgspec.json.encode({**fields, **added})
