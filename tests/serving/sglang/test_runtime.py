"""What fails in the plugin's hooks turns a part of it off; SGLang's step, and its own errors, go through unchanged."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import redis
import torch
from torch import Tensor, nn

from serving.group_cache.texts import HEAD_BYTES, GroupKey, decode_pieces
from serving.sglang.capture.device_reads import LEAST_PROBABILITY
from serving.sglang.plugin.part_guard import PartGuard
from serving.sglang.plugin.runtime import EngineRuntime
from serving.sglang.report import EngineReport
from serving.sglang.settings import PluginSettings
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import EngineDeadError
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_deletion import ErasureOrders
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import VOCAB, WIDTH, Request

SERVED = object()
"""What SGLang's own function returns."""


REJECTING, REMEMBERING, LABELLED = -1, -2, -3


class Mode:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def is_extend(self) -> bool:
        return self._kind == "extend"

    def is_idle(self) -> bool:
        return self._kind == "idle"


class Draft(nn.Module):
    """As SGLang loads the stored version."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            if tensor.is_floating_point():
                self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor.clone(), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name.replace(".", "_")].copy_(tensor)


class Scene:
    """A runtime of one worker, and what the hooks call it with."""

    def __init__(self, runtime: EngineRuntime, worker: Any, pointer: DraftPointer) -> None:
        self.runtime, self.worker, self.pointer = runtime, worker, pointer

    def prefill(self, requests: list[Any], output: Any = None, **changes: Any) -> Any:
        """A step that reads whole prompts, and samples."""
        lengths = [len(request.origin_input_ids) for request in requests]
        starts = {"prefix_lens": [0] * len(requests), "extend_lens": lengths}
        batch = self.batch("extend", requests, **starts | changes)
        output = output or SimpleNamespace(
            hidden_states=torch.randn(sum(lengths), WIDTH), next_token_logits=torch.randn(len(requests), VOCAB)
        )

        def run() -> object:
            self.runtime.sampling(self.worker.target_worker.model_runner, output)
            # As SGLang's sampler does, in place.
            output.next_token_logits[:] = torch.softmax(output.next_token_logits, -1)
            return SERVED

        return self.runtime.step(run, batch)

    def decode(self, requests: list[Any], run: Callable[[], Any] = lambda: SERVED, accepted: int = 0) -> Any:
        """A step without proposals."""
        batch = self.batch("decode", requests)
        result = self.runtime.step(run, batch)
        self.runtime.verified(lambda: None, [accepted] * len(requests))
        return result

    def verify(self, requests: list[Any], run: Callable[[], Any] = lambda: SERVED) -> Any:
        return self.runtime.verify(run, self.batch("decode", requests))

    def report(self) -> dict[str, str]:
        return self.pointer.engines().get("under-test", {})

    def wait_for_failure(self, failure: str) -> dict[str, str]:
        wait_until(lambda: self.report().get("failures") == failure)
        return self.report()

    @staticmethod
    def batch(kind: str, requests: list[Any], **changes: Any) -> Any:
        values = {
            "reqs": requests,
            "forward_mode": Mode(kind),
            "is_extend_in_batch": kind == "extend",
            "req_pool_indices": torch.arange(len(requests)),
            "extend_num_tokens": 3,
            "sampling_info": SimpleNamespace(acc_additive_penalties=None),
            "seq_lens": torch.full((len(requests),), 3),
            "spec_info": SimpleNamespace(draft_token=torch.arange(len(requests)), draft_token_num=1, topk=1),
        }
        return SimpleNamespace(**values | changes)


@pytest.fixture
def unstarted(
    model_dir: Path,
    tmp_path: Path,
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Scene]:
    """One rank, on a CPU, with depths 0 and 2; a chain, or a tree of as many branches as the parameter. It captures,
    but for the parameter 0. With `REJECTING` it verifies a chain by rejection sampling, with `REMEMBERING` it proposes
    earlier text, too, up to depth 8, and shares that of groups. With `LABELLED` it starts with weights of version 7.
    """
    asked = getattr(request, "param", 1)
    store = DraftStore(tmp_path / "drafts")
    fingerprint = target_fingerprint(model_dir)
    ensure_lineage(store, model_dir, fingerprint, draft_vocab_size=24)
    state = ModuleType("sglang.srt.distributed.parallel_state")
    vars(state)["get_tp_group"] = lambda: SimpleNamespace(rank_in_group=0, cpu_group=None)
    decided = ModuleType("sglang.srt.arg_groups.overrides")
    # As SGLang does for --rl-on-policy-target.
    vars(decided)["resolved_view"] = lambda args: SimpleNamespace(
        **vars(args) | {"enable_deterministic_inference": True}
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (state, decided):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = SimpleNamespace(model=nn.Linear(2, 2), model_config=SimpleNamespace(context_len=64))
    arguments = {"model_path": str(model_dir), "served_model_name": "m", "port": 1}
    given = {
        "speculative_eagle_topk": None,
        "speculative_use_rejection_sampling": asked == REJECTING,
        "enable_deterministic_inference": False,
        "random_seed": 1,
        "weight_version": "7" if asked == LABELLED else "default",
        "disable_overlap_schedule": True,
    }
    worker = SimpleNamespace(
        server_args=SimpleNamespace(
            **arguments, **given, speculative_draft_model_path=str(store.root / "versions" / "000001")
        ),
        topk=max(asked, 1),
        target_worker=SimpleNamespace(model_runner=runner, model_config=SimpleNamespace(vocab_size=VOCAB)),
        draft_worker=SimpleNamespace(draft_runner=SimpleNamespace(model=Draft(store.load(1)))),
        adaptive_controller=SimpleNamespace(candidate_steps=[0, 2, 8] if asked == REMEMBERING else [0, 2]),
        # At its start that of the command line.
        speculative_num_steps=2,
        speculative_num_draft_tokens=3,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8)),
    )
    settings = PluginSettings(
        redis_url=redis_url,
        store=store.root,
        engine_id="under-test",
        capture=asked != 0,
        capture_topk=4,
        suffix_depth=8 if asked == REMEMBERING else 0,
        share_groups=asked == REMEMBERING,
        poll_s=0.02,
    )
    switch_s = sys.getswitchinterval()
    pointer = DraftPointer(redis_client, model_key(model_dir, fingerprint))
    runtime = EngineRuntime(worker, settings)
    worker.speculative_num_steps = 0
    yield Scene(runtime, worker, pointer)
    sys.setswitchinterval(switch_s)


@pytest.fixture
def scene(unstarted: Scene) -> Iterator[Scene]:
    unstarted.runtime.start()
    yield unstarted
    unstarted.runtime.close()


def test_no_other_thread_uses_the_device_while_graphs_are_captured(unstarted: Scene) -> None:
    def is_following() -> bool:
        return "draft-follower" in {thread.name for thread in threading.enumerate()}

    assert not is_following()
    unstarted.runtime.start()
    assert is_following()
    unstarted.runtime.close()


@pytest.mark.parametrize("unstarted", [0], indirect=True)
def test_without_capture_nothing_of_ours_is_in_the_drafts_graphs(scene: Scene) -> None:
    asked: list[str] = []
    scene.runtime.on_forward(lambda: asked.append("logits"))
    assert scene.runtime.drafting(lambda: SERVED, None) is SERVED
    assert scene.prefill([Request([1, 2, 3])]) is SERVED
    assert (scene.runtime.probe, asked) == (None, [])


class Exhausted:
    """What a pass leaves, on a device without any memory left."""

    next_token_logits = torch.zeros(1, VOCAB)

    @property
    def hidden_states(self) -> Tensor:
        raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("output", "changes", "failure"),
    [
        (Exhausted(), {}, "capture:OutOfMemoryError=1"),
        (None, {"prefix_lens": None}, "capture:TypeError=1"),
        (SimpleNamespace(next_token_logits=torch.zeros(1, VOCAB)), {}, "capture:AttributeError=1"),
        (
            None,
            {"reqs": [SimpleNamespace(rid="of another shape", sampling_params=Request([1]).sampling_params)]},
            "capture:AttributeError=1",
        ),
    ],
)
def test_a_failure_turns_capture_off_and_serving_goes_on(
    scene: Scene, output: Any, changes: dict[str, Any], failure: str
) -> None:
    running = Request([1, 2, 3], "running")
    assert scene.prefill([running]) is SERVED
    assert scene.prefill([Request([4, 5, 6], "failing")], output, **changes) is SERVED
    # What was held of the request that runs is freed, and it is accounted for.
    report = scene.wait_for_failure(failure)
    wait_until(lambda: "failed=" in scene.report()["dropped_by_reason"])
    assert scene.verify([running]) is SERVED
    assert scene.prefill([Request([7, 8, 9], "later")]) is SERVED
    scene.runtime.released(running)
    assert (report["captured"], scene.report()["failures"]) == ("0", failure)


def test_a_prefill_is_read_from_the_targets_pass_alone_and_within_its_step(scene: Scene) -> None:
    """The draft's passes are sampled, too, and the pass of a chunk that does not end its prompt is not."""
    target, draft = scene.worker.target_worker.model_runner, SimpleNamespace()
    output = SimpleNamespace(hidden_states=torch.randn(3, WIDTH), next_token_logits=torch.randn(1, VOCAB))
    starts = {"prefix_lens": [0], "extend_lens": [3]}

    def is_captured(within: Any, behind: Any) -> bool:
        request = Request([1, 2, 3])
        run = (lambda: None) if within is None else (lambda: scene.runtime.sampling(within, output))
        scene.runtime.step(run, scene.batch("extend", [request], **starts))
        if behind is not None:
            scene.runtime.sampling(behind, output)
        captured = "_slipstream_ticket" in vars(request)
        scene.runtime.released(request)
        assert "_slipstream_ticket" not in vars(request), "its trace is assembled, or dropped"
        return captured

    assert is_captured(target, None)
    assert not is_captured(draft, None)
    assert not is_captured(None, target)
    wait_until(lambda: "failures" in scene.report())
    assert scene.report()["failures"] == ""


