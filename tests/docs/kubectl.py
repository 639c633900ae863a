"""`kubectl` lines of the pages: what they name is in deploy/kubernetes, and what they patch stays what is allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kubernetes_validate.utils import validate

from tests.deploy.manifests import BASE, FOLDER, Manifest, manifests
from tests.docs.commands import ROOT

_FLAGS = {
    "apply": {"-f", "-k"},
    "delete": {"--force", "--grace-period", "--ignore-not-found"},
    "diff": {"-k"},
    "exec": {"--stdin"},
    "get": {"--output"},
    "patch": {"--patch"},
    "port-forward": set(),
    "rollout": set(),
    "scale": {"--replicas"},
    "wait": {"--for", "--timeout"},
}
_VALUED = ("-f", "-k", "--namespace", "--output", "--patch")
_ALIASES = {"pvc": "persistentvolumeclaim"}
_VERSION = "1.37"


def parse_kubectl(words: Sequence[str]) -> list[str]:
    """Check a line; what it runs in a pod comes back, nothing where it runs nothing. Raises AssertionError."""
    told = list(words)
    inside = told[told.index("--") + 1 :] if "--" in told else []
    verb, *rest = told[: told.index("--")] if "--" in told else told
    assert verb in _FLAGS, f"kubectl {verb}"
    flags, named = _split(rest)
    assert flags.keys() - {"--namespace"} <= _FLAGS[verb], flags
    assert flags.get("--namespace", "slipstream") == "slipstream"
    for flag in ("-f", "-k"):
        place = flags.get(flag, "-")
        assert place == "-" or (ROOT / place).is_file() or (ROOT / place / "kustomization.yaml").is_file(), place
    if verb in ("apply", "diff"):
        assert not named
        return inside
    assert "--namespace" in flags, "a line that works in whatever namespace is the current one"
    if verb == "rollout":
        assert named.pop(0) in ("status", "undo", "restart")
    if verb == "get":
        assert named == ["pods"]
        return inside
    target = _target(named)
    if verb == "patch":
        validate(_merged(target, json.loads(flags["--patch"])), _VERSION, strict=True)
    return inside


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(flags with their values, the rest). What stands behind `<` is a file of the reader's."""
    flags, named = dict[str, str](), list[str]()
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("<", ">"):
            left.pop(0)
        elif word.startswith("-"):
            name, has_value, value = word.partition("=")
            flags[name] = value if has_value or name not in _VALUED else left.pop(0)
        else:
            named.append(word)
    return flags, named


def _target(named: list[str]) -> Manifest:
    """The object that `kind/name` or `kind name` is; of a pod, or of a pod's volume, the set that makes it."""
    words = named[0].split("/") if "/" in named[0] else named[:2]
    kind, name = _ALIASES.get(words[0], words[0]), words[1]
    ours = manifests(BASE)
    for each in ours:
        if each["kind"].lower() == kind and each["metadata"]["name"] == name:
            return each
    for each in ours:
        if each["kind"] == "StatefulSet" and name in _made_by(each, kind):
            return each
    raise AssertionError(f"{FOLDER.name} has no {kind} {name}")


def _made_by(one: Manifest, kind: str) -> list[str]:
    pods = [f"{one['metadata']['name']}-{number}" for number in range(one["spec"]["replicas"])]
    if kind == "pod":
        return pods
    volumes = [each["metadata"]["name"] for each in one["spec"].get("volumeClaimTemplates", [])]
    return [f"{volume}-{pod}" for volume in volumes for pod in pods] if kind == "persistentvolumeclaim" else []


def _merged(one: Any, patch: Any) -> Any:
    if not isinstance(one, dict) or not isinstance(patch, dict):
        return patch
    return {**one, **{key: _merged(one.get(key), value) for key, value in patch.items()}}
