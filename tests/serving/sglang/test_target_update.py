"""Updates of the target's weights that the plugin refuses, with stand-ins for SGLang's objects."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from serving.sglang.plugin import hooks


@pytest.mark.parametrize("storage", ["enable_hicache_storage", "enable_lmcache"])
@pytest.mark.parametrize("source", ["WeightFromDisk", "WeightsFromDistributed", "WeightsFromTensor", "WeightsFromIPC"])
def test_the_target_stays_while_its_keys_and_values_are_stored_elsewhere(
    storage: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang stores them under no version of the weights."""
    io_struct = SimpleNamespace(**{f"Update{source}ReqOutput": SimpleNamespace})
    for name, module in (("sglang", {}), ("sglang.srt", {}), ("sglang.srt.managers", {"io_struct": io_struct})):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(module)
    request = type(f"Update{source}ReqInput", (), {"selector": "all"})()
    updated: list[object] = []
    updater = SimpleNamespace(scheduler=SimpleNamespace(**{storage: True}), draft_worker="draft")
    hook = hooks._around_weight_update
    answer = hook(lambda _, asked: updated.append(asked), updater, request)
    assert (answer.success, updated) == (False, [])
    assert "--hicache-storage-backend" in answer.message
    setattr(updater.scheduler, storage, False)
    hook(lambda _, asked: updated.append(asked), updater, request)
    assert updated == [request]
