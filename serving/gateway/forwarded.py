"""The body of a request that goes on to SGLang: checked as far as the gateway must know, everything else untouched.

What the gateway adds travels in fields that SGLang hands through to its scheduler: `rid`, and the capture policy in
`custom_params["slipstream"]`, where the plugin reads it. No client can write there.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from serving.gateway.schema import Capture, Count, Strict, invalid
from speculator.errors import RequestError

POLICY_KEY = "slipstream"

_SCALARS = (type(None), bool, int, float, str)


def _is_flat(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return all(type(each) in _SCALARS for each in values)


def _custom_params(value: object) -> dict[str, Any]:
    """SGLang's scheduler decodes these by type, and a value that is nested deeper ends its process, not the request."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("custom_params_type", "must be an object")
    if POLICY_KEY in value:
        raise invalid("unknown_parameter", "this key is the server's own; use the field 'slipstream'", POLICY_KEY)
    for name, each in value.items():
        if not _is_flat(each):
            raise invalid("custom_params_value", "must be a scalar, or a list or object of scalars", name)
    return value


class ForwardedBody(Strict):
    """What the gateway looks at; fields that are not here are SGLang's to accept or refuse."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"additionalProperties": True})

    model: str
    n: Count | None = None
    stream: bool | None = None
    prompt: Any = None
    custom_params: Annotated[
        dict[str, Any], PlainValidator(_custom_params), WithJsonSchema({"type": ["object", "null"]})
    ] = Field(default_factory=dict)
    slipstream: Capture = Capture()

    @property
    def num_samples(self) -> int:
        """Token ids are one prompt; whatever else is in a list is a prompt each. Judging them is SGLang's."""
        is_list = isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int
        return (len(self.prompt) if is_list else 1) * (self.n or 1)


def rewrite(raw: bytes, body: ForwardedBody, *, request_id: str) -> bytes:
    """The body to send on; values that are not the gateway's keep their bytes. Raises RequestError for invalid JSON."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        # The two parsers differ only on what is not JSON: NaN, for one.
        raise RequestError(f"Invalid JSON: {error}", code="invalid_json") from None
    fields.pop("slipstream", None)
    custom_params = {**body.custom_params, POLICY_KEY: asdict(body.slipstream.policy())}
    added = {"custom_params": custom_params, "rid": request_id}
    return msgspec.json.encode({**fields, **added})