def test_a_verification_that_cannot_be_read_is_served(scene: Scene) -> None:
    request = Request([1, 2, 3])
    scene.prefill([request])
    assert scene.verify([request]) is SERVED
    scene.wait_for_failure("capture:AttributeError=1")


def test_the_draft_that_cannot_be_looked_at_goes_on(scene: Scene) -> None:
    scene.runtime.on_forward(lambda: SimpleNamespace().logits_output)
    assert scene.prefill([Request([1, 2, 3])]) is SERVED
    scene.wait_for_failure("capture:AttributeError=1")


@pytest.mark.parametrize("unstarted", [1, REJECTING], indirect=True)
def test_what_the_draft_has_not_read_was_drawn_from_nothing(scene: Scene) -> None:
    """SGLang puts a token in the place of the next proposal. Rejection sampling asks what it was drawn from, and a
    trace its probability.
    """
    probe, slots = scene.runtime.probe, torch.arange(2)
    assert probe is not None
    probe.on_forward(SimpleNamespace(next_token_logits=torch.zeros(2, VOCAB)))
    probe.on_extend(slots)

    def stub(batch: Any, result: Any) -> None:
        result.next_draft_input.topk_p = torch.zeros(len(batch.reqs), 1)

    scene.worker._stub_skipped_draft_extend = stub
    scene.worker.target_worker.model_config = SimpleNamespace(vocab_size=VOCAB)
    result = SimpleNamespace(next_draft_input=SimpleNamespace(draft_probs=None))
    batch = scene.batch("decode", [Request([1, 2, 3]), Request([4, 5, 6])])
    assert scene.runtime.catch_up(lambda: pytest.fail("a fresh draft reads nothing"), batch, result) is None
    assert probe.logprobs(slots, 1).flatten().tolist() == pytest.approx([math.log(LEAST_PROBABILITY)] * 2)
    drawn_from = result.next_draft_input.draft_probs
    is_rejecting = scene.worker.server_args.speculative_use_rejection_sampling
    assert (drawn_from is not None) == is_rejecting
    if is_rejecting:
        assert torch.equal(drawn_from, torch.zeros(2, VOCAB))


