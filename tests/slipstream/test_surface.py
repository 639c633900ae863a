"""What users hold of Slipstream, by name: it changes only on purpose, with `surface.txt` in the same commit.

Dashboards, compose files, scripts, stored traces and drafts name these things. A refactoring leaves the file as it is;
what adds or removes a name writes it again with `python -m tests.slipstream.test_surface` and says so in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import safetensors.torch
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from starlette.routing import Route

from serving.gateway.admin import Drafts, Targets
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from slipstream.cli.main import app
from slipstream.settings import commands, known_variables
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.redis.client import RedisKeys
from speculator.trace import encode_trace
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.drafts import CONFIG, make_draft
from tests.fixtures.traces import make_trace

SURFACE = Path(__file__).parent / "surface.txt"
ROOT = Path(__file__).parents[2]
PROJECT, METRICS_PAGE = ROOT / "pyproject.toml", ROOT / "docs/reference/metrics.md"


def test_what_users_hold_is_what_surface_txt_says() -> None:
    promised = SURFACE.read_text(encoding="utf-8").splitlines()
    found = surface()
    missing, new = sorted({*promised} - {*found}), sorted({*found} - {*promised})
    assert (missing, new) == ([], []), "meant? then: python -m tests.slipstream.test_surface, and CHANGELOG.md"


def surface() -> list[str]:
    """One line a name, sorted."""
    kinds = (_entry_points, _commands, _variables, _routes, _redis_keys, _metrics, _trace_format, _draft_format)
    return sorted({line for kind in kinds for line in kind()})


def _entry_points() -> Iterator[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    yield from (
        f"entry point {group}: {name} = {where}" for group, names in groups.items() for name, where in names.items()
    )


def _commands() -> Iterator[str]:
    for name, command in commands(app):
        yield f"command {name}"
        for option in command.params:
            spelled = (
                [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else [option.name.upper()]
            )
            yield from (f"command {name} {word}" for word in spelled)


def _variables() -> Iterator[str]:
    yield from (f"variable {name}" for name in known_variables(app))


def _routes() -> Iterator[str]:
    """Of the gateway before the local engine; before SGLang it has a part of them."""
    gateway = create_app(
        DoubleEngine(),
        settings=GatewaySettings(admin_key=SecretStr("a-key-for-this-test")),
        registry=CollectorRegistry(),
        drafts=Mock(spec=Drafts),
        targets=Mock(spec=Targets),
    )
    for route in gateway.routes:
        assert isinstance(route, Route)
        yield from (f"route {method} {route.path}" for method in route.methods or ())


def _redis_keys() -> Iterator[str]:
    keys = RedisKeys(model_key="MODEL")
    yield from (
        f"Redis key {key}" for name, key in vars(keys).items() if not name.startswith("_") and name != "model_key"
    )
    for name, make in inspect.getmembers(keys, inspect.ismethod):
        if not name.startswith("_"):
            yield f"Redis key {make('NAME')}"


def _metrics() -> Iterator[str]:
    """As the generated page has them, which another test holds against the collectors."""
    for row in METRICS_PAGE.read_text(encoding="utf-8").splitlines():
        if row.startswith("| `slipstream_"):
            name, kind, labels = (cell.strip().replace("`", "") for cell in row.split("|")[1:4])
            yield f"metric {name} {kind} {labels}".rstrip()


def _trace_format() -> Iterator[str]:
    data = encode_trace(make_trace())
    tensors = safetensors.torch.load(data)
    yield from (f"trace tensor {name} {tensor.dtype}" for name, tensor in tensors.items())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    yield from (f"trace metadata {name}" for name in header)
    yield from (f"trace header {name}" for name in msgspec.json.decode(header["header"]))


def _draft_format() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        store = DraftStore(folder)
        config = draft_config_json(CONFIG)
        store.write(draft_state(make_draft()), config, parent=None, target_fingerprint="f" * 64, info={})
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                yield f"draft file {path.relative_to(folder)}"
                if path.suffix == ".safetensors":
                    yield from (
                        f"draft tensor {name} {tensor.dtype}"
                        for name, tensor in safetensors.torch.load_file(path).items()
                    )
                elif path.suffix == ".json":
                    document = json.loads(path.read_text(encoding="utf-8"))
                    names = document[0] if isinstance(document, list) else document
                    yield from (f"draft {path.name} {name}" for name in names)


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
