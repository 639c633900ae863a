"""Every command of the documentation parses. tests/slipstream/test_documented_commands.py runs those that can run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from slipstream.cli.main import app
from slipstream.settings import known_variables
from tests.deploy.compose import GPU, load
from tests.docs.commands import PARSED, ROOT, Command, fenced, in_blocks, mentioned, only_parses
from tests.docs.kubectl import parse_kubectl
from tests.fixtures.command_line import check_slipstream

FENCED = fenced()
VERL = "verl.trainer.main_ppo"
"""Of an environment of its own; tests/examples/test_verl.py composes its configuration there."""


@pytest.mark.parametrize("command", [each for each in FENCED if only_parses(each)], ids=str)
def test_it_parses(command: Command) -> None:
    parse(command)


@pytest.mark.parametrize("command", mentioned(), ids=str)
def test_what_a_sentence_mentions_parses(command: Command) -> None:
    parse(command, whole=False)


def test_every_page_is_read() -> None:
    assert {"README.md", "monitor.md", "your-model.md", "rollouts.md"} <= {command.page for command in FENCED}
    programs = {each.words[0] for each in (*FENCED, *mentioned())}
    assert programs <= {"slipstream", "curl", *(start.split()[0] for start in PARSED)}


@pytest.mark.parametrize(
    "block", ["```sh\nmake x\n```", "~~~\nmake x\n~~~", "    make x", "1. First:\n\n   ````bash\n   make x\n   ````"]
)
def test_a_command_is_found_in_every_kind_of_block(block: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{block}\n")
    assert [command.words for command in in_blocks(page)] == [("make", "x")]


def test_an_unknown_command_is_found() -> None:
    wrong = ("kubectl scale --namespace slipstream deployment/redis --replicas=1", "kubectl aply -k deploy")
    for line in ("slipstream sreve", "slipstream version --no-such", "make nothing", "rm -r x", *wrong):
        with pytest.raises(AssertionError):
            parse(Command("page", line, (), tuple(line.split())))
    with pytest.raises(AssertionError):
        parse(Command("page", "", ("SLIPSTREAM_NO_SUCH=1",), ("slipstream", "version")))


# -- parsing -------------------------------------------------------------------------------------------------------


def parse(command: Command, *, whole: bool = True) -> None:
    """Check a command against the real program. `whole`: it is complete, nothing is left out of it."""
    for assignment in command.environment:
        name = assignment.partition("=")[0]
        assert not name.startswith("SLIPSTREAM_") or name in known_variables(app), f"nothing reads {name}"
    program, *rest = command.words
    match program:
        case "slipstream":
            check_slipstream(rest, whole=whole)
        case "make":
            _parse_make(rest)
        case "torchrun":
            parsed = get_args_parser().parse_args([word for word in rest if whole or word != "…"])
            assert parsed.module
            assert parsed.training_script == "slipstream"
            check_slipstream(parsed.training_script_args, whole=whole)
        case "python":
            assert rest[0] == "-m"
            if rest[1] == "slipstream":
                check_slipstream(rest[2:], whole=whole)
            elif rest[1] != VERL:
                assert importlib.util.find_spec(rest[1]) is not None, rest[1]
        case "docker" if rest[0] == "build":
            assert (ROOT / rest[rest.index("-f") + 1]).is_file()
        case "docker":
            _parse_compose(rest)
        case "secrets.sh":
            assert (rest[:2], parse_kubectl(rest[2:])) == (["|", "kubectl"], [])
        case "kubectl":
            inside = parse_kubectl(rest)
            if inside[:3] == ["python", "-m", "slipstream"]:
                check_slipstream(inside[3:], whole=whole)
            else:
                assert inside[:1] in ([], ["tar"]), inside
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for named in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(named.split(",")) <= set(extras), named
        case "export":
            parse(Command(command.page, command.line, tuple(rest), ("cd",)))
        case "cp":
            assert (ROOT / rest[0]).exists(), rest[0]
        case "sglang-router":
            assert rest[0] == "launch", "its flags are checked where it is installed: tests/sglang/test_pool.py"
        case "cd" | "git" | "redis-cli" | "curl":
            pass
        case _:
            raise AssertionError(f"{program} is not a command that these pages may show")


def _parse_make(words: Sequence[str]) -> None:
    # Without what the make that runs these tests was given.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "ARGS")}
    shown = subprocess.run(["make", "-n", *words], cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        if match := re.search(r"-m slipstream (.*)", line):
            check_slipstream(shlex.split(match[1]), whole=True)


def _parse_compose(words: Sequence[str]) -> None:
    """Files exist, and what is named after the verb are services of them."""
    assert words[0] == "compose", words
    files, rest = [], list(words[1:])
    while rest[:1] == ["-f"]:
        files.append(ROOT / rest[1])
        del rest[:2]
    services = load(files or GPU, {"SLIPSTREAM_MODEL": "some/model"})["services"]
    verb, *after = rest
    assert verb in {"up", "down", "logs", "exec", "run", "ps", "pull", "build", "restart", "stop", "config"}, verb
    if verb in {"logs", "exec", "run", "restart", "stop"}:
        named = [word for word in after if not word.startswith("-")]
        assert not named or named[0] in services, named
    if "slipstream" in after:
        check_slipstream(after[after.index("slipstream") + 1 :], whole=True)
