"""The shell commands that the documentation shows, as the words that a shell would make of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_MARKDOWN = MarkdownIt().enable("table")
_PROGRAM = re.compile(r"(?:slipstream|make|torchrun|python -m) ")
_SHELL = ("", "sh", "bash", "shell", "console")
_PICTURE = "─▶"
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


PARSED = {
    "slipstream serve --engine sglang": "needs SGLang; tests/slipstream/start/test_sglang.py starts it on a stand-in",
    "slipstream sglang": "needs SGLang; tests/deploy/test_services_gpu.py starts it on a stand-in",
    "slipstream gateway": "needs SGLang; tests/deploy/test_services_gpu.py starts it in front of a stand-in",
    "sglang-router": "not installed here; tests/sglang/test_pool.py checks its flags, and runs one",
    "slipstream demo": "takes minutes; tests/slipstream/test_loop.py runs it on the toy model",
    "slipstream doctor --engine sglang": "needs SGLang and a GPU",
    "slipstream --install-completion": "changes the user's shell; tests/slipstream/cli/test_main.py asks what",
    "torchrun": "two processes; tests/trainer/test_ranks.py runs them",
    "make": "sets up environments, runs for minutes, or is what runs this test",
    "docker": "no container engine here; tests/deploy checks the files and starts what it can of their commands",
    "python": "benchmarks take minutes to hours; their own tests run them small",
    "pip": "installs packages",
    "git": "needs the network",
    "cd": "no program",
    "cp": "prepares a file of the reader's",
    "export": "no program",
    "redis-cli": "not in the wheel that brings the server",
    "kubectl": "no cluster here; tests/deploy holds the manifests against the schemas and against the programs",
    "secrets.sh": "tests/deploy/test_kubernetes.py runs it",
}
"""What only parses, and why. Everything else runs."""


@dataclass(frozen=True)
class Command:
    """`environment` are the assignments before it; `words` begin with the program's bare name."""

    page: str
    line: str
    environment: tuple[str, ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def fenced() -> list[Command]:
    """Every command in a block of code, in the order of the pages; those that stand there twice, once."""
    found = {command.words: command for page in PAGES for command in in_blocks(page)}
    return list(found.values())


def mentioned() -> list[Command]:
    """Commands with arguments within a sentence, `…` and all."""
    tokens = ((page, token) for page in PAGES for token in _MARKDOWN.parse(page.read_text()))
    spans = ((page, span) for page, token in tokens for span in token.children or () if span.type == "code_inline")
    return [_command(page, span.content) for page, span in spans if _PROGRAM.match(span.content)]


def only_parses(command: Command) -> bool:
    line = " ".join(command.words)
    return any(line == start or line.startswith(f"{start} ") for start in PARSED)


def in_blocks(page: Path) -> Iterator[Command]:
    """The commands in a page's blocks of code, fenced in one way or another or indented."""
    for token in _MARKDOWN.parse(page.read_text()):
        if token.type in ("fence", "code_block") and token.info in _SHELL and _PICTURE not in token.content:
            for line in token.content.replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    yield _command(page, line)


def _command(page: Path, line: str) -> Command:
    words = shlex.split(line, comments=True)
    first = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    program = words[first].rsplit("/", 1)[-1] if first < len(words) else ""
    shown = " ".join(shlex.join(words).split())
    return Command(page.name, shown, tuple(words[:first]), (program, *words[first + 1 :]))
