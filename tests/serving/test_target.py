"""Who may move the target where to, and what is counted and told."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from serving.engine import TargetReport
from serving.metrics import TargetMetrics
from serving.target import TargetLayout, TargetUpdater, check_weights, read_layout, read_weights
from speculator.errors import EngineBusyError, RequestError, SlipstreamError, TargetError
from tests.fixtures.toy import WEIGHTS, make_toy_model


@dataclass
class Host:
    """Moves when told, or fails."""

    target_version: int = 0
    failure: Exception | None = None
    moves: list[tuple[int, Path | None]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def update_target(self, version: int, folder: Path | None) -> TargetReport:
        self.reached.set()
        assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        self.moves.append((version, folder))
        previous, self.target_version = self.target_version, version
        return TargetReport(version=version, previous=previous, stall_ms=40.0)


@dataclass
class Scene:
    host: Host
    desk: TargetUpdater
    registry: CollectorRegistry

    def changes(self) -> tuple[float | None, float | None]:
        name = "slipstream_target_moves_total"
        return (
            self.registry.get_sample_value(name, {"outcome": "installed"}),
            self.registry.get_sample_value(name, {"outcome": "refused"}),
        )


def scene(folder: Path | None = None) -> Scene:
    host, registry = Host(), CollectorRegistry()
    host.gate.set()
    desk = TargetUpdater(host, TargetMetrics(registry), folder=folder)
    return Scene(host, desk, registry)


def test_a_version_comes_into_service(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    here = scene(tmp_path)
    assert here.desk.announce(7, "step-7").previous == 0
    assert here.desk.announce(9, str(tmp_path / "step-7")).previous == 7
    assert here.host.moves == [(7, tmp_path / "step-7"), (9, tmp_path / "step-7")]
    assert here.changes() == (2, 0)
    assert here.registry.get_sample_value("slipstream_target_version") == 9
    assert here.registry.get_sample_value("slipstream_target_stall_seconds_sum") == pytest.approx(0.08)


@pytest.mark.parametrize("version", [1, 4])
def test_versions_only_count_up(version: int) -> None:
    here = scene()
    here.desk.announce(5, None)
    with pytest.raises(TargetError, match="not newer than 5"):
        here.desk.announce(version, None)
    assert (here.host.target_version, here.changes()) == (5, (1, 1))


def test_the_version_in_service_may_be_said_twice(tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    here = scene(tmp_path)
    here.desk.announce(5, None)
    assert here.desk.announce(5, None) == TargetReport(version=5, previous=5, stall_ms=0.0)
    assert here.changes() == (1, 0), "it has not moved again"
    here.desk.announce(5, "step")
    assert here.host.moves == [(5, None), (5, tmp_path / "step")], "with weights, of which a server may lack some"


@pytest.mark.parametrize(
    "path", ["..", "../other", "/etc", "file", "missing", "link", "a\0b", "x" * 5000, "step/../.."]
)
def test_only_folders_below_the_allowed_one_are_read(tmp_path: Path, path: str) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    (allowed / "step").mkdir(parents=True)
    other.mkdir()
    (allowed / "file").write_text("")
    (allowed / "link").symlink_to(other)
    here = scene(allowed)
    with pytest.raises(RequestError, match="folder below") as refusal:
        here.desk.announce(1, path)
    assert (refusal.value.param, here.host.moves, here.changes()) == ("path", [], (0, 1))


def test_no_path_is_taken_where_none_is_allowed(tmp_path: Path) -> None:
    here = scene()
    with pytest.raises(RequestError, match="SLIPSTREAM_GATEWAY_TARGETS_DIR"):
        here.desk.announce(1, str(tmp_path))
    assert here.host.moves == []


def test_what_the_engine_refuses_is_counted_and_told_to_nobody() -> None:
    here = scene()
    here.host.failure = TargetError("not finite")
    with pytest.raises(SlipstreamError):
        here.desk.announce(1, None)
    assert here.changes() == (0, 1)


def test_one_change_at_a_time() -> None:
    here = scene()
    here.host.gate.clear()
    first = threading.Thread(target=here.desk.announce, args=(1, None))
    first.start()
    assert here.host.reached.wait(20)
    with pytest.raises(EngineBusyError):
        here.desk.announce(2, None)
    here.host.gate.set()
    first.join()
    assert here.desk.announce(2, None).previous == 1


def with_stored_output_layer(folder: Path) -> Path:
    """Store the tied output layer as well."""
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def as_transformers_4(folder: Path, **values: Any) -> Path:
    """Give config.json the form in which most published models have it."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "head_dim"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5, **values}))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", [{}, {"rope_scaling": LLAMA_3}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_weights_may_come_from_another_version_of_transformers(
    tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    served = as_transformers_4(make_toy_model(tmp_path / "served", family=family), **rope)
    layout, saved = read_layout(served), tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(served).save_pretrained(saved)
    check_weights(saved, layout)
    assert read_weights(saved, layout).keys() == layout.shapes.keys()
    as_transformers_4(saved, **rope, rope_theta=1e6)
    with pytest.raises(TargetError, match="another architecture"):
        check_weights(saved, layout)


def test_an_architecture_that_transformers_does_not_know_is_compared_as_stored(tmp_path: Path) -> None:
    served, new = (as_transformers_4(make_toy_model(tmp_path / name), model_type="own") for name in ("1", "2"))
    check_weights(new, read_layout(served))
    as_transformers_4(new, model_type="own", rope_theta=1e6)
    with pytest.raises(TargetError, match="another architecture"):
        check_weights(new, read_layout(served))


def test_a_file_that_sglang_would_load_too_is_refused(tmp_path: Path) -> None:
    """Its values would replace those of the model, or end SGLang where no parameter has its tensors' names."""
    folder = make_toy_model(tmp_path / "model")
    layout = read_layout(folder)
    shutil.copy(folder / WEIGHTS, folder / "ema.safetensors")
    with pytest.raises(TargetError, match=r"SGLang would load ema\.safetensors, too"):
        check_weights(folder, layout)
    index = {"weight_map": dict.fromkeys(layout.shapes, WEIGHTS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(folder, layout)


@pytest.mark.parametrize("reads", [check_weights, read_weights])
def test_a_folder_without_usable_weights_is_refused_with_what_to_do(
    tmp_path: Path, reads: Callable[[Path, TargetLayout], object]
) -> None:
    folder = make_toy_model(tmp_path / "model")
    layout = read_layout(folder)
    # As where a model in shards is saved over one in a single file.
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    with pytest.raises(
        TargetError, match=r"model has no usable safetensors weights: .*: remove model\.safetensors, or"
    ):
        reads(folder, layout)
    (folder / WEIGHTS).unlink()
    reads(folder, layout)
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    with pytest.raises(TargetError, match=r"No such file or directory: .*model\.safetensors\): check the path"):
        reads(folder, layout)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(TargetError, match=r"pytorch_model\.bin: convert them to safetensors"):
        reads(folder, layout)


def test_of_tied_weights_a_folder_may_have_one_copy_or_two(tmp_path: Path) -> None:
    one = make_toy_model(tmp_path / "one")
    two = with_stored_output_layer(make_toy_model(tmp_path / "two"))
    for served, new in ((one, two), (two, one)):
        check_weights(new, read_layout(served))
        read_weights(new, read_layout(served))
    for folder in (one, two):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(TargetError, match=r"missing or extra tensors: lm_head\.weight"):
        check_weights(one, read_layout(two))
