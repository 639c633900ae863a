"""Bounds on the memory of grammars in SGLang, which compiles any and keeps all.

xgrammar compiles a grammar to tables of tokens, one for each state. Most JSON schemas take less than 1 MB, but
`[a-z]{1,1000}` takes 21 MB at 128,000 tokens, and a regex may repeat that. So a grammar that may take gigabytes is
refused before it is compiled, and one that takes more than 100 MB afterwards. When all that are kept take 512 MB, they
are dropped. All ranks must decide the same. They do, since a grammar's size depends on its text and the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_ANY_JSON = "$$ANY$$"
_MOST_WEIGHT = 4000
"""In units of which each takes 0.26 MB at most, at 128,000 tokens. So one grammar takes 1 GB while it is compiled."""
_CHARS_OF_UNIT = 64
_COSTLY = re.compile(r"\\[a-zA-Z]|(?<!\\)[\[.?*+|]")
"""Parts of a regex that are one unit each: classes, repetitions and alternatives."""
_MOST_REPEATS = 128
"""From about this bound on, xgrammar's tables for a repetition no longer grow."""
_LENGTHS = ("minLength", "maxLength")
_LENGTH_WEIGHT = 10
"""Of the bounds of a string's length, which take 2.4 MB, whatever the length; equal ones take it once."""
_BOUNDS = re.compile(r"\{(\d*),?(\d*)\}")
_MOST_BYTES = 100 << 20
"""Of one compiled grammar."""
_MOST_KEPT_BYTES = 512 << 20
_OVERHEAD_BYTES = 4096


def check_grammars(params: Mapping[str, Any]) -> None:
    """Refuse grammars that may take gigabytes; `params` are a request's sampling parameters. Raises ValueError."""
    for name in GRAMMARS:
        text = params.get(name)
        if isinstance(text, str) and _weight(name, text) > _MOST_WEIGHT:
            raise ValueError(
                f"{name} may take too much memory: shorten it and its patterns, or lower the bounds of repetitions"
            )


def _weight(name: str, text: str) -> int:
    weight = len(text) // _CHARS_OF_UNIT
    if weight > _MOST_WEIGHT or text == _ANY_JSON:
        return weight
    if name == "regex":
        return _weight_of_regex(text)
    return weight + (_weight_of_bounds(text) if name == "ebnf" else _weight_of_json(text))


def _weight_of_json(text: str) -> int:
    """Of a schema or structural tag: of all that its objects hold, also where a name comes twice. Raises ValueError."""
    weight, lengths = 0, set[str]()

    def add(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal weight
        for name, value in pairs:
            if name == "pattern" and isinstance(value, str):
                weight += _weight_of_regex(value)
            elif name == "patternProperties" and isinstance(value, dict):
                weight += sum(map(_weight_of_regex, value))
            elif name == "grammar" and isinstance(value, str):
                weight += _weight_of_bounds(value)
            elif (name, value) == ("type", "repeat"):
                weight += _MOST_REPEATS
        if bounds := sorted(f"{name} {value}" for name, value in pairs if name in _LENGTHS):
            lengths.add(", ".join(bounds))
        return dict(pairs)

    try:
        json.loads(text, object_pairs_hook=add)
    except RecursionError as error:
        raise ValueError("the grammar is nested too deeply") from error
    return weight + _LENGTH_WEIGHT * len(lengths)


def _weight_of_regex(text: str) -> int:
    return len(text) // _CHARS_OF_UNIT + len(_COSTLY.findall(text)) + _weight_of_bounds(text)


def _weight_of_bounds(text: str) -> int:
    return sum(min(int(bound or 0), _MOST_REPEATS) for bounds in _BOUNDS.findall(text) for bound in bounds)


def after_compilation(grammar: Any, backend: Any, *_: Any) -> None:
    """Give up a grammar that turned out too large; raises ValueError, by which SGLang refuses its request alone."""
    compiler = getattr(backend, "grammar_compiler", None)
    if compiler is not None and compiler.get_cache_size_bytes() > _MOST_KEPT_BYTES:
        compiler.clear_cache()
    if _num_bytes(grammar) > _MOST_BYTES:
        raise ValueError("it takes too much memory: lower the bounds of repetitions")


class KeptGrammars:
    """The compiled grammars that SGLang's backend keeps for later requests."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def before_keeping(self, backend: Any, key: tuple[str, str], grammar: Any) -> None:
        """Let SGLang drop all of them, as a flush of its cache does, when they have grown too large."""
        num_bytes = _OVERHEAD_BYTES + len(key[1]) + _num_bytes(grammar)
        self._num_bytes += num_bytes
        if self._num_bytes > _MOST_KEPT_BYTES:
            backend.reset()
            self._num_bytes = num_bytes


def _num_bytes(grammar: Any) -> int:
    # A reasoning parser's grammar has the other one inside.
    compiled = getattr(getattr(grammar, "grammar", None) or grammar, "ctx", None)
    return 0 if compiled is None else int(compiled.memory_size_bytes)
