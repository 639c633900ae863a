"""SGLang's adaptive speculation, fed by measurements: a useless draft is turned off, a good one is used."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from serving.sglang.plugin import contract, hooks
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.draft.checkpoint import draft_state
from speculator.draft.initialization import fresh_draft
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.sglang.learning import train_version
from tests.sglang.plugged import Plugged, plugged_server
from tests.sglang.test_capture import QUESTIONS


@pytest.fixture(scope="module")
def plugged(model_dir: Path, store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    folder = tmp_path_factory.mktemp("adaptive")
    config = folder / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [0, 1, 3]}}')
    flags = ("--speculative-adaptive", "--speculative-adaptive-config", str(config))
    with plugged_server(folder, model_dir, store, flags=flags, settings={"CONTROL_SHARE": "0.1"}) as server:
        yield server


def _decode(plugged: Plugged, rounds: int = 1) -> tuple[int, int]:
    """(decode steps, those in which proposals were verified) of a few questions, asked one after the other."""
    before = plugged.wait_for(lambda report: report["pending"] == "0")
    answers = [plugged.server.generate(plugged.ids(question), max_new_tokens=48) for question in QUESTIONS[:4] * rounds]
    steps = int(before["steps"])
    decoded = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    report = plugged.wait_for(lambda report: int(report["steps"]) >= steps + decoded)
    drafted = int(report["verifications"]) - int(before["verifications"])
    return int(report["steps"]) - steps, drafted


def test_changes_of_the_depth_leave_no_growing_list_behind() -> None:
    """SGLang's own list of overrides, which `/server_info` reads on the scheduler's thread."""
    hooked: dict[str, Any] = {}

    class Registry(HookRegistry):
        @classmethod
        def register(cls, target: str, hook: Any, *_: Any, **__: Any) -> None:
            hooked[target] = hook

    hooks.add_hooks(hooks.load_settings(), Registry, HookType)
    worker = MagicMock(speculative_num_steps=0)
    context = get_context()
    with context.override_server_args():
        context.override("elsewhere", speculative_num_steps=0)
        for change in range(1000):
            state = MagicMock(speculative_num_steps=1 + change % 2, speculative_num_draft_tokens=2 + change % 2)
            result = EAGLEWorkerV2.apply_runtime_state(worker, state)
            assert hooked[contract.DEPTH_CHANGE.path](result, worker, state) is None
        notes = context.overrides_log()
    assert [source for source, _ in notes] == ["elsewhere", hooks.DEPTH_NOTE]
    assert notes[-1][1] == {"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}


def test_it_takes_as_many_requests_as_a_server_that_does_not_draft(plugged: Plugged) -> None:
    """By SGLang's formula, for a cache of 20,000 tokens and windows of 8,192. Where it drafts its default is 48."""
    assert plugged.server.max_running_requests() == 2048


def test_a_draft_that_has_learnt_nothing_sleeps(plugged: Plugged) -> None:
    steps, drafted = _decode(plugged)
    assert steps > 100
    assert drafted == 0
    report = plugged.wait_for(lambda report: report["pending"] == "0")
    assert (report["asleep"], report["depth"]) == ("1", "0")


def test_a_version_that_does_not_pay_is_looked_at_and_left_alone(plugged: Plugged, store: DraftStore) -> None:
    draft = fresh_draft(resolve_model(BUNDLED_MODEL), seed=1)
    manifest = store.manifest(1)
    config = store.config(1)
    state = {**draft_state(draft), "d2t": store.load(1)["d2t"], "t2d": store.load(1)["t2d"]}
    useless = store.write(state, config, parent=1, target_fingerprint=manifest.target_fingerprint, info={})
    admit(store, useless.version, target_fingerprint=manifest.target_fingerprint, actor="test", reason="useless")

    def num_cached() -> int:
        answer = plugged.server.generate(plugged.ids(QUESTIONS[1]), max_new_tokens=2)
        return int(answer["meta_info"]["cached_tokens"])

    assert num_cached() > 0
    with ThreadPoolExecutor(1) as pool:
        # Its prompt was never read by a draft, and now there is one.
        running = pool.submit(plugged.server.generate, plugged.ids(QUESTIONS[0]), max_new_tokens=200, ignore_eos=True)
        plugged.pointer.publish(useless.version)
        plugged.wait_for(lambda report: report["version"] == str(useless.version))
        assert not running.done()
        assert len(running.result()["output_ids"]) == 200
    # SGLang has the prompt of before, and no draft has read it.
    assert num_cached() == 0
    assert num_cached() > 0
    # Short chains are looked at a few times. How soon it sleeps after that is up to the machine's times.
    steps, drafted = _decode(plugged, rounds=2)
    assert 0 < drafted < 0.4 * steps
    report = plugged.wait_for(lambda report: report["pending"] == "0")
    assert float(report["acceptance"].split(",")[0]) < 0.2
    assert "1/0=" in report["round_ms"]
    assert "1/1=" in report["round_ms"]
    _decode(plugged)
    plugged.wait_for(lambda report: report["asleep"] == "1")


def _gain(report: dict[str, str]) -> float:
    """What the best depth promises by the plugin's own figures: tokens a round, over its time beside a plain one."""
    ms = {part.partition("=")[0]: float(part.partition("=")[2]) for part in report["round_ms"].split(",")}
    reached = list(itertools.accumulate(map(float, report["acceptance"].split(",")), operator.mul))
    return max((1 + sum(reached[:depth])) * ms["1/0"] / ms[f"1/{depth}"] for depth in (1, 3))


@pytest.mark.timeout(900)  # it trains a draft, for minutes on a slow machine
def test_a_draft_that_is_accepted_is_used_and_measured(plugged: Plugged, store: DraftStore, model_dir: Path) -> None:
    traces = plugged.traces(12)
    version = train_version(store, model_dir, traces.values(), num_steps=80)
    plugged.pointer.publish(version)
    plugged.wait_for(lambda report: report["version"] == str(version))
    _decode(plugged)
    steps, drafted = _decode(plugged, rounds=2)
    report = plugged.report()
    if _gain(report) < 1.1:
        return  # On this machine a pass of the draft costs too much for what it saves.
    assert drafted > 0.5 * steps, report
    assert float(report["acceptance"].split(",")[0]) > 0.4
    # One step in ten decodes plainly, so the measured baseline is there.
    assert float(report["speedup"]) > 0
    assert float(report["baseline_ms_per_token"]) > 0
