"""A target that moves: what is served after it, what runs on through it, what its traces say, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from serving.engine import TargetReport
from serving.local.target.model import StagedTarget, Target
from speculator.errors import EngineDeadError, RequestError, TargetError
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter
from tests.fixtures.toy import WEIGHTS, make_toy_model, moved_model
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import Harness, WatchedTarget, fixed_engine, run_pass, toy_engine

PROMPTS = ("hello", "a b c", "some longer prompt than one chunk")


@pytest.fixture(scope="module")
def new_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved_model(model_dir, tmp_path_factory.mktemp("moved") / "1")


@pytest.fixture(scope="module")
def old(model_dir: Path) -> Iterator[Harness]:
    with fixed_engine(model_dir) as running:
        yield running


@pytest.fixture(scope="module")
def new(new_dir: Path) -> Iterator[Harness]:
    with fixed_engine(new_dir) as running:
        yield running


def tokens_of(harness: Harness, *prompts: str) -> list[list[int]]:
    return [answer.token_ids for answer in harness.ask(*map(harness.request, prompts))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("qwen3", True), ("llama", False)])
def test_moved_weights_compute_what_loaded_ones_do(
    tmp_path: Path, dtype: torch.dtype, family: str, fused: bool
) -> None:
    model_dir = make_toy_model(tmp_path / "0", family=family)
    new_dir = moved_model(model_dir, tmp_path / "1")

    def loaded(folder: Path) -> Target:
        return Target(folder, num_slots=1, context_length=16, cache_margin=1, dtype=dtype, fused=fused)

    def computed(target: Target) -> torch.Tensor:
        hidden, aux = run_pass(target, torch.tensor([[5, 6, 7]]), first_slot=0, starts=[0])
        return torch.cat([target.logits(hidden).flatten(), aux.flatten()])

    target, before = loaded(model_dir), computed(loaded(model_dir))
    places = [tensor.data_ptr() for tensor in target.model.state_dict().values()]
    target.install(target.stage(new_dir))
    assert torch.equal(computed(target), computed(loaded(new_dir)))
    assert not torch.equal(computed(target), before)
    assert [tensor.data_ptr() for tensor in target.model.state_dict().values()] == places
    target.install(target.stage(model_dir))
    assert torch.equal(computed(target), before)


@pytest.mark.parametrize("stored_twice", ["served", "new"])
def test_a_tied_output_layer_may_be_stored_or_not(tmp_path: Path, stored_twice: str) -> None:
    served = make_toy_model(tmp_path / "served")
    new = moved_model(served, tmp_path / "new")
    edited(lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))(
        tmp_path / stored_twice
    )
    target, fresh = (Target(folder, num_slots=1, context_length=16, cache_margin=1) for folder in (served, new))
    target.install(target.stage(new))
    hidden = torch.ones(1, 32, dtype=torch.bfloat16)
    assert torch.equal(target.logits(hidden), fresh.logits(hidden))
    assert torch.equal(target.embed, fresh.embed)


def test_after_the_change_the_text_is_that_of_a_fresh_engine(
    model_dir: Path, new_dir: Path, old: Harness, new: Harness
) -> None:
    with toy_engine(model_dir, dtype="float64") as harness:
        assert tokens_of(harness, *PROMPTS) == tokens_of(old, *PROMPTS)
        report = harness.engine.update_target(3, new_dir)
        assert (report.version, report.previous, harness.engine.target_version) == (3, 0, 3)
        assert tokens_of(harness, *PROMPTS) == tokens_of(new, *PROMPTS) != tokens_of(old, *PROMPTS)
        wait_until(lambda: len(harness.traces) == 6)
        assert [trace.header.target_version for trace in harness.traces] == [0, 0, 0, 3, 3, 3]
        assert {trace.header.target_fingerprint for trace in harness.traces} == {"toy"}


class MovesAt:
    """Moves the target between two given steps, whatever thread calls."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.harness, self.report = folder, Future[Harness](), Future[TargetReport]()
        self._has_begun = False

    def now(self) -> None:
        """Called on the engine's thread: the next step begins with the new weights."""
        if self._has_begun:
            return
        self._has_begun = True
        harness = self.harness.result()
        threading.Thread(target=lambda: self.report.set_result(harness.engine.update_target(1, self._folder))).start()
        wait_until(lambda: harness.inbox.num_tasks == 1)


