"""Constrained decoding: llguidance grammars from JSON schemas, and an answer's state in its grammar.

The engine masks the target's logits before it emits a token. The mask depends on the answer so far and on nothing else,
so drafts do not change the text: a proposal is accepted when it is the token that the masked target emits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from speculator.errors import RequestError

JsonSchema = Mapping[str, Any]
_AS_PYTHON_WRITES_IT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Only one way to write each value: small models add white space without end where a grammar lets them."""
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties")
_MAX_CHARS = 1000
"""Of a format's name or a pattern that a grammar may be able to follow."""
# Of JavaScript's regular expressions, which JSON Schema has.
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_INNERMOST_GROUP = re.compile(r"\([^()]*\)")
_REPEATS_NOTHING = re.compile(r"(?:^|[|(])[*+]|(?:^|\|)\?")


def json_text(schema: JsonSchema, *, lenient: bool = False) -> str:
    """`schema` as JSON, with llguidance's options for white space and without what it refuses needlessly. `lenient`:
    also without the keywords that it cannot follow.
    """
    options = {**_AS_PYTHON_WRITES_IT, "lenient": lenient}
    return json.dumps({**_without_annotations(schema, lenient), "x-guidance": options})


def _without_annotations(schema: Any, lenient: bool) -> Any:
    """A schema without keywords that demand nothing: nulls, formats that llguidance does not know, which JSON Schema
    takes for annotations, `uniqueItems: false`, and that names be strings. `lenient`: also without patterns that are
    right, but not for llguidance.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: value for name, value in schema.items() if value is not None or name == "const"}
    for name in ("format", "pattern") if lenient else ("format",):
        # A longer one is not looked at, since the answer would be kept with it.
        if isinstance(value := kept.get(name), str) and (len(value) > _MAX_CHARS or _is_ignored(name, value)):
            del kept[name]
    for name, nothing in (("uniqueItems", False), ("propertyNames", {"type": "string"})):
        if kept.get(name) == nothing:
            del kept[name]
    for name in kept.keys() & {*_MAPS_OF_SCHEMAS, *_LISTS_OF_SCHEMAS, *_SCHEMAS}:
        inner = kept[name]
        if name in _MAPS_OF_SCHEMAS and isinstance(inner, Mapping):
            kept[name] = {key: _without_annotations(each, lenient) for key, each in inner.items()}
        elif isinstance(inner, list):
            kept[name] = [_without_annotations(each, lenient) for each in inner]
        elif name in _SCHEMAS:
            kept[name] = _without_annotations(inner, lenient)
    return kept


@lru_cache(maxsize=256)
def _is_ignored(keyword: str, value: str) -> bool:
    """Whether llguidance cannot follow this `format` or `pattern`, although it is none that no library could."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", keyword: value}))
    return bool(LLMatcher.validate_grammar(grammar)) and not (keyword == "pattern" and _is_broken(value))


def _is_broken(pattern: str) -> bool:
    """Whether a bracket of a regular expression has no partner, or a repetition repeats nothing."""
    rest = _ESCAPE_OR_CLASS.sub("x", pattern)
    is_broken = bool(_REPEATS_NOTHING.search(rest))
    while (shorter := _INNERMOST_GROUP.sub("x", rest)) != rest:
        rest = shorter
    return is_broken or any(bracket in rest for bracket in "()[")


def json_grammar(schema: JsonSchema, *, lenient: bool = False) -> str:
    """The grammar of one JSON value of this schema; `lenient` as for `json_text`."""
    return LLMatcher.grammar_from_json_schema(json_text(schema, lenient=lenient))


def check_schema(schema: JsonSchema, *param: str | int, lenient: bool = False) -> None:
    """Raise RequestError where llguidance cannot use a schema; `param` is the path of the body's field that holds it.
    The error names the innermost part at fault. `lenient` as for `json_text`.
    """
    if fault := _fault(schema, lenient):
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        path, fault = _innermost(fault, schema, shared, lenient)
        where = _joined(*param, *path)
        raise RequestError(f"{where}: no grammar can be made of this schema: {fault}", param=_joined(*param))


