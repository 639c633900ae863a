"""Extreme values for every field of SGLang's endpoints: each alone, in a body that is good otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import httpx

from tests.hostile.judge import FailureError, Inputs, Outcome

_COMMON = """
bootstrap_host bootstrap_port bootstrap_room cache_salt data_parallel_rank disagg_prefill_dp_rank extra_key
frequency_penalty min_p model presence_penalty priority repetition_penalty routed_dp_rank session_id stop stream
temperature top_k top_p user
"""
_CHATS = """
chat_template_kwargs continue_final_message custom_logit_processor custom_params ebnf ignore_eos images_config
input_ids logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens messages min_dynamic_patch
min_tokens mm_processor_kwargs n no_stop_trim parallel_tool_calls reasoning_effort regex response_format
return_cached_tokens_details return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states
return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext return_prompt_token_ids return_routed_experts
return_sampling_mask return_spec_tokens_details return_token_ids rid routed_experts_start_len sampling_logprobs_mode
seed separate_reasoning session_params skip_special_tokens stop_regex stop_token_ids stream_options stream_reasoning
task thinking tool_choice tools top_logprobs use_audio_in_video video_config watermark
"""
_COMPLETIONS = """
best_of custom_labels custom_logit_processor custom_params ebnf echo ignore_eos images_config json_schema logit_bias
logprobs lora_path max_tokens min_tokens mm_processor_kwargs n no_stop_trim prompt regex response_format
return_cached_tokens_details return_hidden_states return_routed_experts return_spec_tokens_details return_token_ids
rid routed_experts_start_len seed session_params skip_special_tokens stop_regex stop_token_ids stream_options suffix
watermark
"""
_RESPONSES = """
background chat_template_kwargs include input instructions max_output_tokens max_tool_calls metadata
parallel_tool_calls previous_response_id reasoning request_id service_tier store text tool_choice tools top_logprobs
truncation
"""

FIELDS = {
    "/v1/chat/completions": (_COMMON + _CHATS).split(),
    "/v1/completions": (_COMMON + _COMPLETIONS).split(),
    "/v1/responses": (_COMMON + _RESPONSES).split(),
}
"""All fields of SGLang's endpoints."""

_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
_CIRCLES = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]

VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, -2, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**70),
    *(1e-45, -1e-45, 1e39, -1e39, 1e308, 0.5, -0.5),
    *("", "x", "\0", "\ud800", "../../etc/passwd", "a" * 500, "(a*)*b"),
    *([], [-1], [2**31], [2**63], [1e39], [""], ["x"], [None], [[]], [0] * 300, list(range(50_000))),
    *({}, {"": 0}, {"5": 1e39}, {"-1": 1}, {str(2**31): 1}, {"x": "y"}, {"0": None}, {"type": "json_object"}),
    *(_SCHEMA, {"type": "object", "anyOf": _CIRCLES, "$defs": {"a": {"anyOf": _CIRCLES}}}),
    *({"messages": []}, {"tokenize": False}, {"tokenize": True}, {"conversation": 1}, {"return_dict": True}),
    *({"add_generation_prompt": 7}, {"tools": 7}, {"documents": 7}, {"id": "x", "rid": "x", "offset": 2**40}),
)
"""What any field is given, of whatever type it is."""

PAIRS: tuple[Mapping[str, Any], ...] = tuple(
    {"min_tokens": 1, **other}
    for other in (
        {"regex": "a"},
        {"json_schema": '{"type": "null"}'},
        {"stop_token_ids": list(range(50_000))},
        {"ignore_eos": True, "logit_bias": {"5": -1e30}},
        {"stop": ["", "a"]},
    )
)


GOOD: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}
"""A body that each endpoint answers, without the model's name."""


def _send(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Outcome:
    # With escapes: half a character has no UTF-8.
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    # A schema that leads nowhere ends its own request: nobody can tell that before.
    if answer.status_code >= 500 and _SCHEMA not in body.values():
        raise FailureError(f"{answer.status_code}: {answer.text[:200]}")
    return str(answer.status_code)


def inputs(client: httpx.Client, model: str) -> Inputs:
    """At each endpoint of the server, each of its fields with each of `VALUES`, then `PAIRS`."""
    for path, good in GOOD.items():
        for change in (*({name: value} for name in FIELDS[path] for value in VALUES), *PAIRS):
            told = ", ".join(f"{name}={str(value)[:60]!r}" for name, value in change.items())
            yield f"{path}: {told}", partial(_send, client, path, {"model": model, **good, **change})


def good_requests(client: httpx.Client, model: str) -> Inputs:
    def attempt(path: str, body: Mapping[str, Any]) -> Outcome:
        return str(client.post(path, json={"model": model, **body}).raise_for_status().status_code)

    for path, good in GOOD.items():
        yield path, partial(attempt, path, good)
