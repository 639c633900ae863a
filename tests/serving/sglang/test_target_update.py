"""Updates of the target's weights that the plugin refuses, with stand-ins for SGLang's objects."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from serving.sglang.plugin import hooks
from serving.sglang.pointer import RankTarget


def _stand_in(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A module `io_struct` with this class of answers."""
    io_struct = SimpleNamespace(**{answer: SimpleNamespace})
    for name, module in (("sglang", {}), ("sglang.srt", {}), ("sglang.srt.managers", {"io_struct": io_struct})):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(module)


@pytest.mark.parametrize("storage", ["enable_hicache_storage", "enable_lmcache"])
@pytest.mark.parametrize("source", ["WeightFromDisk", "WeightsFromDistributed", "WeightsFromTensor", "WeightsFromIPC"])
def test_the_target_stays_while_its_keys_and_values_are_stored_elsewhere(
    storage: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang stores them under no version of the weights."""
    _stand_in(monkeypatch, f"Update{source}ReqOutput")
    request = type(f"Update{source}ReqInput", (), {"selector": "all", "weight_version": None})()
    updated: list[object] = []
    updater = SimpleNamespace(scheduler=SimpleNamespace(**{storage: True}), draft_worker="draft")
    hook = hooks._around_weight_update
    answer = hook(lambda _, asked: updated.append(asked), updater, request)
    assert (answer.success, updated) == (False, [])
    assert "--hicache-storage-backend" in answer.message
    setattr(updater.scheduler, storage, False)
    hook(lambda _, asked: updated.append(asked), updater, request)
    assert updated == [request]


def test_a_label_of_its_own_names_the_version_of_the_weights_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime and miles send weights without a label, and then POST /update_weight_version."""
    target = RankTarget(lambda _: None)
    runtime = SimpleNamespace(target_updated=lambda label: target.updated(label, 7), target_labelled=target.labelled)
    monkeypatch.setattr(hooks, "_runtimes", {0: runtime})
    updater = SimpleNamespace(scheduler=SimpleNamespace(_engine_paused=False))
    for _ in range(2):
        hooks._around_weights_updated(lambda *_: None, updater, SimpleNamespace(weight_version=None))
    hooks._after_label(None, updater.scheduler, SimpleNamespace(new_version="12"))
    assert (target.version, target.status()["target_label"]) == (12, 12)


@pytest.mark.parametrize("label", ["4", "hotfix", "default", "1234567890"])
def test_labels_count_up(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another label the gateway would take the weights for old ones, and send them nothing."""
    _stand_in(monkeypatch, "UpdateWeightFromDiskReqOutput")
    asked = type("UpdateWeightFromDiskReqInput", (SimpleNamespace,), {"selector": "all"})
    updater, loaded = SimpleNamespace(scheduler=SimpleNamespace(), draft_worker="draft"), list[object]()

    def update(weight_version: str | None) -> str:
        request = asked(weight_version=weight_version)
        answer = hooks._around_weight_update(lambda _, one: loaded.append(one.weight_version), updater, request)
        return "" if answer is None else answer.message

    target = RankTarget(lambda _: None)
    monkeypatch.setattr(hooks, "_runtimes", {0: target})
    assert update(label) == "", "none has counted yet"
    target.updated("5", 10)
    assert update("6") == update("5") == update(None) == "", "parts of one update have the same"
    assert "count up" in update(label)
    assert loaded == [label, "6", "5", None]

    manager = SimpleNamespace(config_value={"weight_version": "5"}.__getitem__)
    hooks.before_label(manager, SimpleNamespace(new_version="5"))
    with pytest.raises(ValueError, match="no whole number from 5 on"):
        hooks.before_label(manager, SimpleNamespace(new_version=label))
    hooks.before_label(SimpleNamespace(config_value=lambda _: "default"), SimpleNamespace(new_version=label))


@pytest.mark.parametrize("ignores_waiting", [True, False])
def test_a_paused_server_flushes_its_cache_beside_requests_that_wait(ignores_waiting: bool) -> None:
    """SGLang refuses that while a grammar compiles, and 0.5.17 also while a request waits to be read again."""

    class Scheduler(SimpleNamespace):
        if ignores_waiting:

            def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
                return (ignore_waiting or not self.waiting_queue) and not self.grammar_manager.grammar_queue
        else:

            def is_fully_idle(self, for_health_check: bool = False) -> bool:
                return not self.waiting_queue and not self.grammar_manager.grammar_queue

    waiting, compiling = [SimpleNamespace(req_pool_idx=None)], ["first", "second"]
    grammars = SimpleNamespace(grammar_queue=[*compiling])
    scheduler = Scheduler(_engine_paused=True, waiting_queue=[*waiting], grammar_manager=grammars)
    updater, request = SimpleNamespace(scheduler=scheduler), SimpleNamespace(selector="all", weight_version="2")

    def flush(updater: SimpleNamespace, asked: object) -> None:
        assert updater.scheduler.is_fully_idle(**{"ignore_waiting": True} if ignores_waiting else {})
        raise RuntimeError("the update fails later")

    with pytest.raises(RuntimeError):
        hooks._around_weights_updated(flush, updater, request)
    assert (scheduler.waiting_queue, grammars.grammar_queue) == (waiting, compiling)
