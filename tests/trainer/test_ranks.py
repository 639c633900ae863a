"""Two real processes that learn as one, over gloo; and `torchrun` on the command line, with a real Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from speculator.versions.store import DraftStore
from tests.fixtures.waiting import PATIENCE_S, wait_until
from tests.trainer.answers import answer_traces
from tests.trainer.examples import batch_of, config_for, record
from tests.trainer.learning.test_batch import with_trees
from tests.trainer.ranks import KEYS, NUM_STEPS, new_learner, read_traces, stream_config
from trainer.checkpoint import Progress, joined, load_checkpoint, share_of
from trainer.config import ENV_PREFIX, TrainerConfig, shared_checksum
from trainer.loop import Trainer
from trainer.ranks import Ranks, join_ranks

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "SLIPSTREAM_TRAINER_DEVICE": "cpu"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the two processes of tests/trainer/ranks.py saw, by rank, and the folder that they wrote to."""

    seen: list[dict[str, Any]]
    folder: Path

    def weights(self, name: str) -> list[dict[str, Tensor]]:
        return [safetensors.torch.load_file(self.folder / f"{name}-{rank}.safetensors") for rank in range(2)]


@pytest.fixture(scope="module")
def run(model_dir: Path, traces: list[Trace], redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("two-ranks")
    for index, trace in enumerate(traces[:4]):
        (folder / f"{index}.trace").write_bytes(encode_trace(with_trees(trace, seed=index)))
    port, last_port = str(free_port()), str(free_port())
    with connect(redis_url) as client:
        client.flushall()
        streams = [TraceStream(client, key, max_bytes=10**8) for key in KEYS]
        for stream in streams:
            for trace in traces[:4]:
                stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
        _learn_alone(stream_config(model_dir, folder, redis_url, KEYS[2]))
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.trainer.ranks", model_dir, folder, redis_url, last_port],
                env={**os.environ, **ENVIRONMENT, **_as_rank(rank, port)},
                cwd=REPOSITORY,
            )
            for rank in range(2)
        ]
        try:
            assert [process.wait(PATIENCE_S) for process in processes] == [0, -signal.SIGKILL]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert [(stream.lag().acked, stream.lag().pending) for stream in streams] == [(4, 0)] * len(streams)
    return Run(seen=[json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder=folder)


def _learn_alone(config: TrainerConfig) -> None:
    trainer = Trainer(config, CollectorRegistry())
    for _ in range(2):
        trainer.read(block_ms=0)
        trainer.step()
    trainer.checkpoint()
    trainer.ack()
    trainer.close()


def _as_rank(rank: int, port: str) -> dict[str, str]:
    """The part of torchrun's environment that counts."""
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_every_rank_hears_the_same(run: Run) -> None:
    first, second = (seen["words"] for seen in run.seen)
    assert first["sum"] == second["sum"] == [3.0, 1.0]
    assert first["any"] == second["any"] == [True, False]
    assert first["max"] == second["max"] == 7
    assert first["agree"] == second["agree"] == [True, False]
    assert (first["gather"], second["gather"]) == (["", "x" * 1000], [])
    assert first["lead"] == second["lead"] == 40
    assert (first["refused"], second["refused"]) == ("ConfigError", "StoreError")


def test_a_closed_group_leaves_no_thread_behind(run: Run) -> None:
    """A thread of gloo that outlives the group aborts the process while Python ends, one time in several."""
    for seen in run.seen:
        assert not [name for name in seen["threads"] if "gloo" in name]


def test_two_ranks_take_the_step_of_one_process_with_both_batches(run: Run, model_dir: Path, tmp_path: Path) -> None:
    """Uneven shares and all three kinds of terms: every mean is over what both ranks have."""
    learner = new_learner(model_dir, tmp_path)
    batch = batch_of(read_traces(run.folder), learner.draft)
    reports = [learner.step(batch) for _ in range(NUM_STEPS)]
    assert reports[0].num_verdicts > reports[0].num_rewarded > 0, "the case must have both kinds of verdicts"
    for seen in run.seen:
        for report, together in zip(reports, seen["steps"], strict=True):
            assert together["applied"]
            assert together["loss"] == pytest.approx(report.loss, rel=1e-5)
            for name in ("num_bases", "num_labels", "num_accepted", "num_verdicts", "num_rewarded"):
                assert together[name] == getattr(report, name)
    first, second = run.weights("together")
    for name, tensor in learner.state().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_rank_without_a_batch_or_a_label_takes_the_others_step(run: Run) -> None:
    first = run.seen[0]["uneven"]
    for seen in (seen["uneven"] for seen in run.seen):
        for name in ("no_batch", "no_label"):
            assert seen[name]["applied"]
            # What is of this rank's traces alone is not the others'.
            assert seen[name] | {"first_steps": []} == first[name] | {"first_steps": []}
        assert not seen["nothing"]["applied"]
        assert not seen["nothing"]["is_culprit"]
    no_batch, no_label = (run.seen[0]["uneven"][name] for name in ("no_batch", "no_label"))
    assert no_batch["num_bases"] + no_label["num_bases"] > no_label["num_bases"] > no_label["num_labels"] > 0
    first, second = run.weights("uneven")
    assert first["num_steps"] == NUM_STEPS + 2
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(run: Run) -> None:
    uneven = [seen["uneven"] for seen in run.seen]
    assert [seen["bad"]["applied"] for seen in uneven] == [False, False]
    assert [seen["untouched"] for seen in uneven] == [True, True]
    assert [seen["bad"]["is_culprit"] for seen in uneven] == [False, True], "each knows whose batch it was"


def test_a_bad_trace_of_one_rank_costs_no_other_and_all_go_on(run: Run) -> None:
    first, second = (seen[KEYS[0]] for seen in run.seen)
    assert (first["waiting"], second["waiting"]) == (2, 2)
    assert (len(first["kept"]), len(second["kept"])) == (2, 1)
    assert first["steps"] == second["steps"]
    assert first["steps"][1] > first["steps"][0]
    assert first["due"] == second["due"]
    assert first["weights"] == second["weights"]
    assert first["version"] == second["version"] == 2
    assert first["fallen_back"] == second["fallen_back"]
    assert (first["fallen_back"]["version"], first["fallen_back"]["steps"]) == (1, 0)
    assert first["fallen_back"]["weights"] != first["weights"]
    saved = load_checkpoint(run.folder / KEYS[0] / "state")
    assert saved is not None
    progress = saved[1]
    assert (progress.num_traces, len(progress.used_trace_ids)) == (4, 4)
    assert progress.replay is not None
    assert set(progress.replay) == {*first["kept"], *second["kept"]}
    manifest = DraftStore(run.folder / KEYS[0] / "store").manifest(2)
    assert manifest.info["num_traces"] == 4


def test_ranks_with_different_settings_do_not_start(run: Run) -> None:
    assert all("settings differ" in seen["differ"] for seen in run.seen)


def test_settings_of_one_machine_may_differ_between_ranks(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path)
    checksums = [
        shared_checksum(config.model_copy(update=changes))
        for changes in ({}, {"nice": 5, "metrics_port": 1}, {"learning_rate": 0.5})
    ]
    assert checksums[0] == checksums[1] != checksums[2]


def test_a_rank_that_hears_nothing_learns_with_the_others(run: Run) -> None:
    first, second = (seen[KEYS[1]] for seen in run.seen)
    assert first["steps"] == second["steps"] > 0
    assert first["weights"] == second["weights"]
    assert (len(first["kept"]), second["kept"]) == (4, [])


def test_two_ranks_go_on_where_one_process_ended(run: Run) -> None:
    first, second = (seen[KEYS[2]] for seen in run.seen)
    assert first["resumed"] == second["resumed"] == 2
    assert first["weights"] == second["weights"]
    saved = load_checkpoint(run.folder / KEYS[2] / "state")
    assert saved is not None
    state, progress = saved
    assert int(state["num_steps"]) == 3
    assert (progress.num_traces, len(progress.used_trace_ids)) == (4, 4)
    assert sorted([*first["kept"], *second["kept"]]) == sorted(progress.used_trace_ids), "each on one rank"


def test_a_rank_whose_peer_was_killed_ends_at_once(run: Run) -> None:
    left_alone = run.seen[0]["left_alone"]
    assert left_alone["error"] == "PeerLostError"
    assert left_alone["seconds"] < 10


def test_both_ranks_decode_what_a_version_in_service_is_reviewed_by(run: Run) -> None:
    first, second = (seen["reviewed"] for seen in run.seen)
    assert first["versions"] == second["versions"], "begun and ended in the same turn"
    num_turns = first["versions"].count(2)
    assert first["versions"] == num_turns * [2] + (30 - num_turns) * [0]
    assert 4 <= num_turns < 25
    assert 0 < second["decoded"] < first["decoded"] <= 2 * num_turns
    assert first["decoded"] + second["decoded"] >= 12, "both drafts on six traces at least"
    assert first["state"] == second["state"] == "VersionState.QUARANTINED"
    assert (first["desired"], second["desired"]) == (1, 1)


def test_all_ranks_rest_as_rank_0_asks_for(run: Run) -> None:
    assert 0.3 <= run.seen[0]["rested"] < 10
    assert run.seen[1]["rested"] < 10, "told to stop, it waits for nothing but the others"


def test_what_the_ranks_know_is_joined_and_shared_out_to_any_number_of_them() -> None:
    parts = [
        Progress(
            target_fingerprint="f", learnt_tokens=90, new_tokens=10 + rank, num_traces=2, num_repeated=rank,
            used_trace_ids=["before", *(f"{rank}-{n}" for n in range(2 + rank))],
            replay={f"{rank}-0": 1.5}, held_out=[f"{rank}-h"], golden=[f"{rank}-g"],
            domains={"a": f"t{rank}", f"only-{rank}": "t"},
        )
        for rank in range(2)
    ]  # fmt: skip
    whole = joined(parts)
    assert (whole.new_tokens, whole.num_traces, whole.num_repeated, whole.learnt_tokens) == (21, 4, 1, 90)
    assert sorted(whole.used_trace_ids) == ["0-0", "0-1", "1-0", "1-1", "1-2", "before"]
    assert set(whole.used_trace_ids[:2]) == {"before", "1-0"}, "the oldest are forgotten first"
    assert set(whole.used_trace_ids[-2:]) == {"0-1", "1-2"}
    assert whole.replay == {"0-0": 1.5, "1-0": 1.5}
    assert (whole.held_out, whole.golden) == (["0-h", "1-h"], ["0-g", "1-g"])
    assert whole.domains == {"a": "t0", "only-0": "t", "only-1": "t"}
    shares = [share_of(whole, rank) for rank in range(3)]
    assert joined(shares) == whole
    for size in (1, 2, 3):
        for trace_id in whole.used_trace_ids:
            assert sum(Ranks(rank, size).owns(trace_id) for rank in range(size)) == 1


def test_a_checkpoint_of_all_ranks_lists_no_more_trace_ids_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.MOST_KNOWN_TRACES", 4)
    parts = [
        Progress(
            target_fingerprint="f", learnt_tokens=0, new_tokens=0, num_traces=0,
            used_trace_ids=[f"{rank}-{n}" for n in range(3)],
        )
        for rank in range(2)
    ]  # fmt: skip
    assert sorted(joined(parts).used_trace_ids) == ["0-1", "0-2", "1-1", "1-2"], "the newest"


def test_alone_nothing_is_exchanged() -> None:
    ranks, gradient = Ranks(), torch.ones(3)
    assert ranks.sum_tensors([gradient])[0] is gradient
    assert (ranks.sum([2, 3]), ranks.max(4), ranks.any(False), ranks.all_equal(1)) == ([2, 3], 4, False, True)
    assert ranks.gather(b"all") == [b"all"]


def test_an_incomplete_environment_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        join_ranks(torch.device("cpu"))


def test_restarts_with_the_store_that_keeps_old_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("WORLD_SIZE", "2"),
        ("TORCHELASTIC_MAX_RESTARTS", "3"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        join_ranks(torch.device("cpu"))


def test_torchrun_learns_survives_a_killed_rank_ends_cleanly_and_one_process_goes_on(
    model_dir: Path, traces: list[Trace], redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    key, log_path = model_key(model_dir, target_fingerprint(model_dir)), tmp_path / "log"
    stream, store = TraceStream(redis_client, key, max_bytes=10**8), DraftStore(tmp_path / "store")

    def append(some: list[Trace]) -> None:
        for trace in some:
            stream.append(encode_trace(trace), trace_id=trace.header.trace_id)

    config = config_for(
        model_dir, tmp_path, redis_url=redis_url, model_key=key, max_waiting_traces=4, max_passes=1000,
        checkpoint_interval_s=0.2, publish_interval_s=0.2, publish_min_tokens=200, golden_traces=24,
        golden=record(tmp_path / "golden.rec", answer_traces(model_dir, num_traces=24, seed=5)),
    )  # fmt: skip
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *("--max-restarts", "1", "-m", "slipstream", "train", "--model", model_dir, "--redis-url", redis_url),
                *("--store", config.store_dir, "--state", config.state_dir),
            ],
            env={**os.environ, **ENVIRONMENT, **_as_environment(config), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            cwd=REPOSITORY,
            stderr=log_file,
        )
    try:
        append(traces[:4])
        wait_until(lambda: stream.lag().acked == 4)
        append(traces[4:])
        killed, _ = psutil.Process(process.pid).children()
        killed.kill()
        wait_until(lambda: stream.lag().acked == len(traces))
        wait_until(lambda: (store.latest() or 0) >= 2)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()

    rows = [json.loads(line) for line in log_path.read_text().splitlines() if line.startswith('{"')]
    assert [row["rank"] for row in rows if row["event"] == "trainer resumed"].count(0) == 1
    assert {row["rank"] for row in rows if row["event"] == "trainer ended"} == {0, 1}
    assert (stream.lag().acked, stream.lag().pending, stream.lag().dead_lettered) == (len(traces), 0, 0)
    latest = store.latest()
    assert latest is not None
    assert DraftPointer(redis_client, key).desired() == latest
    gate = store.manifest(latest).info["gate"]
    assert (gate["outcome"], gate["fresh"]["num_traces"]) == ("promote", 24), "of both ranks"
    saved = load_checkpoint(config.state_dir)
    assert saved is not None
    state, progress = saved
    ids = {trace.header.trace_id for trace in traces}
    assert (len(progress.used_trace_ids), set(progress.used_trace_ids)) == (len(ids), ids)
    assert set(progress.replay or {}) == ids
    assert (progress.num_traces, progress.new_tokens) == (len(traces), 40 * len(traces))

    resumed = Trainer(config, CollectorRegistry())
    assert resumed.learner.num_steps == int(state["num_steps"])
    assert set(resumed.replay.members) == ids, "of both ranks"
    resumed.step()
    resumed.checkpoint()
    resumed.close()
    saved = load_checkpoint(config.state_dir)
    assert saved is not None
    assert (saved[1].num_traces, saved[1].new_tokens) == (progress.num_traces, progress.new_tokens)


def _as_environment(config: TrainerConfig) -> dict[str, str]:
    """What the command line does not say itself."""
    names = config.model_fields_set - {"model_dir", "redis_url", "model_key", "store_dir", "state_dir"}
    return {f"{ENV_PREFIX}{name.upper()}": str(getattr(config, name)) for name in names}
