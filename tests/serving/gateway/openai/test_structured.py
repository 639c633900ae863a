"""Answers that have to be JSON, and calls of functions: the `openai` client's own typed calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import date
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict
from tokenizers import AddedToken

from serving.grammar import GrammarVocabulary, json_grammar, json_text
from serving.local.engine import LocalEngine
from serving.tool_calls import OPENING, ToolCall, ToolCallReader, calls_grammar
from tests.fixtures.doubles import DoubleEngine, says
from tests.fixtures.toy import byte_tokenizer, make_toy_model
from tests.serving.gateway.client import CHAT, HELLO, chat, gateway, openai_client, post, serve
from tests.serving.local.harness import toy_engine

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Foretells.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["spam", "ham"]
    is_sure: bool


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    model_dir = make_toy_model(tmp_path_factory.mktemp("toy"), tokenizer=byte_tokenizer(), context_length=1024)
    with toy_engine(model_dir, context_length=1024) as harness:
        yield harness.engine


def talk(engine: Any, say: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serve(gateway(engine)) as server, openai_client(server) as client:
            await say(client)

    asyncio.run(run())


def test_the_clients_typed_calls_give_what_their_types_say(engine: LocalEngine) -> None:
    async def say(client: AsyncOpenAI) -> None:
        asked: Any = {
            "model": "toy",
            "messages": [{"role": "user", "content": "?"}],
            "max_tokens": 150,
            "temperature": 0,
        }
        parsed = await client.chat.completions.parse(**asked, response_format=Verdict)
        assert isinstance(parsed.choices[0].message.parsed, Verdict)

        async with client.chat.completions.stream(**asked, response_format=Verdict, seed=2) as stream:
            events = [event async for event in stream]
            assert isinstance((await stream.get_final_completion()).choices[0].message.parsed, Verdict)
        assert "content.done" in {event.type for event in events}

        any_object = await client.completions.create(
            model="toy", prompt="?", max_tokens=60, extra_body={"response_format": {"type": "json_object"}}, seed=1
        )
        assert any_object.choices[0].text.startswith("{")

        typed = [openai.pydantic_function_tool(Verdict, name="judge")]
        called = await client.chat.completions.parse(**asked, tools=typed, tool_choice="required")
        assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Verdict)

    talk(engine, say)


ONLY_WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ONLY_WEATHER]}}


@pytest.mark.parametrize("choice", ["required", ONLY_WEATHER, ALLOWED], ids=str)
def test_a_required_call_follows_its_schema_whole_and_streamed(engine: LocalEngine, choice: Any) -> None:
    async def say(client: AsyncOpenAI) -> None:
        asked: Any = {
            "model": "toy",
            "messages": [{"role": "user", "content": "?"}],
            "max_tokens": 150,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }
        for seed in range(2):
            whole = (await client.chat.completions.create(**asked, seed=seed)).choices[0]
            (call,) = whole.message.tool_calls
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
            arguments = json.loads(call.function.arguments)
            assert arguments == {} if call.function.name == "now" else arguments["city"] in ("Oslo", "Rome")
            assert choice == "required" or call.function.name == "weather"
            async with client.chat.completions.stream(**asked, seed=seed) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            assert streamed.finish_reason == "tool_calls"
            assert [each.function.name for each in streamed.message.tool_calls] == [call.function.name]
            assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
            assert streamed.message.tool_calls[0].id != call.id

    talk(engine, say)


def test_text_before_calls_is_content_and_several_calls_are_told_apart() -> None:
    async def say(client: AsyncOpenAI) -> None:
        asked: Any = {"model": "double", "messages": HELLO, "tools": TOOLS}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.message.content == "Let me see.\n"
        assert [call.function.name for call in whole.message.tool_calls] == ["now", "weather"]
        async with client.chat.completions.stream(**asked) as stream:
            last = (await stream.get_final_completion()).choices[0]
        assert last.message.content == "Let me see.\n"
        assert [call.function.arguments for call in last.message.tool_calls] == ["{}", '{"city": "Rome", "days": 2}']
        assert {call.id for call in last.message.tool_calls}.isdisjoint(call.id for call in whole.message.tool_calls)
        assert (last.finish_reason, whole.finish_reason) == ("tool_calls", "tool_calls")

        # The answer as the client's own object, and what the functions said, go back as history.
        said = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in whole.message.tool_calls]
        await client.chat.completions.create(**asked | {"messages": [*HELLO, whole.message, *said]})

    engine = DoubleEngine(answer=says(f"Let me see.\n{NOW}\n{ROME}"), context_length=2048)
    talk(engine, say)
    prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert prompt.startswith("<system>You can call functions.")
    assert f"<assistant>Let me see.\n\n{NOW}\n{ROME}\n<user><tool_response>\nnoon\n</tool_response>\n" in prompt


def test_an_answer_beside_functions_follows_its_schema(engine: LocalEngine) -> None:
    """As the Agents SDK asks for it: functions and the type of the last answer in each request."""

    schema: Any = {"type": "json_schema", "json_schema": {"name": "V", "schema": Verdict.model_json_schema()}}

    async def say(client: AsyncOpenAI) -> None:
        asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 150, "tools": TOOLS, "response_format": schema}
        for seed in range(3):
            choice = (await client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False)).choices[0]
            if calls := choice.message.tool_calls:
                assert (choice.finish_reason, choice.message.content, len(calls)) == ("tool_calls", None, 1)
            else:
                Verdict.model_validate_json(choice.message.content)
        forced = await client.chat.completions.create(**asked, tool_choice="required", seed=1)
        assert forced.choices[0].message.tool_calls

    talk(engine, say)


def test_a_call_may_begin_with_the_token_that_the_vocabulary_has_for_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(OPENING, special=False, normalized=False)])
    backend = tokenizer.backend_tokenizer
    vocabulary = GrammarVocabulary(backend, end_token_ids=[tokenizer.eos_token_id], hidden_token_ids=[])
    call, brace, letter = (backend.encode(text, add_special_tokens=False).ids for text in (OPENING, "{", "a"))
    for answer, texts in ((None, [brace, letter]), (Verdict.model_json_schema(), [brace])):
        grammar = calls_grammar(TOOLS[:1], must_call=False, several=True, answer=answer, lenient=False, has_token=True)
        forbidden = vocabulary.matcher(grammar).forbidden(backend.get_vocab_size())
        assert [ids for ids in (call, brace, letter) if not forbidden[ids[0]]] == [call, *texts]


def test_end_tokens_that_the_tokenizer_lacks_are_no_hindrance() -> None:
    backend = byte_tokenizer().backend_tokenizer
    vocabulary = GrammarVocabulary(backend, end_token_ids=[2, -1, 10**6, 2**40], hidden_token_ids=[])
    forbidden = vocabulary.matcher(json_grammar(Verdict.model_json_schema())).forbidden(backend.get_vocab_size())
    brace, letter = (backend.encode(text, add_special_tokens=False).ids[0] for text in "{a")
    assert [bool(forbidden[token]) for token in (brace, letter, 2)] == [False, True, True]


def test_a_function_may_have_a_name_as_mcp_servers_give_it() -> None:
    name = "mcp/files.v2/read-file" + "_long" * 20
    said = says(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": name}}]
    answer = chat(DoubleEngine(answer=said, context_length=2048), tools=tools).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": name, "arguments": "{}"}


def test_allowed_functions_need_not_be_called_where_their_mode_is_auto() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "auto"}}
    engine = DoubleEngine(answer=says("Hm."), context_length=2048)
    for chosen, tools in (("auto", TOOLS[:1]), (choice, TOOLS)):
        assert chat(engine, tools=tools, tool_choice=chosen).json()["choices"][0]["message"]["content"] == "Hm."
    alone, among = engine.requests
    assert (among.grammar, among.prompt_token_ids) == (alone.grammar, alone.prompt_token_ids)


def test_where_no_function_may_be_called_the_answer_is_text() -> None:
    nothing = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": nothing}):
        engine = DoubleEngine(answer=says(NOW), context_length=2048)
        answer = chat(engine, **tools).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (NOW, "stop")
        assert engine.requests[0].grammar == ""
        assert b"functions" not in bytes(engine.requests[0].prompt_token_ids)


def test_a_call_that_is_cut_has_its_arguments_so_far() -> None:
    async def say(client: AsyncOpenAI) -> None:
        asked: Any = {"model": "double", "messages": HELLO, "tools": TOOLS, "max_tokens": ROME.index('me",')}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        (call,) = whole.message.tool_calls
        assert (whole.finish_reason, whole.message.content) == ("length", None)
        assert call.function.model_dump() == {"name": "weather", "arguments": '{"city": "Ro'}
        deltas = [event.choices[0] async for event in await client.chat.completions.create(**asked, stream=True)]
        (streamed,) = [call for each in deltas for call in each.delta.tool_calls or ()]
        assert (streamed.index, streamed.function.arguments) == (0, call.function.arguments)
        assert (deltas[-1].finish_reason, "".join(each.delta.content or "" for each in deltas)) == ("length", "")

    talk(DoubleEngine(answer=says(ROME), ends_with="length", context_length=2048), say)


def test_a_call_that_is_cut_in_its_name_is_text() -> None:
    answer = chat(
        DoubleEngine(answer=says(NOW), ends_with="length", context_length=2048), tools=TOOLS, max_tokens=24
    ).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (NOW[:24], "length")
    assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    def read(text: str) -> list[str | ToolCall]:
        reader = ToolCallReader()
        found = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
        found += reader.finish()
        joined: list[str | ToolCall] = []
        for part in found:
            if joined and isinstance(part, str) and isinstance(joined[-1], str):
                joined[-1] += part
            else:
                joined.append(part)
        return joined

    now, rome = ToolCall("now", "{}"), ToolCall("weather", '{"city": "Rome", "days": 2}')
    assert read("plain < text <tool") == ["plain < text <tool"]
    assert read(NOW) == [now]
    assert read(f"a {NOW}\n{ROME}\n") == ["a ", now, rome]
    assert read(f"{NOW}\nb {ROME}") == [now, "\nb ", rome]
    # Cut: behind its last brace, before it, in its arguments, before them, and in its name.
    nested = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": "}\\""}}}\n</tool_call>'
    assert read(nested[:-3]) == read(nested[:-13]) == read(nested[:-14]) == read(nested)
    assert read(nested[:-15]) == [ToolCall("f", '{"a": {"b": "}\\""}')]
    assert read(nested[:-17]) == [ToolCall("f", '{"a": {"b": "}\\"')]
    assert read(nested[:-18]) == [ToolCall("f", '{"a": {"b": "}\\')]
    assert read(f"{NOW}\n{ROME[:36]}") == [now, ToolCall("weather", "")]
    assert read(f"{NOW}\n{ROME[:29]}") == [now, f"\n{ROME[:29]}"]
    # As the model wrote them: a Python number may be inf, another one, or none at all.
    digits, deep = "9" * 5000, "[" * 2000 + "]" * 2000
    numbers = f'{{"a": [1e999, 0.1234567890123456789, {digits}], "b": {deep}}}'
    assert read(f'<tool_call>\n{{"name": "f", "arguments": {numbers}}}\n</tool_call>') == [ToolCall("f", numbers)]
    escaped = '<tool_call>\n{"name": "f", "arguments": {"a": "\\n</tool_call>"}}\n</tool_call>'
    assert read(escaped) == [ToolCall("f", '{"a": "\\n</tool_call>"}')]


def test_references_in_a_functions_schema_count_from_its_own_root(engine: LocalEngine) -> None:
    days = {"$ref": "#/$defs/Days"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": _nested(days, {"Days": {"enum": [first]}})}}
        for name, first in (("a", 1), ("b", 2))
    ]

    async def say(client: AsyncOpenAI) -> None:
        for choice in ("a", "b"):
            asked: Any = {"model": "toy", "messages": HELLO, "tools": tools, "max_tokens": 150, "seed": 1}
            await client.chat.completions.create(**asked)
            chosen: Any = {"type": "function", "function": {"name": choice}}
            whole = await client.chat.completions.create(**asked, tool_choice=chosen)
            (call, *_) = whole.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == (choice, {"days": 1 + (choice == "b")})

    talk(engine, say)


def _nested(days: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    needed = {"type": "object", "properties": {"days": days}, "required": ["days"], "additionalProperties": False}
    return {**needed, "$defs": defs}


def test_keywords_that_demand_nothing_refuse_no_schema(engine: LocalEngine) -> None:
    listed = {"type": "array", "items": {"type": "string", "format": "file-path"}, "uniqueItems": False, "maxItems": 1}
    # Zod 4's for a record.
    listed |= {"propertyNames": {"type": "string"}}
    # A property may have the name of a keyword.
    schema = _nested({"anyOf": [{"$ref": "#/$defs/L"}]}, {"L": listed})
    schema["properties"]["format"] = {"enum": ["uuid4"]}
    asked = {"model": "toy", "max_tokens": 100, "temperature": 0}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "required": ["format", "days"]}}}
    answer = post(engine, CHAT, {"messages": HELLO, **asked, "response_format": named})
    assert answer.status_code == 200, answer.text
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = post(engine, CHAT, {"messages": HELLO, **asked, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    # What is known is followed.
    dated = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "format": "date"}}}
    said = post(engine, CHAT, {"messages": HELLO, **asked, "response_format": dated}).json()
    date.fromisoformat(json.loads(said["choices"][0]["message"]["content"]))


def test_of_very_long_keywords_nothing_is_kept() -> None:
    """The library is asked once for each format and pattern, and the answers are kept."""
    long = {"type": "string", "format": "x" * 2000, "pattern": "a" * 2000}
    assert json.loads(json_text(long, lenient=True)).keys() == {"type", "x-guidance"}
    assert json.loads(json_text(long))["pattern"] == "a" * 2000


@pytest.mark.parametrize("pattern", ["(", "a)", "[a", "*a", "a|+", "(*)", "((a)", r"[\]", "(?=a"])
def test_a_pattern_that_is_no_regular_expression_is_refused(pattern: str) -> None:
    """Also without `strict`: nobody meant the answers that would come without it."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for asked, place in (({"response_format": named}, "json_schema.schema"), ({"tools": [tool]}, "parameters")):
        answer = chat(DoubleEngine(), **asked)
        assert answer.status_code == 400
        assert f"{place}.properties.a: no grammar" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "pattern",
    [r"(?=[(])\(\[a", "(?<=a+)b", "(?<n>a)\\k<n>", "[^]+", "^{{x}}$", r"^[^[\]]+$", r"^(?!\.)[\w-\.]+?$", "a{2"],
)
def test_a_pattern_that_only_javascript_follows_is_not_refused(pattern: str) -> None:
    """Unless it is `strict`."""
    assert "pattern" not in json.loads(json_text({"type": "string", "pattern": pattern}, lenient=True))


