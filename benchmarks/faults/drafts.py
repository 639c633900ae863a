"""Faults of drafts: files that are damaged or lie, weights that are useless, swaps in the middle of answers."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.loop import Loop
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore
from tests.hostile.drafts import CONFIG, MANIFEST, WEIGHTS, Files, put, vouched

SWAPS = 10
LONGEST_TRIAL_S = 90.0
BAD = (
    *("truncated", "one bit flipped", "config altered", "manifest not JSON", "NaN", "another shape", "another type"),
    *("embed_tokens", "another d2t", "another target"),
)


def forged(store: DraftStore, kind: str) -> int:
    """Write a version that looks as if it passed the gate: `random`, or a kind of `BAD`.

    Only somebody with access to the store could make one.
    """
    version = (store.latest() or 0) + 100  # the trainer goes on writing its own
    origin, apart = store.lifecycle.last_good() or 1, store.root / "forging"
    place, theirs = (Path("versions", f"{number:06d}") for number in (version, origin))
    files = {name: (store.root / theirs / name).read_bytes() for name in (WEIGHTS, CONFIG, MANIFEST)}
    put(apart, _changed(vouched(files, version=version), store.load(origin), kind), version)
    (apart / place).rename(store.root / place)
    for state in (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED):
        store.lifecycle.move(version, state, actor="faults")
    return version


def _random(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def noise(tensor: Tensor) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator) * tensor.float().std(unbiased=False)
        return drawn.to(tensor.dtype)

    return {name: noise(tensor) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _changed(files: Files, state: dict[str, Tensor], kind: str) -> Files:
    raw, fc, norm = files[WEIGHTS], state["fc.weight"], state["norm.weight"]
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1

    def weights(tensors: dict[str, Tensor]) -> Files:
        return vouched({**files, WEIGHTS: safetensors.torch.save({**state, **tensors}, {"format": "pt"})})

    return {
        "truncated": lambda: {**files, WEIGHTS: raw[:-100]},
        "one bit flipped": lambda: {**files, WEIGHTS: bytes(flipped)},
        "config altered": lambda: {**files, CONFIG: files[CONFIG] + b" "},
        "manifest not JSON": lambda: {**files, MANIFEST: b"{"},
        "NaN": lambda: weights({"norm.weight": torch.full_like(norm, float("nan"))}),
        "another shape": lambda: weights({"fc.weight": fc[:-1].contiguous()}),
        "another type": lambda: weights({"fc.weight": fc.float()}),
        "embed_tokens": lambda: weights({"embed_tokens.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}),
        "another d2t": lambda: weights({"d2t": state["d2t"] + 1}),
        "another target": lambda: vouched(files, target_fingerprint="0" * 64),
        "random": lambda: weights(_random(state)),
    }[kind]()


@fault(
    "draft files: " + ", ".join(BAD) + "; the pointer moved to each",
    "each is refused before it reaches the engine and barred with the reason; the version in service stays",
)
def bad_files(loop: Loop) -> Observed:
    started_s, refused, served = time.monotonic(), [], []
    for kind in BAD:
        bad = forged(loop.store, kind)
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
        bad = forged(loop.store, "random")
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
