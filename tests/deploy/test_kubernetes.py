"""The manifests of deploy/kubernetes, against the schemas of Kubernetes and what docs/how-to/kubernetes.md promises."""

from __future__ import annotations

import base64
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas

from deploy.kubernetes.rules import FILE, rendered
from speculator.versions.lifecycle import Lifecycle, VersionState
from tests.deploy.compose import GPU, ROOT, load
from tests.deploy.manifests import (
    BASE,
    FOLDER,
    Manifest,
    built,
    container,
    kustomized,
    labels,
    manifests,
    needs_kubectl,
    of_kind,
    pods,
    selects,
    strings,
)

OLDEST, NEWEST = "1.30", "1.37"
"""Of the clusters that docs/how-to/kubernetes.md names."""
OPERATOR = "monitoring.coreos.com/v1"
OURS = [each for part in ("base", "monitoring", "autoscaling") for each in manifests(FOLDER / part)]
PODS = pods(OURS)
EACH_POD = pytest.mark.parametrize("name", PODS)
SERVES = ("sglang", "router", "gateway")


def _named(one: Manifest) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemas, "schema_contents", functools.cache(schemas.schema_contents))
        yield


@pytest.mark.parametrize("one", [each for each in OURS if each["apiVersion"] != OPERATOR], ids=_named)
def test_schema(one: Manifest) -> None:
    for version in (OLDEST, NEWEST):
        assert schemas.validate(one, version, strict=True) == version


@needs_kubectl
def test_the_example_is_put_together() -> None:
    """Kustomize finds every file and patch, and what comes out is what the schemas allow."""
    example = built("example")
    for one in example:
        if one["apiVersion"] != OPERATOR:
            schemas.validate(one, NEWEST, strict=True)
    names = {_named(one) for one in example if one["kind"] != "ConfigMap"}
    assert names == {_named(one) for one in OURS}
    assert pods(example).keys() == PODS.keys()
    for name in ("sglang", "gateway"):
        [maker] = [one for one in example if one["metadata"]["name"] == name and "template" in one.get("spec", {})]
        assert "replicas" not in maker["spec"], f"the autoscaler says how many of {name} there are"
    gpus = container(pods(example)["trainer"])["resources"]["limits"]["nvidia.com/gpu"]
    [settings] = [one for one in example if one["metadata"]["name"].startswith("slipstream-") and "data" in one]
    assert str(gpus) == settings["data"]["TRAINER_PROCESSES"] == "2"
    for pod in pods(example).values():
        assert container(pod)["image"].split(":")[0] in {
            "redis",
            *(f"registry.example.org/{image}" for image in ("slipstream", "slipstream-sglang", "slipstream-router")),
        }


