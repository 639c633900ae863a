"""Bounds on the memory of SGLang's grammars, with stand-ins for its objects."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from serving.sglang.plugin import grammars, hooks


def _schema(**field: Any) -> dict[str, Any]:
    return {"json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "string", **field}}})}


def _tag(**content: Any) -> dict[str, Any]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": content})}


@pytest.mark.parametrize(
    "params",
    [
        # 1 kB that compiles to 1.5 GB.
        {"regex": "|".join(f"[a-z]{{1,{300000 + number}}}{number}" for number in range(60))},
        {"regex": ".?" * 2500},
        {"ebnf": "root ::= " + "[a-z]{1,1000} " * 60},
        _schema(pattern="^" + "[a-z]{500}" * 40),
        {"json_schema": '{"pattern": "' + ".?" * 2500 + '", "pattern": "a"}'},
        {"json_schema": r'{"pattern": "' + r"[a-z]\u007b500}" * 40 + '"}'},
        {"json_schema": json.dumps({"patternProperties": {".?" * 2500: {}}})},
        {"json_schema": json.dumps({"anyOf": [{"type": "string", "maxLength": 300 + more} for more in range(500)]})},
        {"json_schema": json.dumps({"enum": ["a" * 300_000]})},
        {"json_schema": "[" * 100_000 + "]" * 100_000},
        _tag(type="regex", pattern="[a-z]{1,500}" * 40),
        _tag(type="grammar", grammar="root ::= " + "[a-z]{1,1000} " * 60),
        _tag(type="or", elements=[{"type": "repeat", "min": 0, "max": 999, "content": {}} for _ in range(40)]),
    ],
)
def test_a_grammar_that_may_take_gigabytes_is_refused(params: dict[str, Any]) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    with pytest.raises(ValueError, match=r"too much memory|nested too deeply"):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params=params), [0])


def test_usual_grammars_are_taken() -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    tools = [
        {
            "name": f"tool_{number}",
            "parameters": {
                "type": "object",
                "description": "What this tool does, and when. " * 10,
                "properties": {
                    "id": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                    "text": {"type": "string", "maxLength": 5000},
                    "pattern": {"type": "array", "maxItems": 1000, "items": {"type": "string"}},
                },
            },
        }
        for number in range(30)
    ]
    uuid = "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|0{8}-0000)$"
    for taken in (
        _schema(anyOf=[{"type": "string", "format": "uuid", "pattern": uuid} for _ in range(40)]),
        _schema(anyOf=[{"type": "string", "minLength": 1, "maxLength": 255} for _ in range(400)]),
        {"regex": r"\d{4}-\d{2}-\d{2}T[^\n]{1,2000}"},
        {"json_schema": json.dumps({"anyOf": tools}), "regex": None},
        {"json_schema": "$$ANY$$"},
        _tag(type="json_schema", json_schema={"type": "string", "minLength": 1}),
    ):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params=taken), [0])


class _Compiled(SimpleNamespace):
    """A compiled grammar of SGLang's, as large as said."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(ctx=SimpleNamespace(memory_size_bytes=num_bytes))


class _Backend:
    """SGLang's grammar backend, as far as it keeps grammars."""

    def __init__(self, cached_bytes: int = 0) -> None:
        self.cache: dict[tuple[str, str], Any] = {}
        self.grammar_compiler = SimpleNamespace(get_cache_size_bytes=lambda: cached_bytes, clear_cache=self.cache.clear)

    def reset(self) -> None:
        self.cache.clear()


def test_a_grammar_that_turned_out_too_large_is_given_up() -> None:
    grammars.after_compilation(_Compiled(10**6), _Backend(), ("regex", "a"), False)
    grammars.after_compilation(SimpleNamespace(error_message="invalid"), object(), ("regex", "("), False)
    with pytest.raises(ValueError, match="too much memory"):
        grammars.after_compilation(_Compiled(2 * 10**8), _Backend(), ("regex", "a"), False)
    full = _Backend(cached_bytes=10**9)
    full.cache["regex", "b"] = _Compiled(1)
    grammars.after_compilation(_Compiled(1), full, ("regex", "a"), False)
    assert not full.cache


@pytest.mark.parametrize("grammar", [_Compiled(10**8), SimpleNamespace(grammar=_Compiled(10**8))])
def test_grammars_are_kept_up_to_a_size(grammar: object) -> None:
    backend, kept, most = _Backend(), grammars.KeptGrammars(), 0
    for number in range(20):
        kept.before_keeping(backend, ("regex", str(number)), grammar)
        backend.cache["regex", str(number)] = grammar
        most = max(most, len(backend.cache))
    assert most == 5, "of 100 MB each"
    assert len(backend.cache) == 5, "the newest"


def test_refused_grammars_are_not_kept_for_ever_either() -> None:
    backend, kept = _Backend(), grammars.KeptGrammars()
    for number in range(6):
        kept.before_keeping(backend, ("json", str(number)), SimpleNamespace(error_message="invalid"))
        backend.cache["json", str(number)] = None
    assert len(backend.cache) == 6
    kept.before_keeping(backend, ("json", "a" * (1 << 29)), SimpleNamespace(error_message="invalid"))
    assert not backend.cache
