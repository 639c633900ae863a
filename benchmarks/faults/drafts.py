"""Faults of drafts: files that are damaged or lie, weights that are useless, swaps in the middle of answers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.loop import Loop
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore

Weights = dict[str, Tensor]
Damage = Callable[[Path], None]
SWAPS = 10
LONGEST_TRIAL_S = 90.0


def forge(
    store: DraftStore,
    origin: int,
    *,
    weights: Callable[[Weights], Weights] = dict,
    damage: Damage | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> int:
    """Write a version that looks as if it passed the gate: its manifest fits its weights, unless `damage` changes them.

    Only somebody with access to the store could make one.
    """
    versions = store.root / "versions"
    version = (store.latest() or 0) + 100  # the trainer goes on writing its own
    folder = versions / f".forged-{version}"
    shutil.copytree(versions / f"{origin:06d}", folder)
    file = folder / "model.safetensors"
    safetensors.torch.save_file(weights(store.load(origin)), file, {"format": "pt"})
    values = json.loads((folder / "manifest.json").read_bytes())
    values |= {"version": version, "weights_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), **(manifest or {})}
    (folder / "manifest.json").write_text(json.dumps(values))
    if damage is not None:
        damage(folder)
    folder.rename(versions / f"{version:06d}")
    for state in (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED):
        store.lifecycle.move(version, state, actor="faults")
    return version


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _alter_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")


def _break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def _with_nan(weights: Weights) -> Weights:
    return {**weights, "norm.weight": torch.full_like(weights["norm.weight"], float("nan"))}


def _another_shape(weights: Weights) -> Weights:
    return {**weights, "fc.weight": weights["fc.weight"][:-1].contiguous()}


def _with_embedding(weights: Weights) -> Weights:
    return {**weights, "embed_tokens.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}


def _another_type(weights: Weights) -> Weights:
    return {**weights, "fc.weight": weights["fc.weight"].float()}


def _another_vocabulary(weights: Weights) -> Weights:
    return {**weights, "d2t": weights["d2t"] + 1}


def _random(weights: Weights) -> Weights:
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator) * tensor.float().std(unbiased=False)
        return drawn.to(tensor.dtype)

    return {name: noise(tensor) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


BAD: dict[str, dict[str, Any]] = {
    "truncated": {"damage": _cut},
    "one bit flipped": {"damage": _flip},
    "config altered": {"damage": _alter_config},
    "manifest not JSON": {"damage": _break_manifest},
    "NaN": {"weights": _with_nan},
    "another shape": {"weights": _another_shape},
    "another type": {"weights": _another_type},
    "embed_tokens": {"weights": _with_embedding},
    "another d2t": {"weights": _another_vocabulary},
    "another target": {"manifest": {"target_fingerprint": "0" * 64}},
}


@fault(
    "draft files: " + ", ".join(BAD) + "; the pointer moved to each",
    "each is refused before it reaches the engine and barred with the reason; the version in service stays",
)
def bad_files(loop: Loop) -> Observed:
    started_s, refused, served = time.monotonic(), [], []
    for kind, how in BAD.items():
        bad = forge(loop.store, loop.store.lifecycle.last_good() or 1, **how)
        with loop.pointer() as pointer:
            pointer.pin(bad)
            try:
                loop.wait(partial(_is_barred, loop, bad), f"'{kind}' to be barred")
            finally:
                pointer.unpin()
        refused.append(loop.store.lifecycle.history(bad)[-1].reason)
        served.append(loop.version() == bad)
    during = loop.load.since(started_s)
    return Observed(
        told=f"{len(refused)} of {len(BAD)} refused and barred, {sum(served)} served; {during}",
        checks={
            "each was refused with a reason": len(refused) == len(BAD) and all(refused),
            "none was served": not any(served),
            "no request failed, no text changed": during.num_failed == 0,
        },
        figures={"files": len(BAD), "refused": len(refused)},
    )


@fault(
    "random weights past the gate and the pointer moved to them",
    "no text changes; they are taken back by themselves and barred",
    is_slow=True,
    needs_good_draft=True,
)
def random_weights(loop: Loop) -> Observed:
    os.kill(loop.train.pid, signal.SIGSTOP)  # or it publishes the next good version meanwhile
    try:
        started_s = time.monotonic()
        bad = forge(loop.store, loop.store.lifecycle.last_good() or 1, weights=_random)
        with loop.pointer() as pointer:
            pointer.publish(bad)
        loop.wait(lambda: loop.version() == bad, "random weights in service", LONGEST_TRIAL_S)
        in_service_s = time.monotonic()
        loop.wait(lambda: loop.version() != bad, "random weights to be taken back", LONGEST_TRIAL_S)
        served_s = time.monotonic() - in_service_s
        loop.wait(partial(_is_barred, loop, bad), "random weights to be barred")
    finally:
        os.kill(loop.train.pid, signal.SIGCONT)
    last, during = loop.store.lifecycle.history(bad)[-1], loop.load.since(started_s)
    rounds = float(last.numbers.get("rounds") or 0)
    return Observed(
        told=f"back on version {loop.version()} after {served_s:.1f} s, {rounds:.0f} rounds ({last.reason}); {during}",
        checks={"no request failed, no text changed": during.num_failed == 0},
        figures={"served_s": served_s, "rounds": rounds},
    )


def _is_barred(loop: Loop, version: int) -> bool:
    return loop.store.lifecycle.state(version) is VersionState.QUARANTINED


def _is_served(loop: Loop, version: int) -> bool:
    return loop.version() == version


def _promoted(store: DraftStore) -> list[int]:
    states = store.lifecycle.states()
    return [version for version in store.versions() if states.get(version) is VersionState.PROMOTED]


@fault(f"{SWAPS} swaps in a row under load", "every answer is whole, greedy texts stay as they were")
def many_swaps(loop: Loop) -> Observed:
    loop.wait(lambda: len(_promoted(loop.store)) >= 2, "two good versions", 60)
    pair = _promoted(loop.store)[-2:]
    before, started_s = loop.metrics(), time.monotonic()
    with loop.pointer() as pointer:
        try:
            for turn in range(SWAPS):
                wanted = pair[loop.version() == pair[0]]
                pointer.pin(wanted)
                loop.wait(partial(_is_served, loop, wanted), f"swap {turn + 1}")
        finally:
            pointer.unpin()
    during, after = loop.load.since(started_s), loop.metrics()

    def grown(outcome: str) -> float:
        name = "slipstream_swaps_total"
        return after.total(name, outcome=outcome) - before.total(name, outcome=outcome)

    return Observed(
        told=f"{grown('installed'):.0f} swaps, {grown('failed'):.0f} failed; {during}",
        checks={
            "all swapped": grown("installed") >= SWAPS and grown("failed") == 0,
            "no request failed, no text changed": during.num_failed == 0,
        },
        figures={"swaps": grown("installed")},
    )
