"""Structured output: the fields `response_format`, `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from serving.engine import Tool
from serving.gateway.body import Strict, invalid
from serving.grammar import check_schema

MAX_TOOLS = 128
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# OpenAI's pattern, and what the Model Context Protocol allows beyond it.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]


class NamedSchema(Strict):
    """A JSON schema. Answers follow it as far as a grammar can; where it cannot wholly, OpenAI's `strict` refuses."""

    ignores_unknown, place = True, "response_format.json_schema."

    name: Name
    description: str = ""
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Strict):
    ignores_unknown, place = True, "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema_is_there(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("missing", "is needed where 'type' is 'json_schema'", "json_schema")
        return self

    @property
    def is_lenient(self) -> bool:
        """Whether an answer need follow only what a grammar can of the schema."""
        return self.json_schema is None or not self.json_schema.strict

    def wanted_schema(self) -> dict[str, Any] | None:
        """The schema of the format; None for plain text. Raises RequestError for an unusable one."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.definition
        check_schema(schema, "response_format", "json_schema", "schema", lenient=self.is_lenient)
        return schema


class Function(Strict):
    """A function that the model may call. Arguments follow `parameters` as far as a grammar can; where it cannot
    wholly, OpenAI's `strict` refuses them.
    """

    ignores_unknown, place = True, "tools[].function."

    name: Name
    description: str = ""
    parameters: dict[str, Any] = _NO_PARAMETERS
    strict: bool = False


class FunctionTool(Strict):
    ignores_unknown, place = True, "tools[]."

    type: Literal["function"]
    function: Function

    def for_template(self) -> Tool:
        return self.model_dump(exclude={"function": {"strict"}})


class FunctionName(Strict):
    name: str


class ChosenFunction(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: object, parsed: ValidatorFunctionWrapHandler) -> object:
    try:
        return parsed(value)
    except ValidationError:
        # One error for all forms: those of each alone name no field of the body.
        message = (
            'must be "none", "auto", "required", {"type": "function", "function": {"name": "..."}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        )
        raise invalid("tool_choice", message) from None


ToolChoice = Annotated[Literal["none", "auto", "required"] | ChosenFunction | AllowedChoice, WrapValidator(_choice)]
Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


def may_be_called(tools: Sequence[FunctionTool], choice: ToolChoice) -> Sequence[FunctionTool]:
    """The functions that `tool_choice` allows. Raises a validation error for equal names or an unknown choice."""
    names = [tool.function.name for tool in tools]
    if twice := [index for index, name in enumerate(names) if name in names[:index]]:
        raise invalid("duplicate", "an earlier function has this name", "tools", twice[0], "function", "name")
    match choice:
        case ChosenFunction():
            wanted = {choice.function.name}
        case AllowedChoice():
            wanted = {each.function.name for each in choice.allowed_tools.tools}
        case _:
            wanted = set() if choice == "none" else set(names)
    if not wanted.issubset(names) or (must_call(choice) and not wanted):
        raise invalid("no_function", "there is no such function in 'tools'", "tool_choice")
    return [tool for tool in tools if tool.function.name in wanted]


def must_call(choice: ToolChoice) -> bool:
    """Whether an answer has to call a function."""
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    return mode not in ("none", "auto")
