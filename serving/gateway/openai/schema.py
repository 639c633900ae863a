"""Bodies of the OpenAI endpoints, strictly typed: a string is no number, and a number no boolean.

A null counts as absent. A field that this server does not support is accepted if its value changes nothing about the
answer. Of the others, those in `IGNORABLE` are ignored unless the gateway is strict; the rest would need an answer that
this server cannot give, and are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from types import EllipsisType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, model_validator

from serving.engine import CapturePolicy, Tokenizer
from serving.gateway.body import (
    CANNOT,
    UNKNOWN,
    Ignored,
    Neutral,
    Strict,
    changes_nothing,
    invalid,
    requested_fields,
    without_nulls,
)
from serving.gateway.openai.structured import FunctionTool, ResponseFormat, ToolChoice, Tools, may_be_called, must_call
from serving.gateway.telemetry import Exchange
from serving.grammar import check_schema, json_grammar
from serving.tool_calls import OPENING, calls_grammar
from speculator.draft.sampling_params import SamplingParams

MAX_STOP = 32
MAX_STOP_CHARS = 1000
"""Of all stop strings together: each token is compared with all their beginnings."""
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_LEAST_TEMPERATURE = 1e-6
"""SGLang's; below it a request is greedy. A logit divided by much less is infinite in float32."""


def _all(values: tuple[object, ...] | EllipsisType, names: str) -> Neutral:
    return dict.fromkeys(names.split(), values)


IGNORABLE = frozenset(
    {
        # Change probabilities of tokens.
        **_all(..., "frequency_penalty presence_penalty repetition_penalty repeat_penalty length_penalty"),
        **_all(..., "min_length min_new_tokens min_p min_tokens mirostat typical_p"),
        # Add details to an answer beside its text.
        **_all(..., "deferred logprobs prompt_logprobs top_logprobs usage return_cached_tokens_details"),
        **_all(..., "return_hidden_states return_prompt_token_ids return_routed_experts"),
        **_all(..., "return_spec_tokens_details return_token_ids"),
        # How much a model reasons or writes.
        **_all(..., "reasoning reasoning_effort verbosity"),
        # Added by libraries for other servers.
        **_all(..., "custom_params extra_body extra_headers mm_processor_kwargs session_params vllm_xargs"),
    }
)
"""Fields that are ignored with any value, unless the gateway is strict."""

NEUTRAL: Neutral = {
    # Accounting, caches, scheduling.
    **_all(
        ..., "metadata prediction prompt_cache_key prompt_cache_retention safety_identifier service_tier store user"
    ),
    **_all(..., "cache_prompt cache_salt data_parallel_rank id_slot keep_alive priority request_id rid routed_dp_rank"),
    **_all(..., "chat_id num_retries prompt_cache_options session_id timeout"),
    # Have an effect only with refused features: grammars, reasoning, visible special tokens, logprobs, penalties.
    **_all(..., "separate_reasoning stream_reasoning spaces_between_special_tokens"),
    **_all(..., "guided_decoding_backend include_reasoning return_text_in_logprobs return_tokens_as_token_ids"),
    **_all(..., "mirostat_eta mirostat_tau repeat_last_n"),
    **_all(([],), "bad_words documents functions logits_processors stop_token_ids stop_regex"),
    **_all(({},), "custom_params extra_body extra_headers mm_processor_kwargs reasoning"),
    **_all(({},), "session_params vllm_xargs"),
    **_all((0,), "frequency_penalty min_length min_new_tokens min_p min_tokens mirostat presence_penalty top_logprobs"),
    # llama.cpp's value for none.
    **_all((-1,), "max_completion_tokens max_tokens seed"),
    **_all((1,), "length_penalty repeat_penalty repetition_penalty typical_p"),
    **_all((False,), "continue_final_message early_stopping include_stop_str_in_output no_stop_trim use_beam_search"),
    **_all((False,), "deferred echo logprobs return_cached_tokens_details return_hidden_states return_routed_experts"),
    **_all((False,), "return_prompt_token_ids return_spec_tokens_details return_token_ids"),
    **_all((True,), "add_generation_prompt detokenize skip_special_tokens"),
    "function_call": ("none", "auto"),
    **_all((), "allowed_token_ids chat_template custom_logit_processor ebnf grammar guided_choice guided_grammar"),
    **_all((), "guided_json guided_regex json_schema kv_transfer_params lora_path prompt_logprobs regex"),
    **_all((), "structured_outputs truncate_prompt_tokens"),
    "reasoning_effort": ("medium",),
    "usage": ({}, {"include": False}, {"include": True}),
}

NEUTRAL_IN_CHAT: Neutral = {
    **NEUTRAL,
    **_all((), "audio web_search_options"),
    "add_special_tokens": (False,),
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
}

