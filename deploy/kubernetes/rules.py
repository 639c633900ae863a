"""Convert the rules of deploy/prometheus for the Prometheus operator: `python -m deploy.kubernetes.rules`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "monitoring" / "rules.yaml"
RULES = Path(__file__).parents[1] / "prometheus" / "rules"

_LOGS = "`docker compose logs {{ $labels.job }}`"
_LOGS_HERE = "`kubectl logs --namespace slipstream --selector app.kubernetes.io/name={{ $labels.job }}`"


class _Dumper(yaml.SafeDumper):
    """Writes long texts as folded blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = ">" if len(text) > 90 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rendered() -> str:
    """The text of monitoring/rules.yaml."""
    files = [file.read_text() for file in sorted(RULES.glob("*.yml"))]
    groups: list[Any] = [group for text in files for group in yaml.safe_load(text.replace(_LOGS, _LOGS_HERE))["groups"]]
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "slipstream"},
        "spec": {"groups": groups},
    }
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return f"# Written by `python -m deploy.kubernetes.rules` from deploy/prometheus/rules; a test compares.\n{text}"


if __name__ == "__main__":
    FILE.write_text(rendered())