def _joined(*path: str | int) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _fault(schema: JsonSchema, lenient: bool) -> str:
    """llguidance's error for a schema, on one line; empty for a usable one."""
    return " ".join(LLMatcher.validate_grammar(json_grammar(schema, lenient=lenient)).split())


def _innermost(fault: str, schema: JsonSchema, shared: JsonSchema, lenient: bool) -> tuple[list[str | int], str]:
    """The path to the innermost schema that is invalid by itself, and its fault; its references point into `shared`."""
    for path, inner in _inner_schemas(schema):
        if isinstance(inner, Mapping) and (its_fault := _fault({**shared, **inner}, lenient)):
            deeper, fault = _innermost(its_fault, inner, shared, lenient)
            return [*path, *deeper], fault
    return [], fault


def _inner_schemas(schema: JsonSchema) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(inner := schema.get(name), Mapping):
            yield from (((name, key), value) for key, value in inner.items())
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(inner := schema.get(name), list):
            yield from (((name, index), value) for index, value in enumerate(inner))
    yield from (((name,), schema[name]) for name in _SCHEMAS if name in schema)


class GrammarVocabulary:
    """A tokenizer's tokens as bytes, in llguidance's tree for computing masks; made in 0.5 s for 49,152 tokens."""

    def __init__(self, backend: Any, *, end_token_ids: Collection[int], hidden_token_ids: Collection[int]) -> None:
        """`backend`: a `tokenizers.Tokenizer`; hidden tokens have no text, so no grammar allows them.

        Raises RequestError for a tokenizer that llguidance cannot read.
        """
        # config.json may name end tokens beyond the vocabulary, which llguidance would refuse.
        known_end_token_ids = sorted(set(backend.get_vocab(with_added_tokens=True).values()) & set(end_token_ids))
        try:
            self._tokens = LLTokenizer(backend.to_str(), eos_token=known_end_token_ids or None)
        except ValueError as error:
            message = f"no answer can follow a grammar with this model's tokenizer: {error}"
            raise RequestError(message, code="unsupported_parameter") from None
        self._hidden = sorted(set(hidden_token_ids) - set(end_token_ids))

    def matcher(self, grammar: str) -> GrammarMatcher:
        """A matcher for a new answer. Raises RequestError for a grammar that is not usable."""
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            fault, _, _ = matcher.get_error().partition("<backtrace>")
            raise RequestError(f"no grammar can be made of this: {fault.strip()}")
        return GrammarMatcher(matcher, self._tokens.vocab_size, self._hidden)


class GrammarMatcher:
    """One answer's state in its grammar; for one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, hidden: Sequence[int]) -> None:
        self._matcher, self._hidden = matcher, hidden
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._num_taken = 0
        self.num_tokens: int | None = None
        """Length of the whole answer, once the grammar allows no further token; None before."""

    @property
    def fault(self) -> str:
        """Why matching failed: for example, the grammar exceeds the library's limits. Empty while it works."""
        return self._matcher.get_error().partition("<state>")[0].strip()

    def forbidden(self, size: int) -> np.ndarray:
        """Which of the first `size` token ids may not come next: [size] bool. All False once the answer is complete."""
        if self.num_tokens is not None:
            return np.zeros(size, np.bool_)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            return np.zeros(size, np.bool_)
        allowed = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:size]
        # The embedding may have more rows than the tokenizer has tokens.
        allowed = np.pad(allowed, (0, size - len(allowed)))
        allowed[self._hidden] = 0
        forbidden: np.ndarray = allowed == 0
        return forbidden

    def take(self, token: int) -> None:
        """Append `token` to the answer."""
        if self.num_tokens is None:
            self._num_taken += 1
            self._matcher.consume_token(token)
            if self._matcher.is_stopped():
                self.num_tokens = self._num_taken
