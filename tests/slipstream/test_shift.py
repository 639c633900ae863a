"""The shift benchmark: its split and arithmetic, what each policy remembers, and small runs on the toy target."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.shift import (
    FEW,
    NEWEST_ONLY,
    NO_REPLAY,
    POLICIES,
    REPLAY,
    ShiftOptions,
    figures,
    make_replay,
    read_stored,
    report,
    run_all,
    split_traffic,
    spreads,
)
from speculator.checkpoint import target_fingerprint
from speculator.codec import encode_trace
from speculator.errors import ConfigError
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingHeader, RecordingWriter
from tests.toy import random_draft
from tests.trainer.answers import answer_traces
from trainer.config import load_config
from trainer.provenance import Stored
from trainer.replay import Replay

NUM_TRACES = 15


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_BATCH_TOKENS", "96")
    monkeypatch.setenv("SLIPSTREAM_TRAINER_DRAFT_VOCAB_SIZE", "40")


@pytest.fixture(scope="module")
def recordings(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Answers of the toy target to the prompts of two domains."""
    folder = tmp_path_factory.mktemp("recordings")
    header = RecordingHeader(target_fingerprint=target_fingerprint(toy_model), model="toy", created_ms=1)
    paths = {}
    for seed, domain in enumerate(("a", "b")):
        paths[domain] = folder / f"{domain}.rec"
        with RecordingWriter(paths[domain], header) as writer:
            for trace in answer_traces(toy_model, num_traces=NUM_TRACES, seed=seed):
                name = f"{domain}-{trace.header.trace_id}"
                labelled = msgspec.structs.replace(trace.header, trace_id=name, domain=domain)
                writer.append(encode_trace(dataclasses.replace(trace, header=labelled)), trace_id=name)
    return paths


@pytest.fixture
def stored(toy_model: Path, recordings: dict[str, Path]) -> dict[str, list[Stored]]:
    draft = random_draft(toy_model, seed=0)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    width = draft.fc.in_features
    return {domain: read_stored(path, draft_ids_V, feature_width=width) for domain, path in recordings.items()}


def test_no_answer_is_shown_twice_as_new_and_none_that_is_held_out(stored: dict[str, list[Stored]]) -> None:
    traffic = split_traffic(stored["a"], stored["b"], seed=0)
    shown = {phase: [one.trace_id for one in arriving] for phase, arriving in traffic.phases.items()}
    held_out = {domain: [one.trace_id for one in examples] for domain, examples in traffic.held_out.items()}
    assert [(phase, len(ids)) for phase, ids in shown.items()] == [("a", 8), ("b", 12), ("a_again", 4)]
    assert [(domain, len(ids)) for domain, ids in held_out.items()] == [("a", 3), ("b", 3)]
    everything = [one for ids in (*shown.values(), *held_out.values()) for one in ids]
    assert len(set(everything)) == len(everything) == 2 * NUM_TRACES
    order = [one.trace_id for one in stored["a"]]
    of_a = [order.index(one) for one in shown["a"] + shown["a_again"]]
    assert of_a == sorted(of_a), "the return goes on where the first phase ended"
    other = split_traffic(stored["a"], stored["b"], seed=1)
    assert [one.trace_id for one in other.held_out["a"]] != held_out["a"]
    with pytest.raises(ConfigError, match="--answers"):
        split_traffic(stored["a"][:2], stored["b"], seed=0)


def remembered(policy: str, model_dir: Path, stored: dict[str, list[Stored]]) -> list[str]:
    """What a policy with half of the bytes keeps after all of A and then all of B."""
    unused: dict[str, Any] = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, **unused)
    arriving = [*stored["a"], *stored["b"]]
    sizes = [one.num_bytes for one in arriving]
    replay: Replay = make_replay(policy, sizes, config, random.Random(0), share=0.5)
    for one in arriving:
        replay.add(one, domain=one.provenance.domain)
        replay.draw(config.batch_tokens, published=0)
    return list(replay.members)


def test_the_policies_differ_in_what_they_remember(toy_model: Path, stored: dict[str, list[Stored]]) -> None:
    newest = [one.trace_id for one in stored["b"]]
    kept = remembered(REPLAY, toy_model, stored)
    num_of_a = sum(name.startswith("a-") for name in kept)
    assert num_of_a >= NUM_TRACES // 4
    assert kept[-5:] == newest[-5:]
    kept = remembered(NEWEST_ONLY, toy_model, stored)
    assert kept == newest[-len(kept) :], "the oldest are forgotten first, and none is spared"
    assert len(kept) >= NUM_TRACES - 1
    kept = remembered(NO_REPLAY, toy_model, stored)
    assert kept == newest[-FEW:]


