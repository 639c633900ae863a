"""`make up` says what is missing, a line each, before it starts anything; with a Docker that only notes its orders."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculator.host import free_port
from tests.deploy.compose import GPU, ROOT, load, variables

DOCKER = """#!/bin/sh
case "$*" in
  info) exit "${NO_DAEMON:-0}" ;;
  "compose version --short") echo "${COMPOSE_VERSION-2.26.1}" ;;
  "info --format {{json .Runtimes}}") echo "{\\"runc\\": {}, \\"${RUNTIME-nvidia}\\": {}}" ;;
  "compose config") echo "          - driver: ${DRIVER:-nvidia}" ;;
  "compose config --services") printf 'redis\\ninit\\ngateway\\ntrainer\\nprometheus\\n' ;;
  "compose ps --services --status running") printf '%s\\n' $RUNNING ;;
  *) echo "$*" >>orders ;;
esac
"""
CARDS = """#!/bin/sh
printf '%b' "${CARDS-0, 580.65.06\\n1, 580.65.06\\n}"
"""


class Checkout:
    """The files that matter here, with nothing in them that a user has to make."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "deploy").mkdir()
        for name in ("docker-compose.yml", ".env.example", "deploy/up.sh", "deploy/secrets.sh"):
            shutil.copy(ROOT / name, folder / name)
        shutil.copytree(ROOT / "deploy" / "redis", folder / "deploy" / "redis")
        (folder / "bin").mkdir()
        for name, script in (("docker", DOCKER), ("nvidia-smi", CARDS)):
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
        self.said = ""
        self._ports = {name: str(free_port()) for name in variables(ROOT / ".env.example") if name.endswith("_PORT")}

    def with_secrets(self) -> None:
        subprocess.run([self.folder / "deploy" / "secrets.sh"], check=True, capture_output=True)

    def choose(self, **values: str) -> None:
        """Write .env."""
        lines = {"SLIPSTREAM_MODEL": "some/model", **self._ports, **values}
        (self.folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    def model(self, models: str = "models") -> Path:
        """A folder with a model that every user may read."""
        own = self.folder / models / "mine"
        own.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (own / name).touch(0o644)
        for folder in (own, own.parent):
            folder.chmod(0o755)
        return own

    def up(self, *arguments: str, **environment: str) -> tuple[int, list[str]]:
        """The exit code, and the lines of what is wrong; whoever started it reads how to ask, and nobody else."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLIPSTREAM_", "COMPOSE_"))}
        done = subprocess.run(
            [self.folder / "deploy" / "up.sh", *arguments],
            env={**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(done.stdout) == (done.returncode == 0)
        self.said = done.stdout
        return done.returncode, done.stderr.splitlines()

    @property
    def orders(self) -> str:
        """What Docker was told to do."""
        path = self.folder / "orders"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    checkout.with_secrets()
    checkout.choose()
    return checkout


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_where_nothing_is_missing_compose_is_told_and_the_user_how_to_ask(ready: Checkout) -> None:
    ready.choose(SLIPSTREAM_PORT="1")
    assert ready.up("--pull", "always", SLIPSTREAM_MODEL_NAME="mine") == (0, [])
    assert ready.orders == "compose up --detach --wait --build --pull always\n"
    (ready.folder / "bin" / "curl").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (ready.folder / "bin" / "curl").chmod(0o755)
    _, command = ready.said.split("\n", 1)
    path = f"{ready.folder / 'bin'}:{os.environ['PATH']}"
    words = subprocess.check_output(["sh", "-c", command], cwd=ready.folder, env={"PATH": path}, text=True).splitlines()
    assert words[0] == "http://127.0.0.1:1/v1/chat/completions"
    assert words[2] == f"authorization: Bearer {(ready.folder / 'deploy/secrets/gateway_client').read_text()}"
    assert json.loads(words[-1])["model"] == "mine"


def test_in_a_fresh_clone_every_step_is_named(checkout: Checkout) -> None:
    code, lines = checkout.up(SLIPSTREAM_PORT="1", SLIPSTREAM_PROMETHEUS_PORT="1", SLIPSTREAM_GRAFANA_PORT="1")
    assert code == 2
    assert len(lines) == 2
    assert "there is no .env: make secrets" in lines[0]
    assert "make secrets" in lines[1]
    assert not checkout.orders


def test_one_command_makes_env_and_secrets_and_keeps_what_is_there(checkout: Checkout) -> None:
    shutil.copy(ROOT / "Makefile", checkout.folder)
    ports = {name: str(free_port()) for name in variables(ROOT / ".env.example") if name.endswith("_PORT")}
    subprocess.run(["make", "secrets"], cwd=checkout.folder, check=True, capture_output=True)
    assert (checkout.folder / ".env").read_text() == (ROOT / ".env.example").read_text()
    assert checkout.up(**ports) == (0, [])
    checkout.choose(SLIPSTREAM_MODEL="chosen")
    # The tests may themselves run below make, which then says where it is.
    again = subprocess.run(
        ["make", "--no-print-directory", "secrets"], cwd=checkout.folder, check=True, capture_output=True, text=True
    )
    assert (again.stdout, "MODEL=chosen" in (checkout.folder / ".env").read_text()) == ("", True)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"NO_DAEMON": "1"}, "daemon does not answer"),
        ({"COMPOSE_VERSION": "2.24.3"}, "docker compose is 2.24.3: install 2.24.4"),
        ({"COMPOSE_VERSION": ""}, "docker compose is not installed"),
        ({"COMPOSE_VERSION": "v5.0.0"}, None),
        ({"SLIPSTREAM_MODELS": "/no/such/folder"}, "/no/such/folder is not a folder"),
        ({"SLIPSTREAM_MODELS": "./models"}, "./models is not a folder"),
        ({"SLIPSTREAM_MODELS": "~/models", "HOME": "/no"}, "~/models is not a folder"),
        ({"SLIPSTREAM_MODELS": "a-volume"}, None),
        ({"SLIPSTREAM_MODEL": "/models/mine"}, "set SLIPSTREAM_MODELS"),
        ({"SLIPSTREAM_MODEL": "/srv/models/mine"}, "write a folder as /models/NAME"),
        ({"SLIPSTREAM_MODEL": "./mine"}, "write a folder as /models/NAME"),
        ({"CARDS": ""}, "nvidia-smi finds no GPU"),
        ({"CARDS": "0, 575.57.08\\n"}, "driver is 575.57.08: install 580"),
        ({"SLIPSTREAM_TRAINER_GPU": "2"}, "SLIPSTREAM_TRAINER_GPU=2: nvidia-smi -L lists no such GPU"),
        ({"SLIPSTREAM_SGLANG_GPU": "MIG-aa-bb", "SLIPSTREAM_TRAINER_GPU": "1"}, None),
        ({"CARDS": "", "RUNTIME": "crun", "DRIVER": "other"}, None),
    ],
)
def test_what_is_wrong_is_a_line(ready: Checkout, environment: dict[str, str], said: str | None) -> None:
    code, lines = ready.up(**environment)
    if said is None:
        assert (code, lines) == (0, [])
        return
    assert code == 2
    [line] = lines
    assert said in line
    assert not ready.orders


@pytest.mark.skipif(shutil.which("nvidia-ctk") is not None, reason="it is installed here")
def test_without_nvidia_s_toolkit(ready: Checkout) -> None:
    code, [line] = ready.up(RUNTIME="crun")
    assert (code, "install the NVIDIA Container Toolkit" in line) == (2, True)


def test_without_docker(ready: Checkout) -> None:
    (ready.folder / "bin" / "docker").unlink()
    for program in ("bash", "dirname", "sed", "sort", "head", "tail", "find", "grep"):
        (ready.folder / "bin" / program).symlink_to(str(shutil.which(program)))
    code, [line] = ready.up(PATH=str(ready.folder / "bin"))
    assert (code, "install Docker Engine" in line) == (2, True)


def test_a_model_and_secrets_must_be_there(ready: Checkout) -> None:
    ready.choose(SLIPSTREAM_MODEL="")
    code, [line] = ready.up()
    assert (code, "set SLIPSTREAM_MODEL in .env" in line) == (2, True)
    ready.choose()
    for name in ("redis_users", "gateway_keys", "grafana_admin"):
        moved = (path := ready.folder / "deploy" / "secrets" / name).rename(ready.folder / name)
        assert ready.up() == (2, [f"deploy/secrets/{name} is missing: make secrets"])
        moved.rename(path)


@pytest.mark.parametrize(
    "line", ["export SLIPSTREAM_MODEL={}", "SLIPSTREAM_MODEL = {}  # ours", "SLIPSTREAM_MODEL='{}'"]
)
def test_a_line_of_settings_is_read_as_compose_reads_it(ready: Checkout, line: str) -> None:
    ready.choose(SLIPSTREAM_MODEL="another")
    with (ready.folder / ".env").open("a") as file:
        file.write(line.format("some/model") + "\n")
    assert ready.up() == (0, [])
    assert '"model": "some/model"' in ready.said


SERVICES = load(GPU, {"SLIPSTREAM_MODEL": "m"})["services"].values()
MOUNTED = {volume.partition(":")[0] for service in SERVICES for volume in service.get("volumes", [])}


@pytest.mark.parametrize("path", sorted(path for path in MOUNTED if path.startswith("./")))
def test_what_containers_mount_of_a_clone_is_readable_for_them(ready: Checkout, path: str) -> None:
    """A clone under umask 077 is not."""
    for folder in ("prometheus", "grafana"):
        shutil.copytree(ROOT / "deploy" / folder, ready.folder / "deploy" / folder)
    (ready.folder / path).chmod(0o700)
    code, [line] = ready.up()
    assert (code, f"{path.removeprefix('./')} may not be read" in line) == (2, True)
    subprocess.run(["sh", "-c", line.split(": ", 1)[1]], cwd=ready.folder, check=True)
    assert ready.up() == (0, [])


@pytest.mark.parametrize("line", ["user other on nopass", None])
def test_users_of_redis_of_an_older_version_are_named_and_written_anew(ready: Checkout, line: str | None) -> None:
    """What the template has and the file has not, and the other way round; a password is nothing of a version."""
    users, password = (ready.folder / "deploy" / "secrets" / name for name in ("redis_users", "redis_engine"))
    now, before = users.read_text(), password.read_text()
    users.chmod(0o644)
    users.write_text(f"{now}{line}\n" if line else now.replace(" +@connection", "", 1))
    code, [said] = ready.up()
    assert (code, "redis_users is outdated: make secrets" in said) == (2, True)
    ready.with_secrets()
    assert (users.read_text(), password.read_text()) == (now, before)
    assert ready.up() == (0, [])
    assert password.read_text() not in now


def test_a_folder_of_models_is_one_that_the_containers_may_read(ready: Checkout) -> None:
    own = ready.model()
    ready.choose(SLIPSTREAM_MODELS=str(own.parent), SLIPSTREAM_MODEL="/models/mine")
    assert ready.up() == (0, [])
    for path, mode in ((own / "model.safetensors", 0o600), (own, 0o700), (own.parent, 0o750)):
        before = path.stat().st_mode
        path.chmod(mode)
        code, [line] = ready.up()
        assert code == 2
        assert f"{path} may not be" in line
        assert "chmod" in line
        path.chmod(before)
    ready.choose(SLIPSTREAM_MODELS=f'"{own.parent}"', SLIPSTREAM_MODEL="/models/other # not there")
    code, [line] = ready.up()
    assert f"no {own.parent}/other/config.json" in line


def test_a_folder_that_a_model_is_fetched_into_is_one_that_the_containers_may_write(ready: Checkout) -> None:
    models = ready.model().parent
    ready.choose(SLIPSTREAM_MODELS=str(models))
    code, [line] = ready.up()
    assert (code, f"chown 10001 {models}" in line) == (2, True)
    models.chmod(0o777)
    assert ready.up() == (0, [])


def test_a_port_is_free_our_own_or_of_a_service_that_is_left_out(ready: Checkout, taken: int) -> None:
    for variable, service in (("SLIPSTREAM_PORT", "gateway"), ("SLIPSTREAM_PROMETHEUS_PORT", "prometheus")):
        ready.choose(**{variable: str(taken)})
        assert ready.up() == (2, [f"port {taken} is taken: set {variable} in .env to another"])
        assert ready.up(RUNNING=f"redis {service}") == (0, [])
    ready.choose(SLIPSTREAM_GRAFANA_PORT=str(taken))
    assert ready.up() == (0, [])
