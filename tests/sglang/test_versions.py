"""What the plugin relies on is in the sources of every version of SGLang that it is said to run with.

Nothing of these versions is installed: their wheels are unpacked (`make .venv-sglang/versions/.unpacked`) and read.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers import schedule_batch

from serving.sglang.plugin import contract, hooks
from serving.sglang.plugin.checks import VERSIONS, sglang_version
from serving.sglang.plugin.contract import (
    CPU_FUNCTIONS,
    DRAFT_LAYER,
    GPU_FUNCTIONS,
    NORMED_RESIDUAL,
    OPTIONAL_FUNCTIONS,
    SGLANG_RECORDS,
    functions_of,
)
from speculator.draft.checkpoint import SWITCHES
from speculator.errors import ConfigError

_UNPACKED = Path(sys.prefix) / "versions"

# What is imported where it is called; in these versions one of each line is there.
_CALLED = (
    ("sglang.srt.arg_groups.overrides.resolved_view",),
    ("sglang.srt.arg_groups.overrides.declare_resolution", "sglang.srt.arg_groups.overrides.materialize_declarations"),
    ("sglang.srt.distributed.parallel_state.get_tp_group",),
    ("sglang.srt.plugins.hook_registry.HookRegistry.register",),
    ("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",),
    ("sglang.srt.layers.sampler.sampling_from_probs_torch",),
)

# What SGLang's functions that run here take from their module.
_OF_ITS_MODULE = ("DisaggregationMode", "current_platform", "logger", "logging")

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The Python files of one version."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, path: str) -> _Definition | None:
        """The definition behind a dotted path, through imports; None where there is none."""
        parts = path.split(".")
        for length in range(len(parts) - 1, 0, -1):
            file = self._root.joinpath(*parts[:length]).with_suffix(".py")
            if file.exists():
                return self._in(ast.parse(file.read_text()), parts[length:])
        return None

    def _in(self, tree: ast.Module, names: list[str]) -> _Definition | None:
        node: ast.AST = tree
        for name in names:
            found = [one for one in getattr(node, "body", []) if getattr(one, "name", None) == name]
            if not found:
                return self._imported(tree, name)
            node = found[-1]
        return node if isinstance(node, _Definition) else None

    def _imported(self, tree: ast.Module, name: str) -> _Definition | None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(f"{node.module}.{alias.name}")
        return None


@pytest.fixture(params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Sources:
    if request.param == sglang_version():
        import sglang

        return Sources(Path(sglang.__file__).parent.parent)
    assert (_UNPACKED / request.param).is_dir(), "make .venv-sglang/versions/.unpacked"
    return Sources(_UNPACKED / request.param)


def test_functions_take_what_hooks_give_them(sources: Sources, request: pytest.FixtureRequest) -> None:
    for used in {*functions_of(), *CPU_FUNCTIONS, *GPU_FUNCTIONS, *OPTIONAL_FUNCTIONS, *NORMED_RESIDUAL}:
        function = sources.find(used.path)
        if function is None and used in OPTIONAL_FUNCTIONS and request.node.callspec.params["sources"] == VERSIONS[0]:
            continue
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef), used.path
        given = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        assert tuple(given[: len(used.parameters)]) == used.parameters, used.path


def test_records_have_the_attributes_that_are_read(sources: Sources) -> None:
    for used in SGLANG_RECORDS:
        record = sources.find(used.path)
        assert isinstance(record, ast.ClassDef), used.path
        module = used.path.rpartition(".")[0]
        bases = [sources.find(f"{module}.{one.id}") for one in record.bases if isinstance(one, ast.Name)]
        classes = [one for one in (record, *bases) if isinstance(one, ast.ClassDef)]
        body = [one for owner in classes for one in owner.body]
        known = {one.name for one in body if isinstance(one, ast.FunctionDef)}.union(
            *map(contract.assigned_in, classes)
        )
        known |= {one.target.id for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
        assert set(used.fields) <= known, used.path


def test_an_attribute_of_sglangs_request_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    request = next(one for one in SGLANG_RECORDS if one.path.endswith(".Req"))
    contract.check_sglang_records([request], "9.9")
    with monkeypatch.context() as changes:
        source = inspect.getsource(schedule_batch).replace("self.rid", "self.id")
        changes.setattr(inspect, "getsource", lambda _: source)
        with pytest.raises(ConfigError, match=r"schedule_batch.Req has no rid: install sglang=="):
            contract.check_sglang_records([request], "9.9")
    monkeypatch.delattr(schedule_batch.Req, "finished")
    with pytest.raises(ConfigError, match=r"schedule_batch.Req has no finished: install sglang=="):
        contract.check_sglang_records([request], "9.9")


def test_what_is_called_is_there(sources: Sources) -> None:
    for either in _CALLED:
        assert any(sources.find(path) is not None for path in either), either


def test_storage_outside_a_server_parts_tenants_but_in_the_oldest(
    sources: Sources, request: pytest.FixtureRequest
) -> None:
    parts = sources.find("sglang.srt.mem_cache.utils.storage_namespace_seed") is not None
    assert parts == (request.node.callspec.params["sources"] != VERSIONS[0])


def test_the_draft_computes_the_norms_that_its_config_switches_on(sources: Sources) -> None:
    model = sources.find("sglang.srt.models.llama_eagle3.LlamaModel")
    assert model is not None
    read = {one.value for one in ast.walk(model) if isinstance(one, ast.Constant)}
    assert {*SWITCHES} - read == {"norm_before_residual"}, "SGLang computes it itself, or a norm no longer"


def test_the_drafts_layer_calls_the_two_norms_between_which_its_residual_is_exchanged(sources: Sources) -> None:
    forward = sources.find(DRAFT_LAYER.path)
    assert forward is not None
    calls = [
        (one.func.attr, [getattr(given, "id", None) for given in one.args])
        for one in ast.walk(forward)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
    ]
    assert ("hidden_norm", ["hidden_states"]) in calls
    assert ("post_attention_layernorm", ["hidden_states", "residual"]) in calls


def test_the_walk_hands_back_the_accepted_path_last(sources: Sources) -> None:
    """`GenerationBatchResult` has it only from 0.5.22 on."""
    sample = sources.find("sglang.srt.speculative.eagle_utils.eagle_sample")
    assert sample is not None
    returned = [one.value for one in ast.walk(sample) if isinstance(one, ast.Return)]
    assert returned
    for value in returned:
        assert isinstance(value, ast.Tuple)
        assert [getattr(one, "id", None) for one in value.elts][2] == "accept_index"


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("is_paused", [True, False])
def test_requests_that_hold_no_keys_keep_no_update_from_flushing_the_cache(
    sources: Sources, is_paused: bool, holds: bool
) -> None:
    scheduler = MagicMock(_engine_paused=is_paused, last_batch=None, chunked_req=None, enable_overlap=False)
    scheduler._pp_microbatches_drained.return_value, scheduler.dllm_manager.any_staging_reqs.return_value = True, False
    scheduler.enable_hisparse = scheduler.enable_hierarchical_cache = scheduler.enable_lmcache = False
    waiting = SimpleNamespace(req_pool_idx=3 if holds else None, kv=SimpleNamespace(holds_kv=holds))
    scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue = [waiting], ["compiling"]
    for path in (contract.IDLE.path, "sglang.srt.managers.scheduler.Scheduler.flush_cache"):
        function = sources.find(path)
        assert isinstance(function, ast.FunctionDef)
        names: dict[str, Any] = {}
        exec(ast.unparse(function), dict.fromkeys(_OF_ITS_MODULE, MagicMock()), names)  # noqa: S102
        setattr(scheduler, function.name, MethodType(names[function.name], scheduler))
    hook, updater, request = hooks._around_weights_updated, SimpleNamespace(scheduler=scheduler), SimpleNamespace()
    assert hook(lambda *_: scheduler.flush_cache(), updater, request) is (is_paused and not holds)
    assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([waiting], ["compiling"])


def test_what_is_missing_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import f\nclass C:\n    x: int\n")
    (tmp_path / "b.py").write_text("def f(one, two): pass\n")
    sources = Sources(tmp_path)
    assert isinstance(sources.find("a.f"), ast.FunctionDef)
    assert isinstance(sources.find("a.C"), ast.ClassDef)
    assert sources.find("a.g") is None
    assert sources.find("c.f") is None