def test_every_file_of_the_base_is_in_it_and_the_rules_are_those_of_prometheus() -> None:
    told = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    files = {file.name for file in BASE.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == {name for name in told if not name.startswith("..")}
    assert FILE.read_text() == rendered(), "run python -m deploy.kubernetes.rules"


@EACH_POD
def test_every_pod_is_confined(name: str) -> None:
    pod = PODS[name]["spec"]
    user = pod["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] >= 999
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is (name == "router")
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
    for each in (container(PODS[name]), *pod.get("initContainers", [])):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert each["resources"]["limits"]["memory"]
        assert {"cpu", "memory"} <= each["resources"]["requests"].keys()


@pytest.mark.parametrize("name", ["sglang", "trainer"])
def test_what_needs_a_draft_waits_until_init_has_written_one(name: str, tmp_path: Path) -> None:
    [wait] = PODS[name]["spec"]["initContainers"]
    assert wait["image"] == container(PODS["init"])["image"]
    assert {mount["name"] for mount in wait["volumeMounts"]} == {"store"}
    shell, flag, script = wait["command"]
    once = script.replace("/store/", f"{tmp_path}/").replace("do sleep 5;", "do exit 3;")
    command, model = [shell, flag, once], {**os.environ, "MODEL": "some/model"}
    assert subprocess.run(command, env=model, check=False).returncode == 3
    Lifecycle(tmp_path / "some" / "model").move(1, VersionState.WRITTEN, actor="test")
    assert subprocess.run(command, env=model, check=False).returncode == 0


@EACH_POD
def test_images_are_those_of_compose(name: str) -> None:
    services = load(GPU, {"SLIPSTREAM_MODEL": "some/model"})["services"]
    locked = re.search(r"^sglang-router==([\d.]+)", (ROOT / "deploy" / "router.lock").read_text(), re.M)
    assert locked is not None
    expected = services[name]["image"] if name in services else f"slipstream-router:{locked[1]}"
    assert container(PODS[name])["image"] == expected


@EACH_POD
def test_what_is_named_exists(name: str) -> None:
    spec, only = PODS[name]["spec"], container(PODS[name])
    [maker] = [each for each in OURS if each["metadata"]["name"] == name and "template" in each.get("spec", {})]
    templates = {each["metadata"]["name"] for each in maker["spec"].get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in spec["volumes"]} | templates
    assert {mount["name"] for mount in only["volumeMounts"]} == volumes
    assert len({mount["mountPath"] for mount in only["volumeMounts"]}) == len(only["volumeMounts"])
    assert all(each.get("configMap", {"name": "redis"})["name"] == "redis" for each in spec["volumes"])
    assert only.get("envFrom", []) in ([], [{"configMapRef": {"name": "slipstream"}}])
    if "serviceName" in maker["spec"]:
        assert of_kind("Service", OURS)[maker["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    for field, kind in (("serviceAccountName", "ServiceAccount"), ("priorityClassName", "PriorityClass")):
        assert spec.get(field) is None or spec[field] in of_kind(kind, OURS)


def test_who_shares_a_volume_may() -> None:
    """More than one pod mounts it: on several nodes, then."""
    users: dict[str, set[str]] = {}
    for name, pod in PODS.items():
        for volume in pod["spec"]["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                users.setdefault(claim["claimName"], set()).add(name)
    claims = of_kind("PersistentVolumeClaim", OURS)
    assert users.keys() == claims.keys()
    for name, claim in claims.items():
        shared = len(users[name]) > 1
        assert claim["spec"]["accessModes"] == ["ReadWriteMany" if shared else "ReadWriteOnce"], name


@needs_kubectl
def test_on_one_node_no_volume_is_mounted_by_several(tmp_path: Path) -> None:
    """Pods that mount what others mount, too, run on the labelled node; those that serve without it run anywhere."""
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                name: [os.path.relpath(FOLDER / of, tmp_path)]
                for name, of in {"resources": "base", "components": "one-node"}.items()
            }
        )
    )
    put_together = kustomized(tmp_path)
    for one in put_together:
        schemas.validate(one, NEWEST, strict=True)
    for name, claim in of_kind("PersistentVolumeClaim", put_together).items():
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"], name
    for name, pod in pods(put_together).items():
        mounted = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"]}
        where = {"slipstream/store": "here"} if mounted & {"models", "store"} else None
        assert pod["spec"].get("nodeSelector") == where, name


def test_services_lead_to_pods() -> None:
    for name, service in of_kind("Service", OURS).items():
        [pod] = [pod for pod in PODS.values() if selects({"matchLabels": service["spec"]["selector"]}, labels(pod))]
        ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], name


def test_what_serves_survives_a_drained_node() -> None:
    budgets = of_kind("PodDisruptionBudget", OURS)
    assert budgets.keys() == set(SERVES)
    for name, budget in budgets.items():
        assert [pod for pod in PODS if selects(budget["spec"]["selector"], labels(PODS[pod]))] == [name]
        [maker] = [each for each in OURS if each["metadata"]["name"] == name and "template" in each.get("spec", {})]
        assert maker["spec"]["replicas"] > budget["spec"]["maxUnavailable"], "one would be left"
        [spread] = PODS[name]["spec"]["topologySpreadConstraints"]
        assert selects(spread["labelSelector"], labels(PODS[name]))


def test_autoscalers_scale_what_is_there_by_what_is_measured() -> None:
    rules = yaml.safe_load((FOLDER / "autoscaling" / "adapter.yaml").read_text())["rules"]
    adapted = {rule["name"]["as"]: rule["seriesQuery"] for rule in rules}
    scalers = of_kind("HorizontalPodAutoscaler", OURS)
    assert scalers.keys() == {"sglang", "gateway"}
    for name, scaler in scalers.items():
        reference = scaler["spec"]["scaleTargetRef"]
        [target] = [each for each in OURS if each["kind"] == reference["kind"] and each["metadata"]["name"] == name]
        assert target["spec"]["replicas"] == scaler["spec"]["minReplicas"]
    [queue] = scalers["sglang"]["spec"]["metrics"]
    [(adapted_name, query)] = adapted.items()
    assert queue["pods"]["metric"]["name"] == adapted_name
    assert "sglang:num_queue_reqs" in query
    board = ROOT / "deploy" / "grafana" / "dashboards" / "slipstream-sglang.json"
    assert "sum(sglang:num_queue_reqs{" in board.read_text()
    [cpu] = scalers["gateway"]["spec"]["metrics"]
    assert cpu["containerResource"]["container"] == container(PODS["gateway"])["name"]


def test_everything_that_has_metrics_is_scraped_under_the_name_that_the_rules_go_by() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    monitors = of_kind("ServiceMonitor", OURS)
    assert monitors.keys() == jobs.keys() - {"prometheus"} | {"router"}
    services = of_kind("Service", OURS)
    for name, monitor in monitors.items():
        assert monitor["apiVersion"] == OPERATOR
        selector = monitor["spec"]["selector"]
        [found] = [each for each in services.values() if selects(selector, each["metadata"].get("labels", {}))]
        assert found["metadata"]["name"] == name, "its job is the Service's name"
        assert monitor["spec"].keys() == {"selector", "endpoints"}
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint.keys() <= {"port", "interval", "authorization", "metricRelabelings"}
        assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]}
    credentials = monitors["gateway"]["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert jobs["gateway"]["authorization"]["credentials_file"] == f"/run/secrets/{credentials['key']}"
    [relabelling] = monitors["sglang"]["spec"]["endpoints"][0]["metricRelabelings"]
    [of_compose] = jobs["sglang"]["metric_relabel_configs"]
    assert list(relabelling.values()) == list(of_compose.values())


def _mentioned_secrets(value: Any) -> set[tuple[str, str]]:
    """(Secret, key); the key is the name with underscores wherever it is mounted whole."""
    text = yaml.safe_dump(value)
    names = set(re.findall(r"secretName: ([\w-]+)", text)) | set(re.findall(r"secret:\n\s+name: ([\w-]+)", text))
    return {(name, name.replace("-", "_")) for name in names}


def test_secrets_are_written_for_whom_they_are_and_are_in_no_manifest(tmp_path: Path) -> None:
    assert not of_kind("Secret", OURS)
    subprocess.run([ROOT / "deploy" / "secrets.sh", tmp_path], check=True, capture_output=True)
    script = FOLDER / "secrets.sh"
    shown = subprocess.run([script, tmp_path], check=True, capture_output=True, text=True).stdout
    secrets = list(yaml.safe_load_all(shown))
    written = {}
    for secret in secrets:
        schemas.validate(secret, NEWEST, strict=True)
        [(key, value)] = secret["data"].items()
        assert base64.b64decode(value) == (tmp_path / key).read_bytes()
        assert secret["metadata"]["namespace"] == "slipstream"
        written[secret["metadata"]["name"]] = key
    mounted = _mentioned_secrets([pod["spec"]["volumes"] for pod in PODS.values()])
    assert mounted | {("gateway-metrics", "gateway_metrics")} == set(written.items())
    for pod in PODS.values():
        read = {text for text in strings(container(pod)) if text.startswith("/run/secrets/slipstream/")}
        of_pod = {key for _, key in _mentioned_secrets(pod["spec"]["volumes"])}
        assert read == {f"/run/secrets/slipstream/{key}" for key in of_pod}
    (tmp_path / "redis_engine").unlink()
    missing = subprocess.run([script, tmp_path], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "make secrets" in missing.stderr