def test_penalties_are_ours_and_the_accepted_path_is_kept(scene: Scene) -> None:
    request = Request([4, 5, 6], "b", frequency_penalty=1.5)
    scene.runtime.step(lambda: None, scene.batch("extend", [request]))
    info = SimpleNamespace(acc_additive_penalties=torch.ones(1, VOCAB), acc_scaling_penalties=None)
    batch = scene.batch("decode", [request], sampling_info=info)
    tree = SimpleNamespace(
        draft_token=torch.tensor([7]), draft_token_num=1, topk=1, spec_steps=0, positions=torch.tensor([3])
    )
    tree.retrieve_next_token = tree.retrieve_next_sibling = torch.tensor([[-1]])
    output = SimpleNamespace(next_token_logits=torch.zeros(1, VOCAB))
    result = (None, torch.tensor([1]), torch.tensor([[0]]))
    assert scene.runtime.walk(lambda *_: result, tree, batch, output) is result
    assert output.next_token_logits.nonzero().tolist() == [[0, 7]], "its first token, which no step has counted"
    assert info.acc_additive_penalties is None


def test_without_our_choice_of_the_depth_it_is_sglangs_own(scene: Scene) -> None:
    assert scene.runtime.steps_for(lambda: 2, 1) == 0, "a fresh draft sleeps"
    unlike_a_request = SimpleNamespace(rid="r")
    assert scene.decode([unlike_a_request]) is SERVED
    assert scene.runtime.steps_for(lambda: 2, 1) == 2
    told: list[bool] = []
    scene.runtime.verified(lambda: told.append(True), [1])
    assert told == [True]
    assert scene.runtime.catch_up(lambda: SERVED, scene.batch("decode", []), None) is SERVED
    assert scene.prefill([Request([1, 2, 3])]) is SERVED
    scene.wait_for_failure("depth:AttributeError=1")