NO_GRAMMAR: dict[str, Any] = {
    # Zod 4's for an e-mail address: no grammar can look ahead.
    "to": {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$", "maxLength": 30},
    "tags": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "maxItems": 1},
    "part": {"oneOf": [{"enum": [1]}, {"enum": [1, 2]}]},
    "names": {"type": "object", "propertyNames": {"pattern": "^x"}, "maxProperties": 0},
}


@pytest.mark.parametrize("name", NO_GRAMMAR)
def test_a_function_is_called_whose_schema_a_grammar_follows_in_part(engine: LocalEngine, name: str) -> None:
    """One such tool of many would make an agent unusable; `strict` refuses it, as OpenAI does."""
    properties = {name: NO_GRAMMAR[name]}
    schema = {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}
    asked = {"model": "toy", "messages": HELLO, "max_tokens": 200, "seed": 2, "tool_choice": "required"}

    def called(**more: Any) -> Any:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, **more}}
        return post(engine, CHAT, {**asked, "parallel_tool_calls": False, "tools": [tool]})

    answer = called().json()["choices"][0]["message"]
    value = json.loads(answer["tool_calls"][0]["function"]["arguments"])[name]
    assert {"to": "@" in str(value), "tags": value in ([], ["a"]), "part": value in (1, 2), "names": value == {}}[name]
    refused = called(strict=True)
    assert refused.status_code == 400
    assert f"parameters.properties.{name}: no grammar" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", NO_GRAMMAR)
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}], ids=["alone", "beside functions"])
def test_an_answer_follows_what_a_grammar_can_of_its_schema(
    engine: LocalEngine, name: str, more: dict[str, Any]
) -> None:
    """Unless it is `strict`, as with functions: Pydantic writes such schemas for ordinary types."""
    properties = {name: NO_GRAMMAR[name]}
    schema = {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}

    def answered(**strict: Any) -> Any:
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}
        return chat(engine, model="toy", max_tokens=200, seed=3, response_format=named, **more)

    for answer in (answered(), answered(strict=False)):
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message.get("tool_calls") or json.loads(message["content"]).keys() == {name}
    refused = answered(strict=True)
    assert refused.status_code == 400
    assert f"json_schema.schema.properties.{name}: no grammar" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"maxProperties": 0},
        {"type": None, "maxProperties": 0},
        {"type": "object", "properties": None, "required": None, "additionalProperties": False},
    ],
    ids=str,
)
def test_arguments_are_an_object_where_the_schema_says_nothing_of_it(
    engine: LocalEngine, schema: dict[str, Any]
) -> None:
    """As tools without parameters come from MCP servers."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"model": "toy", "messages": HELLO, "max_tokens": 100, "tool_choice": "required", "seed": 1}
    answer = post(engine, CHAT, {**asked, "parallel_tool_calls": False, "tools": [tool]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_schema_at_fault_is_named_to_the_innermost_part() -> None:
    bad = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "text"}]}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    error = chat(DoubleEngine(), tools=tools).json()["error"]
    assert error["param"] == "tools[2].function.parameters"
    assert error["message"].startswith("tools[2].function.parameters.properties.a.anyOf[1]: ")
    # Its own fault, not the first of all.
    two = {"type": "object", "properties": {"a": {"pattern": "(?=a)"}, "b": {"uniqueItems": True}}}
    strict = [{"type": "function", "function": {"name": "f", "parameters": two, "strict": True}}]
    message = chat(DoubleEngine(), tools=strict).json()["error"]["message"]
    assert "parameters.properties.a: " in message
    assert "look-around" in message
    named = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"$ref": "#/$defs/none"}}}
    error = chat(DoubleEngine(), response_format=named).json()["error"]
    assert "'/$defs/none' does not exist" in error["message"]
