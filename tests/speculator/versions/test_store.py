"""The draft store: versions are complete or absent, and nothing damaged or foreign is ever loaded."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from speculator.draft.checkpoint import config_from_json, draft_config_json, draft_state, expected_shapes
from speculator.errors import DraftError, DraftFileError, DraftMismatchError, StoreError
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore, Manifest, code_source, tensors_of
from tests.fixtures.drafts import CONFIG, make_draft

TARGET = "a" * 64
SHAPES = expected_shapes(CONFIG)


def state(seed: int = 0) -> dict[str, Tensor]:
    return draft_state(make_draft(seed))


def write(store: DraftStore, seed: int = 0, **changes: Any) -> Manifest:
    values: dict[str, Any] = {"parent": None, "target_fingerprint": TARGET, "info": {}} | changes
    return store.write(state(seed), draft_config_json(CONFIG), **values)


def load(store: DraftStore, version: int = 1) -> dict[str, Tensor]:
    return store.load(version, expected_fingerprint=TARGET, expected_d2t=state()["d2t"], expected_shapes=SHAPES)


@pytest.fixture
def store(tmp_path: Path) -> DraftStore:
    return DraftStore(tmp_path / "drafts")


def test_an_empty_store_is_empty(store: DraftStore) -> None:
    assert (store.versions(), store.latest(), store.lifecycle.last_good(), store.prune(1)) == ([], None, None, [])
    assert not store.root.exists()
    with pytest.raises(StoreError, match="version 7 is not in"):
        store.manifest(7)
    with pytest.raises(StoreError, match="version 7 is not in"):
        store.load(7)


def test_a_version_comes_back_as_it_was_written(store: DraftStore) -> None:
    info = {"num_traces": 40, "trained_tokens": 9_000, "scores": {"accept_length": 1.7}}
    first = write(store)
    second = write(store, 1, parent=first.version, info=info)
    assert (first.version, second.version, second.parent, second.info) == (1, 2, 1, info)
    assert store.manifest(2) == second
    assert (store.versions(), store.latest()) == ([1, 2], 2)
    assert second.source == code_source()
    loaded = load(store, 2)
    assert loaded.keys() == state(1).keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state(1).items())
    assert config_from_json(store.config(2)) == CONFIG
    assert sorted(path.name for path in (store.root / "versions").iterdir()) == ["000001", "000002"]
    assert sorted(path.name for path in (store.root / "versions" / "000002").iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
    ]


def test_a_kernel_that_refuses_memory_files_loads_a_draft(store: DraftStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with `vm.memfd_noexec=2`."""

    def memfd_create(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    write(store)
    expected = load(store)
    monkeypatch.setattr(os, "memfd_create", memfd_create)
    loaded = load(store)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in expected.items())


def test_a_file_system_without_modes_holds_a_store(store: DraftStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows' drives below WSL, and SMB shares."""

    def chmod(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(Path, "chmod", chmod)
    assert write(store).version == 1
    load(store)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_others_may_read_what_the_umask_lets_them(store: DraftStore, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write(store)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (store.root / "versions" / "000001").iterdir()}
    assert modes == dict.fromkeys(("config.json", "manifest.json", "model.safetensors"), mode)


def test_pruning_keeps_the_newest_and_the_last_good(store: DraftStore) -> None:
    for _ in range(6):
        write(store)
    for state in (VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE, VersionState.PROMOTED):
        store.lifecycle.move(2, state, actor="test")
    assert store.prune(keep=2) == [1, 3, 4]
    assert store.prune(keep=0) == [5]
    assert store.lifecycle.states() == {2: VersionState.PROMOTED, 6: VersionState.WRITTEN}
    assert store.versions() == [2, 6]
    assert write(store).version == 7
    load(store, 2)


def test_a_live_version_without_a_verdict_goes_once_a_later_one_is_promoted(store: DraftStore) -> None:
    for version in (1, 2, 3):
        write(store)
        for state in (VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE):
            store.lifecycle.move(version, state, actor="test")
    assert store.prune(keep=1) == [1], "2 and 3 may be on trial against each other"
    store.lifecycle.move(3, VersionState.PROMOTED, actor="test")
    assert store.prune(keep=1) == [2]


def test_versions_that_a_moving_target_leaves_without_a_verdict_do_not_fill_the_store(store: DraftStore) -> None:
    for version in range(1, 32):
        write(store)
        for state in (VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE):
            store.lifecycle.move(version, state, actor="test")
        if version == 1:
            store.lifecycle.move(version, VersionState.PROMOTED, actor="test")
    store.prune(keep=2)
    assert store.versions() == [1, 30, 31]


# -- damage


def edit(store: DraftStore, name: str, change: Callable[[bytes], bytes]) -> None:
    path = store.root / "versions" / "000001" / name
    path.write_bytes(change(path.read_bytes()))


def forge(store: DraftStore, weights: dict[str, Tensor]) -> None:
    """Put other weights in place, with a manifest that vouches for them."""
    forge_bytes(store, safetensors.torch.save(weights))


def forge_bytes(store: DraftStore, data: bytes) -> None:
    edit(store, "model.safetensors", lambda _: data)
    digest = hashlib.sha256(data).hexdigest()
    edit(store, "manifest.json", lambda data: json.dumps(json.loads(data) | {"weights_sha256": digest}).encode())


def flip_last_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [flip_last_bit, lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""],
    ids=["bit flipped", "truncated", "longer", "empty"],
)
def test_damaged_weights_are_refused(store: DraftStore, damage: Callable[[bytes], bytes]) -> None:
    write(store)
    edit(store, "model.safetensors", damage)
    with pytest.raises(DraftFileError, match=r"version 1.*truncated or altered"):
        load(store)


def replaced(**tensors: Tensor | None) -> dict[str, Tensor]:
    merged = state() | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in merged.items() if tensor is not None}