def test_a_request_that_is_retracted_will_be_read_again(scene: Scene) -> None:
    request, sleep = Request([1, 2, 3]), scene.runtime.depth._draft_sleep
    scene.runtime.depth.draft_changed(2)
    scene.runtime.arrived(request)
    sleep.mark([request])
    scene.runtime.released(request)
    assert not sleep.is_cold(request)


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_text_of_a_group_goes_to_other_engines_and_the_report_counts_it(
    scene: Scene, model_dir: Path, redis_client: redis.Redis
) -> None:
    key = model_key(model_dir, target_fingerprint(model_dir))
    group = RedisKeys(model_key=key).group_text(GroupKey("t", "g").member)
    marks = {"slipstream": {"tenant": "t", "group_id": "g"}}
    wait_until(lambda: "process" in scene.report())
    scene.runtime.target_updated("7")
    wait_until(lambda: scene.report().get("target_version") == "7")
    scene.decode([Request([1, 2], max_new_tokens=60, custom_params=marks)])
    wait_until(lambda: "published=2," in scene.report()["group_text"])
    assert EngineReport.parse(scene.report()).group_texts_unreadable == 0
    data: Any = redis_client.get(group)
    ((piece, _),) = decode_pieces(data[HEAD_BYTES:], vocab_size=VOCAB)
    assert (piece.tokens, piece.target_version) == ([1, 2], 7)