NEUTRAL_IN_COMPLETIONS: Neutral = {
    **NEUTRAL,
    **_all(..., "parallel_tool_calls"),
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

NEUTRAL_IN_MESSAGE: Neutral = {
    # Added to answers by servers and libraries, and sent back in the conversation.
    **_all(..., "additional_kwargs annotations finish_reason id index provider_specific_fields reasoning"),
    **_all(..., "reasoning_content reasoning_details response_metadata thinking_blocks timestamp usage_metadata"),
    # For caches and fine-tuning.
    **_all(..., "cache_control metadata weight"),
    **_all(([],), "files function_calls images invalid_tool_calls"),
    **_all((), "audio function_call"),
    **_all((False,), "partial prefix"),
    "refusal": ("",),
}


def _no_bias(value: object, info: ValidationInfo) -> None:
    if isinstance(ignored := info.context, set):
        ignored.add("logit_bias")
    elif not isinstance(value, dict) or not all(changes_nothing(each, (0,)) for each in without_nulls(value).values()):
        raise invalid("unsupported_parameter", CANNOT)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
    for index, string in enumerate(strings):
        where = (index,) if isinstance(value, list) else ()
        if not isinstance(string, str):
            raise invalid("stop_type", "must be a string or a list of strings", *where)
        if not string:
            raise invalid("stop_empty", "a stop string must not be empty", *where)
    if len(strings) > MAX_STOP or sum(map(len, strings)) > MAX_STOP_CHARS:
        raise invalid("stop_count", f"at most {MAX_STOP} stop strings, of {MAX_STOP_CHARS} characters together")
    return tuple(strings)


def _content(value: object, info: ValidationInfo) -> str:
    """The text of a message; text parts of a list are joined without a separator."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid("content_type", "must be a string or a non-empty list of text parts")
    return "".join(_part_text(part, index, info.context) for index, part in enumerate(value))


def _part_text(part: object, index: int, ignored: Ignored | None) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid("content_type", 'must be an object like {"type": "text", "text": "..."}', index)
    # A part of either type has its text under its type's name.
    kind = part["type"]
    if kind not in ("text", "refusal"):
        raise invalid("unsupported_parameter", "only parts of type 'text' are supported", index, "type")
    if not isinstance(part.get(kind), str):
        raise invalid("content_type", "must be a string", index, kind)
    if unknown := sorted(requested_fields(TextPart, part, ignored, index).keys() - {"type", kind}):
        raise invalid("extra_forbidden", UNKNOWN, index, unknown[0])
    text: str = part[kind]
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


class TextPart(Strict):
    """One part of the content of a message."""

    neutral = _all(..., "annotations cache_control")
    ignores_unknown, place = True, "messages[].content[]."

    type: Literal["text"]
    text: str


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP)]
Stop = Annotated[tuple[str, ...], PlainValidator(_stop_strings, json_schema_input_type=StopString | StopStrings)]
TextParts = Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[str, PlainValidator(_content, json_schema_input_type=str | TextParts)]
Strings = Annotated[list[str], Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1)]
OnePrompt = Annotated[Prompt, PlainValidator(prompt_of, json_schema_input_type=str | TokenIds)]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts, json_schema_input_type=str | Strings | TokenIds | list[TokenIds]),
]
NoBias = Annotated[None, PlainValidator(_no_bias, json_schema_input_type=dict[str, Literal[0] | None])]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
TopK = Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(lambda top_k: max(top_k, 0))]
"""0 keeps every token, and so does vLLM's and SGLang's -1."""


class StreamOptions(Strict):
    ignores_unknown, place = True, "stream_options."

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's option: with `include_usage`, every event has the usage so far, not only the last one."""
    include_obfuscation: bool = False
    """OpenAI's random padding of events; accepted so that clients may turn it off, and it is never added."""


class CaptureChoice(Strict):
    """How a request may be used for training."""

    capture: bool = True
    domain: str = Field(default="", max_length=64)

    def policy(self, exchange: Exchange, group_id: str) -> CapturePolicy:
        """The capture policy. The tenant is the key's, and a key without capture cannot be overridden."""
        capture = self.capture and exchange.may_capture
        return CapturePolicy(capture=capture, tenant=exchange.tenant, group_id=group_id, domain=self.domain)


class GroupCapture(CaptureChoice):
    """The `slipstream` object of a request that may belong to a prompt group."""

    group_id: str = Field(default="", max_length=256)


class Extension(GroupCapture):
    """The `slipstream` object for the local engine, whose stream events the gateway writes."""

    tokens: bool = False
    """Add to each event of a stream the source of its tokens."""
    draft: bool = True
    """False: decode this answer plainly, to compare its speed."""


class CalledFunction(Strict):
    ignores_unknown, place = True, "messages[].tool_calls[].function."

    name: str
    arguments: str
    """JSON."""


class MessageToolCall(Strict):
    """A tool call of the model, sent back in the conversation."""

    neutral = _all(..., "index")
    ignores_unknown, place = True, "messages[].tool_calls[]."

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        arguments: object = self.function.arguments
        # Parsed, because chat templates write an object as JSON, but a string with quotes.
        with suppress(ValueError, RecursionError):
            # Libraries send an empty string for a call without arguments.
            arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


_MAY_BE_EMPTY = ("assistant", "tool")


class Message(Strict):
    neutral = NEUTRAL_IN_MESSAGE
    ignores_unknown, place = True, "messages[]."

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] = Field(default_factory=list)
    tool_call_id: str | None = None
    """Id of the call that a message of the role `tool` answers."""

    @model_validator(mode="before")
    @classmethod
    def _allow_empty_answer(cls, fields: object) -> object:
        """Accept a message of model or tool without content: libraries send an answer without text that way. What the
        model said when it refused to answer is its text.
        """
        if not isinstance(fields, dict) or fields.get("role") not in _MAY_BE_EMPTY:
            return fields
        if fields["role"] == "assistant" and isinstance(said := fields.get("refusal"), str):
            return {**fields, "content": fields.get("content") or said, "refusal": None}
        return {**fields, "content": ""} if fields.get("content") in (None, []) else fields

    def for_template(self) -> dict[str, Any]:
        # OpenAI renamed "system" to "developer"; chat templates know the old name.
        role = "system" if self.role == "developer" else self.role
        calls = [call.for_template() for call in self.tool_calls] or None
        more = without_nulls({"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id})
        return {"role": role, "content": self.content, **more}


class SamplingBody(Strict):
    """Sampling parameters and stop conditions."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: TopK = 0
    stop: Stop = ()
    ignore_eos: bool = False
    """As in vLLM and SGLang: ignore end tokens and generate up to the limit; for load generators."""

    @property
    def sampling(self) -> SamplingParams:
        # One token to choose from is greedy, too, and then a draft need not guess it by chance.
        is_greedy = self.temperature < _LEAST_TEMPERATURE or self.top_k == 1 or self.top_p == 0
        temperature = 0.0 if is_greedy else self.temperature
        return SamplingParams(temperature=temperature, top_p=self.top_p or 1.0, top_k=self.top_k)


class GenerationBody(SamplingBody):
    """Fields of both generating endpoints."""

    ignores_unknown, ignorable = True, IGNORABLE

    model: str
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""
    n: Count = 1
    """Samples of each prompt."""
    best_of: Count | None = None
    logit_bias: NoBias = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    """No effect on an answer that is not streamed."""
    response_format: ResponseFormat = ResponseFormat(type="text")
    slipstream: Extension = Extension()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.slipstream.tokens and not self.stream:
            raise invalid("tokens", "only allowed where 'stream' is true", "slipstream", "tokens")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            message = "give 'max_completion_tokens' or its old name 'max_tokens', not another number for each"
            raise invalid("max_tokens", message, "max_tokens")
        if self.best_of not in (None, self.n):
            raise invalid("unsupported_parameter", "only supported where it equals 'n'; leave it out", "best_of")
        return self

    @property
    def wants_grammar(self) -> bool:
        return self.response_format.type != "text"

    def grammar(self, tokenizer: Tokenizer) -> str:
        """The grammar that an answer must follow; empty for free text. Raises RequestError for an unusable schema."""
        schema = self.response_format.wanted_schema()
        return "" if schema is None else json_grammar(schema, lenient=self.response_format.is_lenient)

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None where the client names no limit."""
        return self.max_tokens or self.max_completion_tokens


class ChatBody(GenerationBody):
    neutral = NEUTRAL_IN_CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.called and self.slipstream.tokens:
            raise invalid("tokens", "not with 'tools': their calls are no text", "slipstream", "tokens")
        return self

    @property
    def called(self) -> Sequence[FunctionTool]:
        """The functions that the model may call."""
        return may_be_called(self.tools, self.tool_choice)

    @property
    def wants_grammar(self) -> bool:
        return bool(self.called) or super().wants_grammar

    def grammar(self, tokenizer: Tokenizer) -> str:
        if not (called := self.called):
            return super().grammar(tokenizer)
        for index, tool in enumerate(self.tools):
            function = tool.function
            check_schema(function.parameters, "tools", index, "function", "parameters", lenient=not function.strict)
        return calls_grammar(
            [tool.for_template() for tool in called],
            must_call=must_call(self.tool_choice),
            several=self.parallel_tool_calls,
            answer=self.response_format.wanted_schema(),
            lenient=self.response_format.is_lenient,
            has_token=tokenizer.has_token(OPENING),
        )


class CompletionBody(GenerationBody):
    neutral = NEUTRAL_IN_COMPLETIONS

    prompt: Prompts
