"""What all commands have in common: quick to start, completed by the shell, JSON where asked, the page of options."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from rich.console import Console
from typer.testing import CliRunner

from docs import tables
from slipstream import __main__, terminal
from slipstream.cli.main import app
from slipstream.cli.panels import FIRST
from slipstream.logs import configure_logs
from slipstream.models import BUNDLED_MODEL, INSTALL_DEMO, resolve_model
from slipstream.settings import commands
from speculator.draft.checkpoint import model_key, model_name
from speculator.errors import ConfigError
from tests.slipstream.conftest import SampleEnd

Refused = Callable[..., str]

WITHOUT_JSON = {
    "slipstream serve": "a service: its log is JSON",
    "slipstream sglang": "a service",
    "slipstream gateway": "a service",
    "slipstream train": "a service",
    "slipstream traces export": "prints JSON lines",
    "slipstream rollout": "prints JSON lines",
}


def test_completion_starts_without_torch() -> None:
    code = "import sys, slipstream.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "slipstream.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "slipstream.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", "version"],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "cannot write the output (No space left on device)" in line


def test_no_temporary_directory_is_one_line(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may ask for one when it is imported."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null"])
    monkeypatch.setattr("slipstream.cli.main.version", lambda _: tempfile.gettempdir())
    assert "set TMPDIR" in refused("version")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("slipstream do", "doctor"), ("slipstream drafts ro", "rollback"), ("slipstream serve --vocab", "--vocab-from")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    asked = {"_SLIPSTREAM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    script = Path(sys.executable).with_name("slipstream")
    done = subprocess.run([script], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert offered in done.stdout.split(), done.stderr


def test_every_command_prints_json_where_asked() -> None:
    for name, command in commands(app):
        has_json = any("--json" in option.opts for option in command.params)
        assert has_json != (name in WITHOUT_JSON), name


def test_json_is_all_of_standard_output(toy_model: Path, tmp_path: Path) -> None:
    words = ["drafts", "init", "--model", str(toy_model), "--store", str(tmp_path / "drafts"), "--json"]
    made = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(made.stdout) == {"folder": str(tmp_path / "drafts" / "versions" / "000001")}, made.stderr
    assert "fresh draft written" in made.stderr
    shown = CliRunner().invoke(app, ["version", "--json"])
    assert json.loads(shown.stdout).keys() == {"version"}


def test_exit_codes(refused: Refused, invoke: Callable[..., SampleEnd], tmp_path: Path) -> None:
    assert invoke("serve", "--no-such-option").code == 2
    assert refused("traces", "info", tmp_path / "none.rec").startswith("error: ")
    (tmp_path / "groups.jsonl").write_text('{"prompt": "x"}\n')
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            for _ in range(2):
                server.accept()[0].close()

        threading.Thread(target=hang_up).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        ended = invoke("rollout", tmp_path / "groups.jsonl", "--url", url, "--model", "m", "--retry-s", 0)
    assert (ended.code, ended.err.startswith("error: ")) == (1, True)


def test_an_error_is_printed_as_it_is(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Brackets are no markup: advice names an extra, and a path may hold anything."""
    monkeypatch.setattr("slipstream.models.find_spec", lambda name: None)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert INSTALL_DEMO in refused("train", "--model", BUNDLED_MODEL)
    assert "[/red]" in refused("traces", "info", tmp_path / "[/red]")


def test_bad_log_settings_end_the_start(refused: Refused, toy_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_LOG_FORMAT", "xml")
    assert "SLIPSTREAM_LOG_FORMAT" in refused("serve", "--model", toy_model)


def test_bars_move_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        out = io.StringIO()
        monkeypatch.setattr(terminal, "console", Console(file=out, force_terminal=is_terminal))
        with terminal.progress_bar("steps") as bar:
            bar(3, 10)
        with terminal.spinner("reading"):
            pass
        assert ("3/10" in out.getvalue()) == is_terminal


def test_what_is_logged_meanwhile_stands_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=out, force_terminal=True, width=80))
    configure_logs()
    with terminal.spinner("loading") as is_loaded:
        structlog.get_logger().info("ours")
        logging.getLogger("httpx").warning("theirs")
        is_loaded()
        shown = out.getvalue()
        assert "ours" in shown
        assert "theirs" in shown
        terminal.print_status("page")
    assert out.getvalue() == f"{shown}page\n", "nothing moves any more"


def test_the_options_that_most_people_need_come_first() -> None:
    found = {name.removeprefix("slipstream "): command for name, command in commands(app)}
    for name, names in FIRST.items():
        options = [option for option in found[name].params if option.param_type_name == "option"]
        assert [option.name for option in options if option.rich_help_panel is None] == names.split()
        assert [option.name for option in options][: len(names.split())] == names.split()
        assert len(names.split()) <= 10


def test_the_version_in_the_usual_way(invoke: Callable[..., SampleEnd]) -> None:
    assert invoke("--version") == invoke("version")


