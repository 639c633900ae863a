"""The bodies that clients send, strictly typed: a number is never a string, a boolean never a number.

A null asks for nothing, wherever it stands: the field is as if absent. A field that this server does not act on is
accepted where its value changes nothing about the answer, and refused by name where it would.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from serving.engine import CapturePolicy
from serving.gateway.body import CANNOT, UNKNOWN, Neutral, Strict, asked_fields, changes_nothing, invalid, without_nulls
from serving.gateway.telemetry import Exchange
from speculator.draft.sampling_params import SamplingParams

MAX_STOP = 4
MAX_STOP_CHARS = 1000
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def _all(values: tuple[object, ...] | EllipsisType, names: str) -> Neutral:
    return dict.fromkeys(names.split(), values)


NEUTRAL: Neutral = {
    # For the server's books and caches, and for when and where a request runs.
    **_all(
        ..., "metadata prediction prompt_cache_key prompt_cache_retention safety_identifier service_tier store user"
    ),
    **_all(..., "cache_prompt cache_salt data_parallel_rank id_slot keep_alive priority request_id rid routed_dp_rank"),
    **_all(..., "chat_id num_retries prompt_cache_options session_id timeout"),
    # Only of use with something that is refused: tools, grammars, reasoning, special tokens that are shown, logprobs,
    # penalties.
    **_all(..., "parallel_tool_calls separate_reasoning stream_reasoning spaces_between_special_tokens"),
    **_all(..., "guided_decoding_backend include_reasoning return_text_in_logprobs return_tokens_as_token_ids"),
    **_all(..., "mirostat_eta mirostat_tau repeat_last_n"),
    **_all(([],), "bad_words documents functions logits_processors stop_token_ids stop_regex tools"),
    **_all(({},), "chat_template_kwargs custom_params extra_body extra_headers mm_processor_kwargs reasoning"),
    **_all(({},), "session_params vllm_xargs"),
    **_all((0,), "frequency_penalty min_length min_new_tokens min_p min_tokens mirostat presence_penalty top_logprobs"),
    # llama.cpp's way to say that there is none.
    **_all((-1,), "max_completion_tokens max_tokens seed"),
    **_all((1,), "length_penalty repeat_penalty repetition_penalty typical_p"),
    **_all((False,), "continue_final_message early_stopping include_stop_str_in_output no_stop_trim use_beam_search"),
    **_all((False,), "deferred echo logprobs return_cached_tokens_details return_hidden_states return_routed_experts"),
    **_all((False,), "return_prompt_token_ids return_spec_tokens_details return_token_ids"),
    **_all((True,), "add_generation_prompt detokenize skip_special_tokens"),
    **_all(("none", "auto"), "function_call tool_choice"),
    **_all((), "allowed_token_ids chat_template custom_logit_processor ebnf grammar guided_choice guided_grammar"),
    **_all((), "guided_json guided_regex json_schema kv_transfer_params lora_path prompt_logprobs regex"),
    **_all((), "structured_outputs truncate_prompt_tokens"),
    "reasoning_effort": ("medium",),
    "response_format": ({"type": "text"},),
    "usage": ({}, {"include": False}, {"include": True}),
}

NEUTRAL_IN_CHAT: Neutral = {
    **NEUTRAL,
    **_all((), "audio web_search_options"),
    "add_special_tokens": (False,),
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
}

NEUTRAL_IN_COMPLETIONS: Neutral = {**NEUTRAL, "add_special_tokens": (True,), "suffix": ("",)}

NEUTRAL_IN_MESSAGE: Neutral = {
    # What servers and libraries say of an answer, sent back with it.
    **_all(..., "additional_kwargs annotations finish_reason id index provider_specific_fields reasoning"),
    **_all(..., "reasoning_content reasoning_details response_metadata thinking_blocks timestamp usage_metadata"),
    # For caches and fine-tuning.
    **_all(..., "cache_control metadata weight"),
    **_all(([],), "files function_calls images invalid_tool_calls tool_calls"),
    **_all((), "audio function_call tool_call_id"),
    **_all((False,), "partial prefix"),
    "refusal": ("",),
}


def _no_bias(value: object) -> None:
    if not isinstance(value, dict) or not all(changes_nothing(each, (0,)) for each in without_nulls(value).values()):
        raise invalid("unsupported_parameter", CANNOT)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = value if isinstance(value, list) else [value]
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
    if unknown := sorted(asked_fields(part, TextPart.neutral, (), index).keys() - {"type", "text"}):
        raise invalid("extra_forbidden", UNKNOWN, index, unknown[0])
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


class TextPart(Strict):
    """One part of the content of a message."""

    neutral = _all(..., "annotations cache_control")

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
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """As vLLM has it: with `include_usage`, each event says what was used so far, and not only the last one."""
    include_obfuscation: bool = False
    """OpenAI's random padding of events; accepted so that clients may turn it off, and it is never added."""


class CaptureChoice(Strict):
    """How a request may be used for training."""

    capture: bool = True
    domain: str = Field(default="", max_length=64)

    def policy(self, exchange: Exchange, group_id: str) -> CapturePolicy:
        """The key says whose request it is, and its no to capture stands."""
        capture = self.capture and exchange.may_capture
        return CapturePolicy(capture=capture, tenant=exchange.tenant, group_id=group_id, domain=self.domain)


class GroupCapture(CaptureChoice):
    """The `slipstream` object of a request that may belong to a prompt group."""

    group_id: str = Field(default="", max_length=256)


class Extension(GroupCapture):
    """The same where the gateway makes the stream's events itself."""

    tokens: bool = False
    """Have each event of a stream say where its tokens come from."""
    draft: bool = True
    """False: decode this answer plainly, to compare its speed."""


class Message(Strict):
    neutral = NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _let_an_answer_be_empty(cls, fields: object) -> object:
        """A library keeps an answer without text as one without content."""
        if isinstance(fields, dict) and fields.get("role") == "assistant" and fields.get("content") is None:
            return {**fields, "content": ""}
        return fields

    def for_template(self) -> dict[str, str]:
        # OpenAI renamed "system" to "developer"; chat templates know the old name.
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class SamplingBody(Strict):
    """How tokens are drawn, and where an answer ends."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: TopK = 0
    stop: Stop = ()
    ignore_eos: bool = False
    """As vLLM and SGLang have it: go on after the end of the text, up to the limit. Load generators ask for it."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class GenerationBody(SamplingBody):
    """What both generating endpoints accept."""

    model: str
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`."""
    n: Count = 1
    """Samples of each prompt."""
    best_of: Count | None = None
    logit_bias: NoBias = None
    seed: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    """Of no effect on an answer that is not streamed."""
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
    def limit(self) -> int | None:
        """Tokens of an answer at most; None where the client names no limit."""
        return self.max_tokens or self.max_completion_tokens


class ChatBody(GenerationBody):
    neutral = NEUTRAL_IN_CHAT

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class CompletionBody(GenerationBody):
    neutral = NEUTRAL_IN_COMPLETIONS

    prompt: Prompts