def test_without_shared_groups_the_report_says_nothing_of_them(scene: Scene) -> None:
    wait_until(lambda: "steps" in scene.report())
    assert "group_text" not in scene.report()


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_where_sglang_chooses_it_goes_no_deeper_than_the_draft_was_prepared_for(scene: Scene) -> None:
    copied = list(range(10, 40))
    request, other = Request([*copied, 5], max_new_tokens=60), Request([1, 2], max_new_tokens=60)
    request.output_ids, other.output_ids = copied[:20], [1]
    asked: list[str] = []

    def draft() -> str:
        forward_batch = SimpleNamespace(
            spec_info=SimpleNamespace(topk_index=torch.zeros(1, 1, dtype=torch.int64), draft_probs=None),
            forward_mode=scene.batch("decode", []).forward_mode,
        )
        vars(scene.worker.draft_worker).update(hot_token_id=None, speculative_num_steps=2)
        scene.runtime.drafting(lambda: asked.append("passes"), forward_batch)
        return "drafted"

    for _ in range(40):
        scene.decode([other], lambda: scene.runtime.steps_for(lambda: 0, 1))
    assert scene.decode([request], lambda: scene.runtime.steps_for(lambda: 0, 1)) == 8, "its own text, the head asleep"
    draft()
    assert asked == []
    assert scene.decode([SimpleNamespace(rid="r")]) is SERVED
    assert scene.runtime.steps_for(lambda: 8, 1) == 2
    draft()
    assert asked == ["passes"]
    scene.wait_for_failure("depth:AttributeError=1,text:AttributeError=1")


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_text_that_cannot_be_looked_for_is_not_proposed(scene: Scene) -> None:
    request = Request([1, 2, 3], max_new_tokens=None)
    assert scene.decode([request]) is SERVED
    assert scene.runtime.steps_for(lambda: 2, 1) == 0
    assert scene.decode([request]) is SERVED
    scene.wait_for_failure("text:TypeError=1")
    assert scene.runtime.text is not None
    assert scene.runtime.text._is_stopped


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_for_a_depth_of_text_alone_no_passes_of_the_draft_are_prepared(scene: Scene) -> None:
    draft, prepared = scene.worker.draft_worker, []
    for depth in (0, 2, 8):
        draft.speculative_num_steps = depth
        scene.runtime.preparing(lambda: prepared.append(draft.speculative_num_steps))
        assert draft.speculative_num_steps == depth
    assert prepared == [0, 2, 1]


def test_an_engine_without_steps_reports_that_nothing_runs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.sglang.plugin.runtime._STEP_LASTS_S", 3600.0)
    scene.prefill([Request([1, 2, 3], "a"), Request([4], "b")])
    wait_until(lambda: scene.report().get("running") == "2")
    monkeypatch.setattr("serving.sglang.plugin.runtime._STEP_LASTS_S", 0.0)
    wait_until(lambda: scene.report().get("running") == "0")


def test_the_penalties_of_an_answer_end_with_it(scene: Scene) -> None:
    request = Request([4, 5, 6], frequency_penalty=1.5)
    scene.prefill([request])
    assert scene.runtime._penalties._answers
    scene.runtime.released(request)
    assert not scene.runtime._penalties._answers


def test_the_depth_is_told_of_an_answer_that_has_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft reads one again that was only retracted, and then need no longer leave it alone."""
    request, told = Request([4, 5, 6]), list[object]()
    scene.prefill([request])
    monkeypatch.setattr(scene.runtime.depth, "released", told.append)
    scene.runtime.released(request)
    assert told == [request]


def test_the_depth_is_told_once_of_another_draft(scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = DraftStore(tmp_path / "drafts"), list[int]()
    config = json.loads((store.root / "versions" / "000001" / "config.json").read_text())
    store.write(store.load(1), config, parent=1, target_fingerprint=store.manifest(1).target_fingerprint, info={})
    monkeypatch.setattr(scene.runtime.depth, "draft_changed", told.append)
    scene.prefill([Request([1], "a")])
    assert scene.runtime.draft.install_draft(2).version == 2
    for name in "bcd":
        scene.prefill([Request([1], name)])
    assert told == [2]


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_every_part_is_told_of_another_target(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of the last one would be proposed, and traces of two be taken for one's."""
    text, told = scene.runtime.text, list[int]()
    assert text is not None
    monkeypatch.setattr(text, "target_updated", told.append)
    scene.runtime.target_updated("7")
    assert scene.runtime._traces is not None
    assert (told, scene.runtime.depth.target_version) == ([7], 7)
    assert scene.runtime._traces.capture.assembler.target_version == 7


