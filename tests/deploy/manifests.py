"""The manifests of deploy/kubernetes: as they stand in their files, and as kustomize puts them together."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.compose import ROOT, variables

FOLDER = ROOT / "deploy" / "kubernetes"
BASE = FOLDER / "base"
SETTINGS = variables(BASE / "settings.env")

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl, which has kustomize in it")

Manifest = dict[str, Any]


def manifests(folder: Path) -> list[Manifest]:
    """All objects of a kustomization's `resources`, in order; without its patches, and other folders left out."""
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = [folder / name for name in resources if (folder / name).is_file()]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


@functools.cache
def built(name: str) -> list[Manifest]:
    """What `kubectl apply -k` would send for one of our folders."""
    return kustomized(FOLDER / name)


def kustomized(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would send for any folder."""
    shown = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return list(yaml.safe_load_all(shown.stdout))


def of_kind(kind: str, among: list[Manifest]) -> dict[str, Manifest]:
    """By name."""
    return {each["metadata"]["name"]: each for each in among if each["kind"] == kind}


def pods(among: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates, by the name of what makes the pods."""
    makers = [each for each in among if "template" in each.get("spec", {})]
    return {each["metadata"]["name"]: each["spec"]["template"] for each in makers}


def container(pod: Manifest) -> Manifest:
    [only] = pod["spec"]["containers"]
    return dict(only)


def environment(one: Manifest) -> dict[str, str]:
    """What its process sees of ours; values that the cluster fills in stand for themselves."""
    told = dict(SETTINGS) if "envFrom" in one else {}
    return told | {each["name"]: each.get("value", "filled-in") for each in one.get("env", [])}


def words(one: Manifest) -> list[str]:
    """Its arguments, with variables filled in as the cluster does."""
    known = environment(one)
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in one.get("args", [])]


def labels(pod: Manifest) -> dict[str, str]:
    return dict(pod["metadata"]["labels"])


def selects(selector: Manifest, pod_labels: dict[str, str]) -> bool:
    """Whether a label selector takes a pod, as far as ours go."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}
    equal = all(pod_labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return equal and all(_is_in(rule, pod_labels) for rule in selector.get("matchExpressions", []))


def _is_in(rule: Manifest, pod_labels: dict[str, str]) -> bool:
    assert rule["operator"] == "In"
    return pod_labels.get(rule["key"]) in rule["values"]


def strings(value: Any) -> Iterator[str]:
    """Every text in a document, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)
