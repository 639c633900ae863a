"""What SGLang would send to its scheduler for a request, checked by its own structs."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import SessionParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from serving.sglang.plugin import hooks


def _message(params: dict[str, Any] | None = None, session: dict[str, Any] | None = None, **fields: Any) -> Any:
    """As `TokenizerManager._create_tokenized_object` makes it."""
    plain = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    plain |= {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": True}
    return TokenizedGenerateReqInput(
        input_text="hello",
        input_ids=array("q", [1, 2]),
        sampling_params=SamplingParams(**(params or {})),
        session_params=None if session is None else SessionParams(**session),
        **plain | fields,
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"params": {"spaces_between_special_tokens": "no"}},
            "sampling_params.spaces_between_special_tokens: Expected",
        ),
        ({"params": {"spaces_between_special_tokens": []}}, "sampling_params.spaces_between_special_tokens: Expected"),
        ({"params": {"ignore_eos": 5}}, "sampling_params.ignore_eos: Expected `bool`, got `int`"),
        ({"params": {"stream_interval": "8"}}, "sampling_params.stream_interval: Expected"),
        ({"params": {"json_schema": {"a": 1}}}, "sampling_params.json_schema: Expected"),
        ({"params": {"custom_params": []}}, "sampling_params.custom_params: Expected"),
        ({"params": {"custom_params": {"a": [2**64]}}}, "64 bits"),
        ({"params": {"other": 1}}, "Unexpected keyword argument 'other'"),
        ({"session": {"id": 5}}, "session_params.id: Expected"),
        ({"session": {"offset": 2**64}}, "64 bits"),
        ({"session": {"other": "x"}}, "Unexpected keyword argument 'other'"),
        ({"return_logprob": [True]}, "return_logprob: Expected"),
        ({"routed_dp_rank": -(2**63) - 1}, "64 bits"),
    ],
)
def test_values_of_other_types_than_sglang_declares_are_refused(given: dict[str, Any], why: str) -> None:
    """The scheduler, its other ranks or the detokenizer would end at one of them, for all requests."""
    with pytest.raises(ValueError, match=why):
        hooks.around_message(_message, **given)


def test_requests_as_sglang_makes_them_are_sent() -> None:
    params = {"temperature": 0, "stop": ["a"], "stop_token_ids": [1], "logit_bias": {"5": -100}, "n": 2}
    policy = {"custom_params": {"slipstream": {"tenant": "a", "capture": True, "limit": None}, "thinking_budget": 5}}
    session = {"id": "a", "rid": None, "offset": 2**40, "replace": True}
    message = hooks.around_message(_message, params | policy, session, time_stats=object(), mm_inputs=object())
    assert message.input_ids == array("q", [1, 2])
    io_struct.msgpack_decode(io_struct.msgpack_encode(hooks.around_message(_message)))
    embedding = TokenizedEmbeddingReqInput(
        input_text="", input_ids=array("q", [1]), mm_inputs=None, token_type_ids=None, sampling_params=SamplingParams()
    )
    assert hooks.around_message(lambda: embedding) is embedding
