"""Tool calls in an answer's text, in the format of Hermes models, which many other models use.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

If a model's chat template does not write tools that way, they go into the system message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from serving.engine import Message, Tool
from serving.grammar import JsonSchema, json_text

OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_BEGIN, _END = f"{OPENING}\n", f"\n{_CLOSING}"
_EXPLAINED = """You can call functions. These are their JSON schemas:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments like this:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def in_plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation for a chat template without tools: roles system, user and assistant, and text only."""
    plain: list[Message] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        if role == "tool":
            # In one message, since many such templates refuse two of the user's in a row.
            said = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            plain.append({"role": "user", "content": said})
        else:
            plain += map(_plain, group)
    if not tools:
        return plain
    explained = _EXPLAINED.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{explained}"}, *plain[1:]]
    return [{"role": "system", "content": explained}, *plain]


def _plain(message: Message) -> Message:
    calls = [f"{_BEGIN}{json.dumps(call['function'])}{_END}" for call in message.get("tool_calls", ())]
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    return {**plain, "content": "\n".join(filter(None, (message["content"], *calls)))}


_GRAMMAR = """%llguidance {{}}
start: {start}
call: "{opening}" rest
own_call: call{own_call}
said_call: said rest{said_call}
said[lazy]: TEXT "{opening}"
rest: "\\n" body "\\n{closing}"
body: {bodies}
TEXT: /(.|\\n)*/
{arguments}
"""
_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_STRING = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?$)')
"""Of JSON; the last may be cut."""


def calls_grammar(
    tools: Sequence[Tool], *, must_call: bool, several: bool, answer: JsonSchema | None, lenient: bool, has_token: bool
) -> str:
    """The grammar of an answer that may call these functions: with `must_call` at least once and nothing else, without
    it with any text before and after, or in its place a JSON value of the schema `answer`; with `several` more than
    once. `lenient`: see `json_text`, for `answer`; arguments always are. `has_token`: the vocabulary has a token for
    `OPENING`, which a grammar names apart from its text.
    """
    functions = [tool["function"] for tool in tools]
    bodies = [f'{json.dumps(_NAME + each["name"] + _ARGUMENTS)} arguments_{n} "}}"' for n, each in enumerate(functions)]
    # Each schema stands alone: its references count from its own root. Arguments are an object also where it is `{}`.
    schemas = ({**each["parameters"], "type": each["parameters"].get("type") or "object"} for each in functions)
    arguments = [f"arguments_{n}: %json {json_text(schema, lenient=True)}" for n, schema in enumerate(schemas)]
    if must_call:
        start = 'call ("\\n" call)*' if several else "call"
    elif answer is None:
        start = "said_call* TEXT" if several else "said_call | TEXT"
    else:
        start = 'own_call ("\\n" own_call)* | answer' if several else "own_call | answer"
        arguments.append(f"answer: %json {json_text(answer, lenient=lenient)}")
    return _GRAMMAR.format(
        start=start,
        own_call=f" | {OPENING} rest" if has_token else "",
        said_call=f" | TEXT {OPENING} rest" if has_token else "",
        opening=OPENING,
        closing=_CLOSING,
        bodies=" | ".join(bodies),
        arguments="\n".join(arguments),
    )


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """JSON; its beginning where the answer was cut."""


class ToolCallReader:
    """Finds tool calls in streamed text. Holds back what may become a call, and white space after a call."""

    def __init__(self) -> None:
        self._held, self._is_behind_call, self.num_calls = "", False, 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; return the text and the calls that are complete now, in order."""
        self._held += text
        found: list[str | ToolCall] = []
        # A line break within a call's JSON is written as an escape, so the first real one ends it.
        while (start := self._held.find(_BEGIN)) >= 0 and (end := self._held.find(_END, start + len(_BEGIN))) >= 0:
            found += self._shown(self._held[:start])
            body = self._held[start + len(_BEGIN) : end]
            # Cut, not decoded: Python would change numbers, and fails on very long or deep ones.
            name, _, arguments = body.removeprefix(_NAME).partition(_ARGUMENTS)
            found.append(ToolCall(name, arguments.removesuffix("}")))
            self.num_calls, self._is_behind_call = self.num_calls + 1, True
            self._held = self._held[end + len(_END) :]
        certain = start if start >= 0 else len(self._held) - _num_begun(self._held)
        if shown := self._shown(self._held[:certain]):
            self._held, self._is_behind_call = self._held[certain:], False
        return found + shown

    def finish(self) -> list[str | ToolCall]:
        """The held-back rest at the end of the answer: a call that was cut, or, without its whole name, text."""
        before, _, body = self._held.partition(_BEGIN + _NAME)
        name, is_whole, _ = body.partition('"')
        if not is_whole:
            return self._shown(self._held)
        self.num_calls += 1
        arguments = body.partition(_ARGUMENTS)[2].partition("\n")[0]
        structure = _STRING.sub("", arguments)
        if structure.count("}") > structure.count("{"):
            arguments = arguments.removesuffix("}")
        return [*self._shown(before), ToolCall(name, arguments)]

    def _shown(self, text: str) -> list[str | ToolCall]:
        return [text] if text and not (self._is_behind_call and text.isspace()) else []


def _num_begun(text: str) -> int:
    """How many characters at the end of `text` may begin a call."""
    return next((n for n in range(min(len(_BEGIN), len(text)), 0, -1) if _BEGIN.startswith(text[-n:])), 0)