def test_a_model_of_the_hub_is_called_by_its_id(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder is in the Hugging Face cache its own name is a commit, and changes with the next."""
    served: list[str] = []
    monkeypatch.setattr(
        "slipstream.start.local.run_server", lambda options, _: served.append(options.engine.model_name)
    )
    monkeypatch.setattr("slipstream.start.sglang.exec_sglang", lambda start, **_: served.append(start.model_name))
    hub = Path(shutil.copytree(toy_model, tmp_path / "models--some--Toy-8B" / "snapshots" / ("0123456789" * 4)))
    for command in ("serve", "sglang"):
        for model in (toy_model, hub):
            result = CliRunner().invoke(app, [command, "--model", str(model)], catch_exceptions=False)
            assert result.exit_code == 0, result.output
    assert served == ["toy", "some/Toy-8B"] * 2
    assert model_name(hub) == "some/Toy-8B"
    assert model_key(hub, "f" * 64) == model_key(Path("some/Toy-8B"), "f" * 64) == "toy-8b-ffffffffffff"


def test_a_model_is_called_by_its_folder_however_that_is_typed(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(toy_model)
    (toy_model / "inside").mkdir()
    monkeypatch.chdir(toy_model / "inside")
    assert {model_name(resolve_model(name)) for name in ("..", "../", "../../toy", f"{toy_model}/")} == {"toy"}
    assert model_name(resolve_model(f"{tmp_path}/link/")) == "link"
    monkeypatch.chdir(toy_model)
    assert model_key(resolve_model("."), "f" * 64) == model_key(toy_model, "f" * 64) == "toy-ffffffffffff"
    (toy_model / "inside").rmdir()


# -- docs/reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", tables.PAGES)
def test_the_generated_pages_are_fresh(of: Callable[[], str]) -> None:
    path = tables.path_of(of)
    assert path.read_text() == tables.page(path, of()), "run `make docs`"


def test_every_setting_and_option_is_explained() -> None:
    for variable, *_, meaning in (row for rows in tables.variable_rows().values() for row in rows):
        assert meaning, f"{variable}: write a docstring below the field"
    for name, command in commands(app):
        for option in command.params:
            assert option.help, f"{name} {option.name}"


def test_an_option_stands_before_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    [train] = [command for name, command in commands(app) if name == "slipstream train"]
    monkeypatch.setenv("SLIPSTREAM_TRAINER_SEED", "7")
    monkeypatch.setenv("SLIPSTREAM_TRAINER_NUM_THREADS", "2")
    context = train.make_context("train", ["--model", "m", "--seed", "8"])
    assert (context.params["seed"], context.params["threads"]) == (8, 2)


def test_what_a_typed_folder_has_stands_before_all_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise `tenants erase` would report that it erased, and look at another trainer's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    variables = {"redis_url": "REDIS_URL", "store": "STORE", "state": "TRAINER_STATE_DIR"}
    for variable in variables.values():
        monkeypatch.setenv(f"SLIPSTREAM_{variable}", "/elsewhere")
    found = dict(commands(app))
    for name, words in {"tenants erase": ["anna", "--model", "m"], "doctor": []}.items():
        context = found[f"slipstream {name}"].make_context(name, [*words, "--data-dir=~/data"])
        state = f"{tmp_path}/data/trainer-state"
        # This server keeps Redis and store elsewhere.
        assert {option: str(context.params[option]) for option in variables} == {
            **dict.fromkeys(variables, "/elsewhere"),
            "state": state,
        }
        for place in ("redis", "drafts"):
            (tmp_path / "data" / place).mkdir(parents=True, exist_ok=True)
        context = found[f"slipstream {name}"].make_context(name, [*words, "--data-dir=~/data"])
        assert {option: str(context.params[option]) for option in variables} == {
            "redis_url": f"unix://{tmp_path}/data/redis/redis.sock?db=0",
            "store": f"{tmp_path}/data/drafts",
            "state": state,
        }
        shutil.rmtree(tmp_path / "data")


def test_what_serve_learn_takes_from_the_data_folder_and_gives_to_the_trainer(
    refused: Refused, toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    class Noted:
        def __init__(self, _: Path, **named: object) -> None:
            given.update(named)
            raise ConfigError("noted")

    monkeypatch.setattr("slipstream.start.learning.Learning", Noted)
    for variable, value in {"REDIS_URL": "redis://h:1", "STORE": "/elsewhere", "TRACE_TTL_HOURS": "24"}.items():
        monkeypatch.setenv(f"SLIPSTREAM_{variable}", value)
    learn = ("serve", "--learn", "--model", toy_model)
    refused(*learn)
    assert (given["redis_url"], given["store"], given["trace_ttl_hours"]) == ("redis://h:1", Path("/elsewhere"), 24)
    refused(*learn, "--data-dir", tmp_path, "--trace-ttl-hours", 0)
    assert (given["redis_url"], given["store"], given["trace_ttl_hours"]) == (None, None, 0)
    refused(*learn, "--data-dir", tmp_path, "--store", "here")
    assert given["store"] == Path("here")
    file = tmp_path / "serve.yaml"
    file.write_text("redis-url: redis://h:2\nstore: /of/the/file\n")
    refused(*learn, "--data-dir", tmp_path, "--config", file)
    assert (given["redis_url"], given["store"]) == (None, None)
    monkeypatch.delenv("SLIPSTREAM_TRACE_TTL_HOURS")
    refused(*learn)
    assert given["trace_ttl_hours"] is None, "the trainer has a setting of its own"


@pytest.mark.parametrize("closed", ["<&- 2>&-", "<&- >&- 2>&-", ""])
def test_a_command_runs_whatever_its_caller_did_to_its_streams(tmp_path: Path, closed: str) -> None:
    """Closed by a supervisor, or of an encoding without the letters of a table."""
    keys = tmp_path / "keys.json"
    key = {"name": "a", "sha256": "0" * 64}
    keys.write_text(json.dumps({"version": 1, "keys": [key]}))
    keys.chmod(0o600)
    command = f'exec "$0" -m slipstream keys list --file "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, keys],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("\na  " in done.stdout) == (">&- 2" not in closed)