def run_of(
    policy: str, seed: int, a: tuple[float, float, float], b: tuple[float, float], depth: int = 5
) -> dict[str, Any]:
    """A run whose curve has two points a phase; only the last of them counts."""
    curve: list[dict[str, Any]] = [point(None, 1.0, 1.0, depth)]
    for phase, of_a, of_b in zip(("a", "b", "a_again"), a, (*b, 9.0), strict=True):
        curve += [point(phase, 7.0, 7.0, depth), point(phase, of_a, of_b, depth)]
    return {"policy": policy, "seed": seed, "curve": curve}


def point(phase: str | None, of_a: float, of_b: float, depth: int) -> dict[str, Any]:
    return {"phase": phase, "accept_length_a": {str(depth): of_a}, "accept_length_b": {str(depth): of_b}}


def test_the_figures_compare_the_ends_of_the_phases() -> None:
    run = run_of(NO_REPLAY, 0, a=(2.0, 1.5, 1.8), b=(1.6, 2.0))
    static = run_of(REPLAY, 0, a=(2.0, 2.0, 2.0), b=(1.25, 2.0))
    assert figures(run, static, 5) == {
        "a_before": 2.0,
        "a_on_return": 1.5,
        "a_after": 1.8,
        "b_static": 1.25,
        "b_after": 2.0,
        "retention_on_return": pytest.approx(0.75),
        "retention_after": pytest.approx(0.9),
        "recovery": pytest.approx(1.6),
    }


def by_key(*runs: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["policy"], run["seed"]): run for run in runs}


def test_the_static_draft_is_that_of_replay_and_of_the_same_seed() -> None:
    runs = by_key(
        *(run_of(REPLAY, seed, a=(2.0, 2.0, 2.0), b=(b_static, 2.0)) for seed, b_static in enumerate((1.0, 1.25, 1.6))),
        *(run_of(NO_REPLAY, seed, a=(2.0, 1.0, 2.0), b=(9.0, 2.5)) for seed in range(3)),
    )
    found = spreads(runs, 5)
    assert found[REPLAY]["recovery"].to_dict() == {"median": 1.6, "min": 1.25, "max": 2.0}
    assert found[NO_REPLAY]["recovery"].median == pytest.approx(2.0)
    assert found[NO_REPLAY]["b_static"].high == 1.6
    assert found[NO_REPLAY]["retention_on_return"].median == pytest.approx(0.5)


def reported(runs: dict[tuple[str, int], dict[str, Any]], depths: list[int], path: Path) -> tuple[int, dict[str, Any]]:
    arguments = argparse.Namespace(a="math", b="code", depths=depths, memory_share=0.5, passes=3, json=path)
    with pytest.raises(SystemExit) as ended:
        report(runs, arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads(path.read_text())


@pytest.mark.parametrize(("on_return", "b_after", "code"), [(1.9, 1.5, 0), (1.89, 1.5, 1), (1.9, 1.49, 1)])
def test_both_targets_are_about_replay(
    on_return: float, b_after: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = by_key(
        run_of(REPLAY, 0, a=(2.0, on_return, 2.0), b=(1.2, b_after)),
        run_of(NO_REPLAY, 0, a=(2.0, 1.0, 2.0), b=(1.2, 1.2)),
    )
    ended, document = reported(runs, [5], tmp_path / "shift.json")
    assert ended == code
    assert list(document["targets"]) == ["retention_on_return of replay", "recovery of replay"]
    assert document["policies"][NO_REPLAY]["depth_5"]["retention_on_return"]["median"] == 0.5
    assert "A 2.00 → 1.00 → 2.00     B 1.20 → 1.20" in capsys.readouterr().out


def test_a_shift_on_the_toy_target(toy_model: Path, recordings: dict[str, Path], tmp_path: Path) -> None:
    tasks = [
        ShiftOptions(
            recording_a=recordings["a"],
            recording_b=recordings["b"],
            model_dir=toy_model,
            policy=policy,
            seed=0,
            depths=[2, 3],
            memory_share=0.5,
            points=2,
        )
        for policy in POLICIES
    ]
    runs = {(run["policy"], run["seed"]): run for run in run_all(tasks, jobs=1)}
    _, document = reported(runs, [2, 3], tmp_path / "shift.json")
    assert list(document["policies"]) == list(POLICIES)
    kept, without = runs[REPLAY, 0], runs[NO_REPLAY, 0]
    assert kept["steps"] == without["steps"] > 12
    assert [one["phase"] for one in kept["curve"]] == [None, "a", "a", "b", "b", "a_again", "a_again"]
    assert kept["curve"][0] == without["curve"][0], "the same draft, seen by the same held-out answers"
    assert kept["refused_traces"] == without["refused_traces"] == 0
    assert kept["memory_at_end_of"]["b"]["bytes_by_domain"]["a"] > 0
    assert "a" not in without["memory_at_end_of"]["b"]["bytes_by_domain"]
    (again,) = run_all(tasks[:1], jobs=2)  # in another process
    assert again | {"seconds": 0} == kept | {"seconds": 0}
