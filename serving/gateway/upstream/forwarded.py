"""The body of a request that goes on to SGLang: checked as far as the gateway must know, everything else untouched.

What the gateway adds (serving/request_metadata.py) travels in fields that SGLang hands through to its scheduler: `rid`,
`cache_salt`, and in `custom_params["slipstream"]`, where the plugin reads it, the policy.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from serving.engine import CapturePolicy
from serving.gateway.openai.schema import MAX_STOP, MAX_STOP_CHARS, Capture, Count, Strict, invalid
from serving.request_metadata import POLICY_KEY, TARGET_KEY, Marks
from speculator.errors import RequestError
from speculator.tracing import outgoing_headers

_NOT_FOR_CLIENTS = frozenset(
    ("custom_logit_processor", "stop_regex", "bootstrap_host", "bootstrap_port", "bootstrap_room", "extra_key")
)
"""Code to run, a pattern that can keep SGLang's process busy for ever, a machine to connect to, and what SGLang makes
the names of its adapters' caches of."""
_MAX_SALT_CHARS = 256
_NULL = msgspec.Raw(b"null")

_SCALARS = (type(None), bool, int, float, str)


def _is_flat(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(type(each) in _SCALARS for each in values)


def _custom_params(value: object) -> dict[str, Any]:
    """SGLang's scheduler decodes these by type, and a value that is nested deeper ends its process, not the request."""
    if not isinstance(value, dict):
        raise invalid("custom_params_type", "must be an object")
    if POLICY_KEY in value:
        raise invalid("unknown_parameter", "this key is the server's own; use the field 'slipstream'", POLICY_KEY)
    for name, each in value.items():
        if not _is_flat(each):
            raise invalid("custom_params_value", "must be a scalar, or a list or object of scalars", name)
    return value


def _stop(value: object) -> object:
    """Bounded in number and length; what else it may be is SGLang's to judge."""
    strings = value if isinstance(value, list) else [value]
    if len(strings) > MAX_STOP:
        raise invalid("stop_count", f"at most {MAX_STOP} stop strings")
    for string in strings:
        if isinstance(string, str) and len(string) > MAX_STOP_CHARS:
            raise invalid("stop_length", f"a stop string has at most {MAX_STOP_CHARS} characters")
    return value


class ForwardedBody(Strict):
    """What the gateway looks at; fields that are not here are SGLang's to accept or refuse."""

    model_config = ConfigDict(extra="ignore")

    model: str
    n: Count = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Annotated[Any, PlainValidator(_stop), WithJsonSchema({})] = None
    stream: bool = False
    prompt: Any = None
    seed: Any = None
    temperature: Any = None
    cache_salt: Annotated[str, Field(max_length=_MAX_SALT_CHARS)] | None = None
    """Parts the prefix cache within the tenant."""
    custom_params: Annotated[dict[str, Any], PlainValidator(_custom_params), WithJsonSchema({"type": "object"})] = (
        Field(default_factory=dict)
    )
    slipstream: Capture = Capture()

    @property
    def needs_seed(self) -> bool:
        """Whether a seed is asked to decide the text; at temperature 0 nothing is drawn."""
        return self.seed is not None and self.temperature != 0

    @property
    def num_samples(self) -> int:
        """Token ids are one prompt; whatever else is in a list is a prompt each. Judging them is SGLang's."""
        is_list = isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int
        return (len(self.prompt) if is_list else 1) * self.n

    @property
    def completion_tokens(self) -> int | None:
        """The most that the request may be asking for, whichever field SGLang goes by; None where it names no limit."""
        return max(self.max_tokens or 0, self.max_completion_tokens or 0) or None


def marks_of(body: ForwardedBody, *, request_id: str, policy: CapturePolicy, target: str) -> Marks:
    # No tenant's name has a slash: whatever a client writes behind it stays within the tenant.
    salt = f"{policy.tenant}/{body.cache_salt}" if body.cache_salt else policy.tenant
    policy_fields = {**asdict(policy), **({TARGET_KEY: target} if target else {}), **outgoing_headers()}
    return Marks(rid=request_id, cache_salt=salt, policy=policy_fields)


def rewrite(raw: bytes, body: ForwardedBody, marks: Marks, *, max_tokens: int | None) -> bytes:
    """The body to send on, with `max_tokens` where there is one; values that are not the gateway's keep their bytes.

    Raises RequestError for invalid JSON and for a field that no client may use.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        # The two parsers differ only on what is not JSON: NaN, for one.
        raise RequestError(f"Invalid JSON: {error}", code="invalid_json") from None
    # A null asks for nothing, and SGLang refuses some of them.
    fields = {name: value for name, value in fields.items() if value != _NULL}
    if refused := sorted(_NOT_FOR_CLIENTS & fields.keys()):
        message = f"{refused[0]}: no client may use this here; leave it out"
        raise RequestError(message, param=refused[0], code="unsupported_parameter")
    fields.pop("slipstream", None)
    params = {**body.custom_params, POLICY_KEY: marks.policy}
    added: dict[str, Any] = {"custom_params": params, "rid": marks.rid, "cache_salt": marks.cache_salt}
    if max_tokens is not None:
        added["max_tokens"] = max_tokens
    return msgspec.json.encode({**fields, **added})