@pytest.mark.parametrize("unstarted", [LABELLED], indirect=True)
def test_a_server_may_start_with_later_weights(scene: Scene) -> None:
    """SGLang calls them 7 from its start on, so an update to 7 sends it nothing and waits for its report."""
    wait_until(lambda: "process" in scene.report())
    report = EngineReport.parse(scene.report())
    assert (report.target_version, report.target_label, scene.runtime.label) == (7, 7, 7)
    assert scene.runtime._traces is not None
    assert scene.runtime._traces.capture.assembler.target_version == 7


@pytest.mark.parametrize("unstarted", [REMEMBERING], indirect=True)
def test_an_order_to_erase_a_tenant_reaches_its_text(
    scene: Scene, model_dir: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, told = scene.runtime.text, list[set[str]]()
    assert text is not None
    monkeypatch.setattr(text._drafter, "forget", lambda tenants: told.append({*tenants}))
    at_ms = ErasureOrders(redis_client, model_key(model_dir, target_fingerprint(model_dir))).order("t")
    wait_until(lambda: scene.report().get("erased_ms") == str(at_ms))
    assert told == [{"t"}]


def test_what_sglang_has_decided_on_is_reported(scene: Scene) -> None:
    """Of its arguments that nobody gave."""
    wait_until(lambda: scene.report().get("heeds_seed") == "1")


@pytest.mark.parametrize("unstarted", [4], indirect=True)
def test_a_tree_that_nobody_asked_for_is_looked_at_as_one(scene: Scene) -> None:
    scores = torch.tensor([[[0.5], [0.25]]])
    scene.runtime.on_tree([scores], (None, torch.tensor([[1, 0]])))
    assert scene.runtime.probe is not None
    assert torch.equal(scene.runtime.probe.logprobs(torch.tensor([0]), 2), torch.tensor([[0.25, 0.5]]).log())


def test_without_meetings_the_draft_stays(scene: Scene, tmp_path: Path) -> None:
    """Nobody would tell the depth that another draft is in service, also where an idle server swaps it."""
    store = DraftStore(tmp_path / "drafts")
    config = json.loads((store.root / "versions" / "000001" / "config.json").read_text())
    store.write(store.load(1), config, parent=1, target_fingerprint=store.manifest(1).target_fingerprint, info={})
    assert scene.runtime.draft.install_draft(2).version == 2
    runtime: Any = scene.runtime
    # It cannot be told of the version, so the next meeting fails.
    runtime.depth = SimpleNamespace(interrupted=lambda _: None)
    assert scene.prefill([Request([1, 2, 3])]) is SERVED
    with pytest.raises(EngineDeadError):
        scene.runtime.draft.install_draft(1)


def test_what_sglang_raises_is_not_ours(scene: Scene) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("SGLang's own")

    request, batch = Request([1, 2, 3]), scene.batch("decode", [])
    scene.prefill([request])
    scene.worker.speculative_num_steps = 2
    calls: tuple[Callable[[], Any], ...] = (
        lambda: scene.decode([request], fail),
        lambda: scene.verify([Request([9])], fail),
        lambda: scene.runtime.catch_up(fail, batch, None),
        lambda: scene.runtime.read_prompt(fail, scene.batch("idle", []), torch.zeros(0)),
        lambda: scene.runtime.drafting(fail, None),
    )
    for call in calls:
        with pytest.raises(torch.OutOfMemoryError, match="SGLang's own"):
            call()
    wait_until(lambda: "failures" in scene.report())
    assert scene.report()["failures"] == ""
    # The step that failed is over: the next one begins.
    assert scene.prefill([Request([4, 5])]) is SERVED


def test_a_rank_that_others_depend_on_does_not_go_on_alone() -> None:
    def fail() -> None:
        raise AttributeError("gone")

    fence = PartGuard("depth", holds=False)
    with pytest.raises(AttributeError, match="gone"):
        fence(fail)


def test_a_part_that_does_not_end_in_order_ends() -> None:
    def fail() -> None:
        raise OSError("and again")

    fence = PartGuard("capture", off=fail)
    assert fence(fail) is None
    assert (fence.is_off, fence.reason) == (True, "OSError")
    assert fence(lambda: 1) is None