NORM = state()["norm.weight"]
FORGED: dict[str, dict[str, Tensor]] = {
    r"norm.weight is not finite": replaced(norm__weight=NORM / 0),
    r"norm.weight has shape \(7,\)": replaced(norm__weight=NORM[1:].clone()),
    r"norm.weight is torch.float32": replaced(norm__weight=NORM.float()),
    r"norm.weight is torch.float16": replaced(norm__weight=NORM.half()),
    r"d2t is torch.int32": replaced(d2t=state()["d2t"].int()),
    r"t2d is torch.uint8": replaced(t2d=state()["t2d"].byte()),
    r"extra tensors: spare": replaced(spare=NORM.clone()),
    r"missing or extra tensors: norm.weight": replaced(norm__weight=None),
    r"missing or extra tensors: d2t": replaced(d2t=None),
    r"embed_tokens.weight would overwrite": replaced(embed_tokens__weight=torch.zeros(20, 8, dtype=torch.bfloat16)),
    r"lm_head.weight has shape \(20, 8\)": replaced(lm_head__weight=torch.zeros(20, 8, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("reason", FORGED)
def test_forged_weights_are_refused_with_the_reason(store: DraftStore, reason: str) -> None:
    write(store)
    forge(store, FORGED[reason])
    with pytest.raises(DraftFileError, match=reason):
        load(store)


@pytest.mark.parametrize("reason", [reason for reason in FORGED if "shape" not in reason and "extra" not in reason])
def test_unusable_weights_are_not_written(store: DraftStore, reason: str) -> None:
    with pytest.raises(DraftFileError, match=reason):
        store.write(FORGED[reason], {}, parent=None, target_fingerprint=TARGET, info={})
    assert store.versions() == []


def test_other_threads_run_while_tensors_are_read() -> None:
    """In an engine's process one of them serves."""
    data = safetensors.torch.save({"a": torch.ones(256 << 20, dtype=torch.uint8), "b": torch.arange(3)})
    longest_s, is_over = 0.0, False

    def serve() -> None:
        nonlocal longest_s
        before_s = time.perf_counter()
        while not is_over:
            now_s = time.perf_counter()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s

    thread = threading.Thread(target=serve)
    thread.start()
    begun_s = time.perf_counter()
    found = tensors_of(data)
    took_s = time.perf_counter() - begun_s
    is_over = True
    thread.join()
    # The library's own `load` stops them for all of its time.
    assert longest_s < 0.6 * took_s
    assert found["b"].tolist() == [0, 1, 2]
    assert bool((found["a"] == 1).all())


def test_weights_that_are_not_safetensors_are_refused(store: DraftStore) -> None:
    write(store)
    forge_bytes(store, b"\x80\x04.")
    with pytest.raises(DraftFileError, match="cannot be read"):
        load(store)


def test_another_target_or_vocabulary_is_refused(store: DraftStore) -> None:
    write(store)
    with pytest.raises(DraftMismatchError, match="trained for target aaaaaaaaaaaa, this one is bbbbbbbbbbbb"):
        store.load(1, expected_fingerprint="b" * 64)
    with pytest.raises(DraftMismatchError, match="d2t"):
        store.load(1, expected_d2t=state()["d2t"] + 1)


def test_an_altered_config_or_manifest_is_refused(store: DraftStore) -> None:
    write(store)
    edit(store, "config.json", lambda data: data.replace(b'"hidden_size": 8', b'"hidden_size": 9'))
    with pytest.raises(DraftFileError, match="altered"):
        store.config(1)
    with pytest.raises(DraftFileError, match="altered"):
        load(store)
    edit(store, "manifest.json", lambda data: data.replace(b'"version": 1', b'"version": 3'))
    with pytest.raises(DraftFileError, match="belongs to version 3"):
        store.manifest(1)
    edit(store, "manifest.json", lambda data: data[:-5])
    with pytest.raises(DraftFileError, match="manifest is damaged"):
        load(store)


def test_a_missing_file_is_a_store_error(store: DraftStore) -> None:
    write(store)
    (store.root / "versions" / "000001" / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors is missing"):
        load(store)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_any_file_is_refused(store: DraftStore, data: st.DataObject) -> None:
    """The manifest alone vouches for itself: damage to what it merely tells is not found, what it guards is.

    So damage to the others is never loaded, and what is loaded at all is what was written.
    """
    if not store.versions():
        write(store)
    files = ["model.safetensors", "config.json", "manifest.json"]
    name = data.draw(st.sampled_from(files))
    path = store.root / "versions" / "000001" / name
    original = path.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    refusal: DraftError | None = None
    loaded: dict[str, Tensor] = {}
    try:
        loaded = load(store)
    except DraftError as error:
        refusal = error
    finally:
        path.write_bytes(original)
    if name != "manifest.json" and bytes(damaged) != original:
        assert isinstance(refusal, DraftFileError)
    if refusal is None:
        assert loaded.keys() == state().keys()
        assert all(torch.equal(tensor, loaded[key]) for key, tensor in state().items())


# -- writers


DIE_WHILE_WRITING = """
import os, signal, sys, torch
from speculator.versions import store
store.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
weights = {"d2t": torch.zeros(1, dtype=torch.int64)}
store.DraftStore(sys.argv[1]).write(weights, {}, parent=None, target_fingerprint="", info={})
"""


def test_a_writer_that_dies_leaves_no_version_and_its_leftovers_go(store: DraftStore) -> None:
    died = subprocess.run([sys.executable, "-c", DIE_WHILE_WRITING, store.root], check=False)
    assert died.returncode == -signal.SIGKILL
    [leftover] = (store.root / "versions").iterdir()
    assert store.versions() == []
    assert write(store).version == 1
    assert not leftover.exists()


def test_concurrent_writers_get_different_numbers(store: DraftStore) -> None:
    def write_some(seed: int) -> list[int]:
        return [write(DraftStore(store.root), seed).version for _ in range(8)]

    with ThreadPoolExecutor(3) as pool:
        versions = [version for written in pool.map(write_some, range(3)) for version in written]
    assert sorted(versions) == store.versions() == list(range(1, 25))
    for version in versions:
        load(store, version)
    assert len(list((store.root / "versions").iterdir())) == 24


def test_temporary_folders_of_the_living_stay(store: DraftStore) -> None:
    write(store)
    versions = store.root / "versions"
    own = versions / f".tmp-{socket.gethostname()}-{os.getpid()}-0"
    foreign, old = versions / ".tmp-other-host-1-0", versions / ".tmp-other-host-1-1"
    before_restart = versions / f".tmp-{socket.gethostname()}-{os.getpid()}-1"
    beside, reused = (versions / f".tmp-{socket.gethostname()}-{os.getppid()}-{number}" for number in range(2))
    for folder in (own, foreign, old, before_restart, beside, reused):
        folder.mkdir()
    for folder in (old, reused):
        os.utime(folder, (0, 0))
    os.utime(before_restart, (psutil.Process().create_time() - 1,) * 2)
    write(store)
    assert own.exists()
    assert foreign.exists()
    assert beside.exists()
    assert not reused.exists(), "another process has the number of the one that died"
    assert not old.exists()
    assert not before_restart.exists(), "a container's process has the same number after a restart"
    assert store.versions() == [1, 2]


def test_a_number_that_another_writer_took_is_skipped(store: DraftStore) -> None:
    class Behind(DraftStore):
        def versions(self) -> list[int]:
            return []

    write(store)
    assert write(Behind(store.root)).version == 2
    assert store.manifest(2).version == 2


def test_an_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="check its permissions and free space"):
        write(DraftStore(tmp_path / "file" / "drafts"))


@pytest.mark.parametrize("name", ["states", "events.jsonl"])
def test_a_version_whose_state_or_event_cannot_be_written_leaves_nothing(store: DraftStore, name: str) -> None:
    """Each attempt would leave a draft otherwise."""
    blocked = store.root / name
    store.root.mkdir(exist_ok=True)
    if name == "states":
        blocked.write_text("no folder")
    else:
        blocked.mkdir()
    for _ in range(2):
        with pytest.raises(StoreError):
            write(store)
    assert list((store.root / "versions").iterdir()) == []
    blocked.unlink() if name == "states" else blocked.rmdir()
    assert write(store).version == 1
    assert store.lifecycle.states() == {1: VersionState.WRITTEN}


def test_the_source_is_known_without_git(tmp_path: Path) -> None:
    git = tmp_path / ".git"
    assert code_source(tmp_path) == importlib.metadata.version("slipstream-spec")
    (git / "refs").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/main\n")
    (git / "refs" / "main").write_text("c0ffee\n")
    assert code_source(tmp_path) == "c0ffee"
    (git / "HEAD").write_text("deadbeef\n")
    assert code_source(tmp_path) == "deadbeef"


def test_a_manifest_is_readable_json(store: DraftStore) -> None:
    manifest = write(store, info={"gate": "passed"})
    values = json.loads((store.root / "versions" / "000001" / "manifest.json").read_text())
    assert values == msgspec.to_builtins(manifest)