def test_running_requests_go_on_and_their_traces_end_at_the_change(
    model_dir: Path, new_dir: Path, old: Harness
) -> None:
    moves, num_rounds, versions = MovesAt(new_dir), [0], []

    def count(round_: object) -> None:
        num_rounds[0] += 1
        versions.append(round_.target_version)  # type: ignore[attr-defined]
        if num_rounds[0] == 10:
            moves.now()

    with fixed_engine(model_dir, on_round=count) as harness:
        moves.harness.set_result(harness)
        answers = harness.ask(*map(harness.request, PROMPTS))
        assert moves.report.result().stall_ms > 0
        wait_until(lambda: harness.engine.health().num_running == 0)
    begun = {trace.header.request_id: trace for trace in harness.traces}
    assert sorted(begun) == sorted(PROMPTS), "one trace of each"
    assert versions[:10] == [0] * 10
    assert set(versions[10:]) == {1}
    for prompt, answer, whole in zip(PROMPTS, answers, tokens_of(old, *PROMPTS), strict=True):
        trace = begun[prompt]
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 40)
        assert trace.header.target_version == 0
        count_old = trace.num_completion_tokens
        assert 0 < count_old < 39
        # The newest token was not yet read, so the trace has no labels for it.
        told = [chunk.target_version for chunk in answer.chunks for _ in chunk.token_ids]
        assert told == [0] * (count_old + 1) + [1] * (39 - count_old)
        assert trace.token_ids[-count_old:].tolist() == answer.token_ids[:count_old] == whole[:count_old]
        wait_until(lambda: len(old.traces) % 3 == 0)
        theirs = next(one for one in old.traces if one.header.request_id == prompt)
        rows = trace.num_tokens
        np.testing.assert_array_equal(trace.target_topk_ids, theirs.target_topk_ids[:rows])
        assert torch.equal(trace.aux_hidden, theirs.aux_hidden[:rows])
        assert (trace.rounds.position < trace.header.first_position + rows).all()
    assert any(answer.token_ids != whole for answer, whole in zip(answers, tokens_of(old, *PROMPTS), strict=True))


def test_a_prompt_that_is_being_read_is_read_anew(model_dir: Path, new_dir: Path, new: Harness) -> None:
    moves, target = MovesAt(new_dir), WatchedTarget(model_dir, dtype=torch.float64)
    target.on_pass = lambda _: moves.now()
    with fixed_engine(model_dir, target=target) as harness:
        moves.harness.set_result(harness)
        assert tokens_of(harness, PROMPTS[2]) == tokens_of(new, PROMPTS[2])
        wait_until(lambda: harness.traces)
    theirs = next(trace for trace in new.traces if trace.header.request_id == PROMPTS[2])
    assert harness.traces[0].header.target_version == 1
    assert torch.equal(harness.traces[0].aux_hidden, theirs.aux_hidden)
    np.testing.assert_array_equal(harness.traces[0].target_topk_ids, theirs.target_topk_ids)


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
        change(weights)
        safetensors.torch.save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return write


def another_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))


def linked_from_elsewhere(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (edited(lambda weights: weights.pop(NORM)), "missing or extra.*model.norm"),
        (edited(lambda weights: weights.update(extra=torch.ones(2))), "missing or extra.*extra"),
        (edited(lambda weights: weights.update({NORM: torch.ones(31)})), "shape"),
        (edited(lambda weights: weights[NORM].fill_(torch.nan)), "not finite"),
        (edited(lambda weights: weights.update({NORM: weights[NORM].int()})), "not finite"),
        (another_config, "another architecture"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]), "safetensors"),
        (lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
        (linked_from_elsewhere, "outside"),
    ],
)
def test_a_refused_change_leaves_everything_as_it_was(
    old: Harness, new_dir: Path, tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    before = tokens_of(old, PROMPTS[0])
    folder = moved_model(new_dir, tmp_path / "2")
    spoil(folder)
    with pytest.raises(TargetError, match=reason):
        old.engine.update_target(1, folder)
    assert old.engine.target_version == 0
    assert tokens_of(old, PROMPTS[0]) == before


def test_this_engine_needs_a_folder(old: Harness) -> None:
    with pytest.raises(RequestError, match="path"):
        old.engine.update_target(1, None)


def test_this_engine_has_one_set_of_weights_for_a_version(old: Harness, new_dir: Path) -> None:
    with pytest.raises(TargetError, match="0 is in service already"):
        old.engine.update_target(0, new_dir)


def test_half_a_target_never_serves(model_dir: Path, new_dir: Path) -> None:
    class Half(WatchedTarget):
        def stage(self, folder: Path) -> StagedTarget:
            return super().stage(folder)[:-1]

    with toy_engine(model_dir, target=Half(model_dir)) as harness:
        with pytest.raises(EngineDeadError):
            harness.engine.update_target(1, new_dir)
        wait_until(lambda: not harness.engine.health().alive)


def test_text_of_old_targets_is_not_proposed_for_ever() -> None:
    suffixes = SuffixDrafter(SuffixConfig(max_target_age=2))
    text = list(range(10, 40))
    suffixes.start([1], tenant="a").commit(text)
    for _ in range(2):
        suffixes.target_updated()
        assert suffixes.start([2, *text[:8]], tenant="a").propose(4).tree.tokens == tuple(text[8:12])
    suffixes.target_updated()
    assert suffixes.start([2, *text[:8]], tenant="a").propose(4).tree.tokens == ()
