"""The compose files against the official schema, and against what docs/how-to/compose.md promises of every service."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.gateway.keys import Keyring
from tests.deploy.compose import CPU, GPU, ROOT, argv, load, variables
from tests.fixtures.command_line import check_slipstream

ENV = {"SLIPSTREAM_MODEL": "some/model"}
BOTH = pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])


@BOTH
def test_schema(files: tuple[Path, ...], tmp_path: Path) -> None:
    merged = tmp_path / "compose.json"
    merged.write_text(json.dumps(load(files, ENV)))
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(merged)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


@BOTH
def test_every_service_is_confined(files: tuple[Path, ...]) -> None:
    services = load(files, ENV)["services"]
    for name, service in services.items():
        assert service["user"].partition(":")[0] not in ("", "0", "root"), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] == (8192 if name == "sglang" else 1024), name
        assert not {"privileged", "cap_add", "network_mode", "ipc", "pid"} & service.keys(), name
        assert service["logging"]["options"]["max-size"], name
        assert service["stop_grace_period"], name
        assert service["restart"] == ("no" if name == "init" else "unless-stopped"), name
        assert name == "init" or service["healthcheck"]["test"], name
        # Niceness counts within one container alone.
        assert name == "trainer" or 16 * services["trainer"]["cpu_shares"] <= service.get("cpu_shares", 1024), name


@BOTH
def test_only_loopback_is_published_and_only_publishers_reach_outside(files: tuple[Path, ...]) -> None:
    document = load(files, ENV)
    published = {name for name, service in document["services"].items() if "ports" in service}
    assert published == {"gateway", "prometheus", "grafana"}
    for name in published:
        for port in document["services"][name]["ports"]:
            assert port.startswith("127.0.0.1:"), name
    for name, network in document["networks"].items():
        assert network.get("internal", False) is (name != "outside")
    outside = {name for name, service in document["services"].items() if "outside" in service["networks"]}
    assert outside == published | {"init"}


@BOTH
def test_images_are_pinned_and_built_once_whoever_runs_them(files: tuple[Path, ...]) -> None:
    services = load(files, ENV)["services"]
    for name, service in services.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name
    redis = services["redis"]["image"].partition(":")[2]
    assert tuple(map(int, redis.split("."))) >= (8, 6, 3), "those before have known vulnerabilities"
    built = [service["image"] for service in services.values() if "build" in service]
    assert len(set(built)) == len(built)
    assert {services[name]["image"] for name in ("init", "gateway", "trainer")} <= set(built)
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    ours = "slipstream" if files == GPU else "slipstream-cpu"
    assert services["trainer"]["image"] == f"{ours}:{version[1]}"


@BOTH
def test_what_is_named_exists(files: tuple[Path, ...]) -> None:
    document = load(files, ENV)
    for name, service in document["services"].items():
        for kind in ("secrets", "networks"):
            assert set(service.get(kind, [])) <= document[kind].keys(), name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in document["volumes"], volume
        for other, how in service.get("depends_on", {}).items():
            assert how["condition"] in ("service_healthy", "service_completed_successfully")
            has_health = "healthcheck" in document["services"][other]
            assert has_health is (how["condition"] == "service_healthy"), f"{name} waits for {other}"
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        # A secret is a file: its name is in the container's environment or command, its text nowhere.
        told = json.dumps([service.get("environment", {}), service.get("command", "")]) + _settings_of(service)
        for secret in service.get("secrets", []):
            assert f"/run/secrets/{secret}" in told, f"{name} does not read {secret}"
        assert set(re.findall(r"/run/secrets/(\w+)", told)) == set(service.get("secrets", []))


def _settings_of(service: dict[str, Any]) -> str:
    """The text of what is mounted from this repository for it to read."""
    folders = [ROOT / volume.partition(":")[0] for volume in service.get("volumes", []) if volume.startswith("./")]
    return "".join(file.read_text() for folder in folders for file in folder.glob("*.yml"))


def test_gpus_are_reserved_with_sglang_and_only_there() -> None:
    def devices(service: dict[str, Any]) -> Any:
        return service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])

    apart = load(GPU, {**ENV, "SLIPSTREAM_TRAINER_GPU": "1", "SLIPSTREAM_CAPTURE": "1"})["services"]
    reserved = {name: devices(service)[0]["device_ids"] for name, service in apart.items() if devices(service)}
    assert reserved == {"sglang": ["0"], "trainer": ["1"]}
    # SGLang takes a fraction of what is free on a card that both share.
    assert apart["trainer"]["depends_on"]["sglang"] == {"condition": "service_healthy"}
    told = apart["sglang"]["environment"]
    assert (told["SLIPSTREAM_SGLANG_GPU"], told["SLIPSTREAM_TRAINER_GPU"]) == ("0", "1")
    for files in (GPU, CPU):
        for capture in ("0", "1"):
            trainer = load(files, {**ENV, "SLIPSTREAM_CAPTURE": capture})["services"]["trainer"]
            assert trainer["deploy"]["replicas"] == capture, "who has no traces learns nothing, and holds no card"
    assert not any(devices(service) for service in load(CPU, ENV)["services"].values())


def test_the_cpu_variant_serves_with_the_local_engine() -> None:
    services = load(CPU, ENV)["services"]
    assert services.keys() == {"redis", "init", "gateway", "trainer", "prometheus", "grafana"}
    assert argv(services["gateway"]["command"])[:3] == ["serve", "--engine", "local"]
    for name in ("gateway", "trainer"):
        assert services[name]["depends_on"].keys() == {"init", "redis"}
    assert services["gateway"]["secrets"] == ["redis_engine", "gateway_admin", "gateway_keys"]


def test_a_model_must_be_chosen_and_nothing_is_captured_unasked() -> None:
    with pytest.raises(ValueError, match=r"SLIPSTREAM_MODEL is not set: make secrets"):
        load(GPU, {})
    for service in load(GPU, ENV)["services"].values():
        assert service.get("environment", {}).get("SLIPSTREAM_CAPTURE", "0") == "0"
    assert variables(ROOT / ".env.example")["SLIPSTREAM_CAPTURE"] == "0"


def test_the_example_and_the_page_name_every_variable() -> None:
    texts = "".join(path.read_text() for path in CPU)
    read = set(re.findall(r"\$\{(\w+)", texts))
    # Which files there are is for compose itself.
    assert variables(ROOT / ".env.example").keys() == read | {"COMPOSE_FILE"}
    page = (ROOT / "docs" / "how-to" / "compose.md").read_text()
    assert read <= set(re.findall(r"`(\w+)`", page))


def test_the_examples_in_the_file_of_settings_load() -> None:
    path = ROOT / ".env.example"
    services = load(GPU, variables(path))["services"]
    assert "Qwen/Qwen3-4B" in argv(services["sglang"]["command"])
    assert services["trainer"]["environment"]["SLIPSTREAM_STORE"] == "/store/Qwen/Qwen3-4B"
    assert [ROOT / name for name in variables(path)["COMPOSE_FILE"].split(":")] == list(CPU)
    # A folder of models, as two variables name it.
    [models] = re.findall(r"^#SLIPSTREAM_MODELS=(/\S+)$", path.read_text(), re.M)
    [model] = re.findall(r"^#SLIPSTREAM_MODEL=(\S+)$", path.read_text(), re.M)
    service = load(GPU, {"SLIPSTREAM_MODEL": model, "SLIPSTREAM_MODELS": models})["services"]["trainer"]
    [source] = [volume.partition(":")[0] for volume in service["volumes"] if ":/models" in volume]
    assert (source, Path(argv(service["command"])[2]).parent) == (models, Path("/models"))


def test_grafana_opens_with_the_dashboard_that_is_there() -> None:
    told = load(GPU, ENV)["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy" / "grafana" / "dashboards" / Path(told).name).is_file()
    assert f"path: {Path(told).parent}\n" in "".join(
        path.read_text() for path in (ROOT / "deploy" / "grafana" / "provisioning").rglob("*.y*ml")
    )


def test_secrets_are_hashed_with_what_the_system_has(tmp_path: Path) -> None:
    """macOS has shasum; without either, hashes would be empty and Redis would not start."""
    script, programs = str(ROOT / "deploy" / "secrets.sh"), tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "dirname", "mkdir", "chmod", "head", "od", "tr", "grep", "sed", "cut", "rm", "date"):
        (programs / name).symlink_to(str(shutil.which(name)))

    def run(folder: str) -> subprocess.CompletedProcess[str]:
        words = [script, str(tmp_path / folder)]
        return subprocess.run(words, env={"PATH": str(programs)}, capture_output=True, text=True, check=False)

    refused = run("refused")
    assert (refused.returncode, "neither sha256sum nor shasum" in refused.stderr) == (2, True)
    assert not (tmp_path / "refused").exists()
    (programs / "shasum").write_text(f'#!/bin/sh\n[ "$*" = "-a 256" ] && exec {shutil.which("sha256sum")}\n')
    (programs / "shasum").chmod(0o755)
    assert run("made").returncode == 0
    ring = Keyring(tmp_path / "made" / "gateway_keys")
    assert ring.find((tmp_path / "made" / "gateway_client").read_bytes())
    assert len(re.findall(r"#[0-9a-f]{64} ", (tmp_path / "made" / "redis_users").read_text())) == 3


def test_a_proxy_of_docker_is_in_the_way_of_no_check_and_no_dashboard() -> None:
    """Docker passes the proxy of its settings to every container."""
    services = load(GPU, ENV)["services"]
    for name, service in services.items():
        check = service.get("healthcheck", {}).get("test", [])
        assert "wget" not in check or "-Y off" in " ".join(check), name
        assert "urllib" not in " ".join(check) or service["environment"]["no_proxy"] == "127.0.0.1", name
    provisioned = (ROOT / "deploy" / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    for name in ("NO_PROXY", "no_proxy"):
        assert f"url: http://{services['grafana']['environment'][name]}:9090\n" in provisioned


def test_secrets_are_written_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    script = str(ROOT / "deploy" / "secrets.sh")
    subprocess.run([script, str(folder)], check=True, capture_output=True)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    # The first API key is for people; no service reads it.
    assert first.keys() == load(GPU, ENV)["secrets"].keys() | {"gateway_client"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}
    passwords = [text for name, text in first.items() if name not in ("redis_users", "gateway_keys")]
    assert len(set(passwords)) == len(passwords)
    assert all(re.fullmatch(r"[0-9a-f]{64}", password) for password in passwords)
    assert not any(password in first["redis_users"] + first["gateway_keys"] for password in passwords)
    ring = Keyring(folder / "gateway_keys")
    client, metrics = (ring.find(first[name].encode()) for name in ("gateway_client", "gateway_metrics"))
    assert client is not None
    assert metrics is not None
    assert (client.name, client.read_only, metrics.name, metrics.read_only) == ("client", False, "metrics", True)
    (folder / "redis_engine").unlink()
    subprocess.run([script, str(folder)], check=True, capture_output=True)
    second = {path.name: path.read_text() for path in folder.iterdir()}
    assert {name for name in first if first[name] != second[name]} == {"redis_engine", "redis_users"}
    (folder / "gateway_metrics").unlink()
    done = subprocess.run([script, str(folder)], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    for command in re.findall(r"slipstream (keys .*?gateway_keys)", done.stderr):
        check_slipstream(command.split())
    assert "keys add metrics --read-only" in done.stderr
    subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", "deploy/secrets/redis_engine"], check=True)
    subprocess.run(["git", "-C", ROOT, "check-ignore", "-q", ".env"], check=True)
