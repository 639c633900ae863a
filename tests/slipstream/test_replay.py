"""`slipstream replay` on the small recording of the real model, and on recordings of the toy target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models import BUNDLED_MODEL, resolve_model
from slipstream.replay import ReplayOptions, read_split, replay
from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.trace import encode_trace
from speculator.versions.lifecycle import VersionState
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.traces import make_trace, with_branches
from tests.slipstream.conftest import RunCli, SampleEnd
from tests.trainer.answers import answer_traces, renamed
from tests.trainer.learning.test_batch import with_trees
from trainer.learning.labels import Labels
from trainer.learning.losses.mix import DEFAULT_LOSS, LossMix
from trainer.release.gate import recorded_rounds
from trainer.statistics import AcceptanceCounts

RECORDING = Path(__file__).parent.parent / "data" / "smollm2.rec"
SMALL_VOCAB = 2048


@pytest.fixture(scope="module")
def toy_recording(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "toy.rec"
    header = RecordingHeader(target_fingerprint=target_fingerprint(toy_model), model="toy", created_ms=1)
    with RecordingWriter(path, header) as writer:
        for index, trace in enumerate(answer_traces(toy_model, num_traces=10)):
            writer.append(encode_trace(with_trees(trace, seed=index)), trace_id=trace.header.trace_id)
    return path


def run(recording: Path, model_dir: Path, **changes: Any) -> dict[str, Any]:
    values = {"depths": [1, 2, 3], "num_steps": 6, "draft_vocab_size": 40, "num_points": 3}
    document = replay(ReplayOptions(recordings=[recording], model_dir=model_dir, **values | changes))
    del document["seconds"]
    return document


# -- the recording of the real model -----------------------------------------------------------------------------------


def test_a_replay_of_the_real_model_learns_and_is_the_same_again(run_cli: RunCli, tmp_path: Path) -> None:
    loss, out = "forward_kl=1,discard=0.5,correction=topr", tmp_path / "out.json"
    arguments = ("--steps", 10, "--depth", 3, "--draft-vocab-size", SMALL_VOCAB, "--loss", loss, "--json", out)
    result = run_cli("replay", RECORDING, *arguments)
    assert result.returncode == 0, result.stderr
    first = json.loads(out.read_text())
    assert first.pop("seconds") > 0
    torch.set_num_threads(1)
    again = run(
        RECORDING, resolve_model(BUNDLED_MODEL), num_steps=10, draft_vocab_size=SMALL_VOCAB, loss=loss, num_points=8
    )
    assert first == again, "another process, the same bits"
    curve = first["curve"]
    assert [point["step"] for point in curve] == sorted({point["step"] for point in curve})
    assert curve[0]["accept_length"] == pytest.approx(1.0, abs=0.05)
    assert curve[-1]["trained_tokens"] == first["trained_tokens"] > 1500
    assert curve[-1]["loss"] < 0.7 * curve[1]["loss"]
    assert set(curve[-1]["accept_length_by_domain"]) == {"explain", "list", "code"}
    assert first["accept_length"] == curve[-1]["accept_length"] >= 1.0


# -- the toy target ----------------------------------------------------------------------------------------------------


def test_a_replay_depends_on_its_seed_and_on_nothing_else(toy_recording: Path, toy_model: Path) -> None:
    first, again, other = (run(toy_recording, toy_model, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["curve"] != other["curve"]
    assert first["learnt_traces"] == 8
    assert first["held_out_traces"] == 2


def test_the_order_of_learning_may_have_a_seed_of_its_own(toy_recording: Path, toy_model: Path) -> None:
    """The same draft learns from the same traces, and is scored on the same ones."""
    first, other = (run(toy_recording, toy_model, seed=1, order_seed=order) for order in (1, 2))
    assert first == run(toy_recording, toy_model, seed=1)
    assert first["curve"][0] == other["curve"][0]
    assert first["curve"][-1]["loss"] != other["curve"][-1]["loss"]
    assert first["learnt_tokens"] == other["learnt_tokens"]


def test_rows_behind_rejections_are_learned_from_where_the_loss_asks(toy_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "branches.rec"
    header = RecordingHeader(target_fingerprint=target_fingerprint(toy_model), model="toy", created_ms=1)
    with RecordingWriter(path, header) as writer:
        for index, trace in enumerate(answer_traces(toy_model, num_traces=10)):
            kept = with_branches(with_trees(trace, seed=index), rounds={1, 4}, vocab_size=40)
            writer.append(encode_trace(kept), trace_id=trace.header.trace_id)
    without, branches = run(path, toy_model), run(path, toy_model, loss="branches")
    assert (without["trained_branches"], branches["skipped_steps"]) == (0, 0)
    assert branches["trained_branches"] > 20
    assert branches["trained_tokens"] == without["trained_tokens"]
    assert branches["curve"][-1] != without["curve"][-1]


def test_learning_raises_the_predicted_acceptance(toy_recording: Path, toy_model: Path) -> None:
    document = run(toy_recording, toy_model, num_steps=60)
    assert document["curve"][0]["accept_length"] < 1.2
    assert document["accept_length"] > document["curve"][0]["accept_length"] + 0.1
    lengths = list(document["curve"][-1]["accept_length_by_depth"].values())
    assert lengths == sorted(lengths)
    assert document["skipped_steps"] == 0


def test_a_run_says_what_each_held_out_trace_would_commit(toy_recording: Path, toy_model: Path) -> None:
    document = run(toy_recording, toy_model)
    scores = document["held_out"]
    assert len(scores) == document["held_out_traces"]
    committed, rounds = (sum(column) for column in zip(*scores.values(), strict=True))
    assert committed / rounds == pytest.approx(document["accept_length"], abs=1e-4)
    assert scores.keys() == run(toy_recording, toy_model, loss="forward_kl")["held_out"].keys()


@pytest.mark.parametrize(
    "loss",
    [
        "reverse_kl",
        "log_acceptance",
        "lk_hybrid,coupled_acceptance,expected_length",
        "cross_entropy,margin=0.3,verdicts=fresh",
        "policy_gradient,correction=tis",
        "forward_kl,policy_gradient=0.1,correction=weighted_topr,negative=0.5",
    ],
)
def test_every_loss_replays_the_same_data_in_the_same_steps(toy_recording: Path, toy_model: Path, loss: str) -> None:
    baseline, other = run(toy_recording, toy_model, loss="forward_kl"), run(toy_recording, toy_model, loss=loss)
    assert other["skipped_steps"] == 0
    assert other["curve"][0]["accept_length"] == baseline["curve"][0]["accept_length"]
    for name in ("learnt_traces", "learnt_tokens", "held_out_traces", "trained_tokens", "recorded_accept_length"):
        assert other[name] == baseline[name]
    tokens = [[point["trained_tokens"] for point in document["curve"]] for document in (baseline, other)]
    assert tokens[0] == tokens[1]
    assert other["curve"][-1] != baseline["curve"][-1]


_calls: list[None] = []


def never_finite(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    return logits_SD.sum(-1) * math.nan


def not_finite_at_first(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    _calls.append(None)
    return logits_SD.square().sum(-1) * (math.nan if len(_calls) == 1 else 1)


def failing(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    raise KeyError("no such column")


def test_a_loss_that_no_step_can_learn_from_ends_the_run(
    toy_recording: Path, toy_model: Path, invoke: Callable[..., SampleEnd], refused: Callable[..., str]
) -> None:
    words = ("replay", toy_recording, "--model", toy_model, "--draft-vocab-size", 40, "--steps", 3, "--depth", 2)
    own = f"{__name__}:never_finite"
    code, out, err = invoke(*words, "--loss", own)
    assert (code, out) == (2, "")
    assert f"the loss was not finite in any of 3 steps: correct {own}=1" in err
    assert "failed (KeyError: 'no such column')" in refused(*words, "--loss", f"{__name__}:failing")
    _calls.clear()
    code, out, _ = invoke(*words, "--loss", f"{__name__}:not_finite_at_first")
    assert code == 0
    assert out.rstrip().endswith("; 1 of 3 steps skipped, not finite")


def test_without_a_loss_the_trainers_own_setting_counts(
    toy_recording: Path, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(toy_recording, toy_model)["loss"] == str(LossMix.parse(DEFAULT_LOSS))
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LOSS", "acceptance=1")
    assert run(toy_recording, toy_model)["loss"].startswith("acceptance=1,")


def test_the_split_holds_out_whole_traces_of_every_domain(toy_model: Path) -> None:
    model_dir = resolve_model(BUNDLED_MODEL)
    draft = fresh_draft(model_dir, draft_vocab_size=SMALL_VOCAB, seed=0)
    splits = [read_split([RECORDING], model_dir, draft, seed=seed) for seed in (0, 0, 1)]
    ids = [{example.trace_id for example in split.held_out} for split in splits]
    assert ids[0] == ids[1] != ids[2]
    assert not ids[0] & {example.trace_id for example in splits[0].learnt}
    assert {example.domain for example in splits[0].held_out} == {"explain", "list", "code"}
    learnt = [example.domain for example in splits[0].learnt]
    assert set(learnt[learnt.index("code") :]) == {"code"}, "the order of the recording is kept"


def test_a_stored_draft_is_evaluated_as_it_is_on_all_traces(
    toy_recording: Path, toy_model: Path, tmp_path: Path
) -> None:
    fingerprint = target_fingerprint(toy_model)
    with pytest.raises(ConfigError, match="--store"):
        run(toy_recording, toy_model, store=tmp_path / "drafts", num_steps=0)
    ensure_lineage(DraftStore(tmp_path / "drafts"), toy_model, fingerprint, draft_vocab_size=40, seed=5)
    stored = run(toy_recording, toy_model, store=tmp_path / "drafts", num_steps=0)
    assert (stored["held_out_traces"], stored["learnt_traces"], stored["trained_tokens"]) == (10, 0, 0)
    assert len(stored["curve"]) == 1
    same = run(toy_recording, toy_model, seed=5, num_steps=0)
    assert same["accept_length"] == pytest.approx(stored["accept_length"], abs=0.05), "bfloat16 in the store"
    with RecordingReader(toy_recording) as reader:
        live = sum(map(recorded_rounds, reader.traces()), AcceptanceCounts())
    assert stored["recorded_accept_length"] == pytest.approx(live.length, abs=1e-4)
    DraftStore(tmp_path / "drafts").lifecycle.move(1, VersionState.ROLLED_BACK, actor="test", reason="slow")
    with pytest.raises(ConfigError, match="slipstream drafts list"):
        run(toy_recording, toy_model, store=tmp_path / "drafts", num_steps=0)


def test_traces_that_teach_nothing_are_counted(toy_model: Path, tmp_path: Path) -> None:
    path, fingerprint = tmp_path / "mixed.rec", target_fingerprint(toy_model)
    header = RecordingHeader(target_fingerprint=fingerprint, model="toy", created_ms=1)
    with RecordingWriter(path, header) as writer:
        for trace in [*answer_traces(toy_model, num_traces=4), make_trace(1, target_fingerprint=fingerprint)]:
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
    path.write_bytes(path.read_bytes() + b"half an entry")
    assert run(path, toy_model)["unusable_traces"] == 1


def test_a_text_that_comes_again_is_neither_learned_from_nor_held_out(
    toy_recording: Path, toy_model: Path, tmp_path: Path
) -> None:
    """In a recording that overlaps another, or in one that holds it under another trace id, too."""
    once = run(toy_recording, toy_model)
    path = tmp_path / "again.rec"
    with RecordingReader(toy_recording) as reader, RecordingWriter(path, reader.header) as writer:
        for trace in reader.traces():
            again = renamed(trace, f"{trace.header.trace_id}-again")
            writer.append(encode_trace(again), trace_id=again.header.trace_id)
    options = ReplayOptions(
        recordings=[toy_recording, toy_recording, path],
        model_dir=toy_model,
        depths=[1, 2, 3],
        num_steps=6,
        draft_vocab_size=40,
        num_points=3,
    )
    document = replay(options)
    assert (once["repeated_traces"], document["repeated_traces"]) == (0, 20)
    changed = {"recordings", "repeated_traces", "seconds"}
    assert {name: document[name] for name in document.keys() - changed} == {
        name: once[name] for name in once.keys() - changed
    }


def test_recordings_that_cannot_be_replayed_are_refused(
    toy_recording: Path, toy_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match="--model"):
        run(RECORDING, toy_model)
    header = RecordingHeader(target_fingerprint=target_fingerprint(toy_model), model="toy", created_ms=1)
    RecordingWriter(tmp_path / "empty.rec", header).close()
    with pytest.raises(ConfigError, match="too few"):
        run(tmp_path / "empty.rec", toy_model)
    assert "forward_kl" in refused("replay", toy_recording, "--model", toy_model, "--loss", "kl")
    assert "does not exist" in refused("replay", toy_recording, "--json", tmp_path / "no" / "x.json")
    assert "is read, too" in refused("replay", toy_recording, "--json", toy_recording)
    assert "cannot read" in refused("replay", tmp_path / "missing.rec", "--model", toy_model)
