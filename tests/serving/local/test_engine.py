"""The local engine as its users see it: streams, stops, limits, aborts, capture, control rounds, failed swaps."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import json
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.engine import CapturePolicy, Chunk, Verification
from serving.local.request import ActiveRequest, TopK
from serving.local.target.layers import can_pack, pack, pack_linears
from speculator.draft.checkpoint import apply_state, draft_state
from speculator.draft.eagle3 import aux_layer_ids
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import DraftMismatchError, EngineBusyError, EngineDeadError, RequestError
from speculator.proposals.planner import HeadVerdict, Plan
from speculator.proposals.suffix_drafter import SuffixRequest
from speculator.trace import NO_DRAFT, Trace, decode_trace, encode_trace
from tests.fixtures.decoding import FixedPlanner, WholeTrees
from tests.fixtures.toy import SPECIAL, make_toy_model, moved_model, random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import Answer, Harness, Row, WatchedTarget, fixed_engine, toy_engine
from trainer.learning.labels import make_verdicts


@pytest.fixture(scope="module")
def harness(model_dir: Path) -> Iterator[Harness]:
    with toy_engine(model_dir, dtype="float64") as running:
        yield running


def test_chunks_add_up_to_the_answer(harness: Harness) -> None:
    answer = harness.ask(harness.request("hello", max_tokens=30))[0]
    assert len(answer.token_ids) == 30
    assert answer.finish_reason == "length"
    assert answer.text == harness.engine.tokenizer.decode(answer.token_ids)
    assert [chunk.finish_reason for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)


def test_a_stop_string_ends_the_answer_before_it(harness: Harness) -> None:
    whole = harness.ask(harness.request("hello"))[0]
    stop = whole.text[10:13]
    expected = whole.text[: whole.text.find(stop)]
    answer = harness.ask(harness.request("hello", stop=(stop,)))[0]
    assert answer.text == expected
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) < len(whole.token_ids)
    # Nothing of the stop string was shown before it was recognised.
    assert "".join(chunk.text for chunk in answer.chunks) == expected


def test_end_of_sequence_ends_the_answer(harness: Harness, tmp_path: Path) -> None:
    """The token that only one file of three names, the one of number 0 included."""
    model_dir = make_toy_model(tmp_path / "toy")
    drawn = {"max_tokens": 200, "sampling": SamplingParams(temperature=4.0), "seed": 1}
    plain = harness.ask(harness.request("hello", **drawn))[0].token_ids
    for end in (plain[7], 0):
        assert end in plain
        (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
        with toy_engine(model_dir, dtype="float64") as other:
            answer = other.ask(other.request("hello", **drawn, ignore_eos=False))[0]
        first = min(plain.index(one) for one in (end, 2) if one in plain)
        assert answer.token_ids == plain[: first + 1]
        assert answer.finish_reason == "stop"


def test_a_special_token_ends_the_answer_where_a_request_says_so(harness: Harness) -> None:
    plain = harness.ask(harness.request("hello", max_tokens=200))[0]
    first = plain.token_ids.index(SPECIAL.index("<|im_start|>"))
    answer = harness.ask(harness.request("hello", max_tokens=200, stop=("<|im_start|>",)))[0]
    assert (answer.token_ids, answer.finish_reason) == (plain.token_ids[: first + 1], "stop")
    assert answer.text == harness.engine.tokenizer.decode(plain.token_ids[:first])


def test_one_token_answers(harness: Harness) -> None:
    answers = harness.ask(*(harness.request(f"hello {number}", max_tokens=1) for number in range(6)))
    assert [len(answer.token_ids) for answer in answers] == [1] * 6
    harness.ask(harness.request("hello", max_tokens=2))
    wait_until(lambda: harness.traces and harness.traces[-1].num_completion_tokens == 1)
    assert all(trace.num_completion_tokens for trace in harness.traces), "one token teaches nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 300},
        {"prompt_token_ids": ()},
        {"prompt_token_ids": (5, 10_000)},
        {"prompt_token_ids": (5, -1)},
    ],
)
def test_requests_that_can_never_be_served_are_refused(harness: Harness, changes: dict[str, object]) -> None:
    request = harness.request("hello")
    values = {name: getattr(request, name) for name in request.__dataclass_fields__}
    with pytest.raises(RequestError):
        harness.ask(type(request)(**{**values, **changes}))
    assert harness.engine.health().ready


def test_more_requests_than_slots_queue_and_more_than_the_queue_are_refused(model_dir: Path) -> None:
    with toy_engine(model_dir, slots=2) as harness:
        assert len(harness.ask(*(harness.request(f"q {n}", max_tokens=5) for n in range(12)))) == 12

        async def flood() -> list[object]:
            streams = [harness.engine.generate(harness.request(f"q {n}", max_tokens=200)) for n in range(40)]
            first = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            return first

        outcomes = asyncio.run(flood())
        assert any(isinstance(outcome, EngineBusyError) for outcome in outcomes)
        assert harness.ask(harness.request("still fine", max_tokens=3))[0].finish_reason == "length"


def test_leaving_early_frees_the_slot_and_discards_the_trace(model_dir: Path) -> None:
    with toy_engine(model_dir, slots=1) as harness:

        async def leave() -> None:
            async with contextlib.aclosing(harness.engine.generate(harness.request("hello", max_tokens=200))) as chunks:
                await anext(chunks)

        asyncio.run(leave())
        wait_until(lambda: harness.engine.health().num_running == 0 or harness.ask(harness.request("a", max_tokens=1)))
        harness.ask(harness.request("next", max_tokens=4))
        assert harness.metric("slipstream_requests_aborted_total") == 1
        assert "hello" not in {trace.header.request_id for trace in harness.traces}


def test_requests_in_flight_end_with_an_error_when_the_engine_stops(model_dir: Path) -> None:
    with toy_engine(model_dir) as harness:

        def stop(_: int, chunk: Chunk) -> None:
            if len(chunk.token_ids):
                harness.engine.stop()

        with pytest.raises(EngineDeadError):
            harness.ask(harness.request("hello", max_tokens=200), on_chunk=stop)
        with pytest.raises(EngineDeadError):
            harness.ask(harness.request("hello"))
        assert not harness.engine.health().alive


def test_an_engine_that_stops_hands_on_the_traces_of_answers_that_ended(model_dir: Path) -> None:
    may_go_on = threading.Event()
    with toy_engine(model_dir, on_trace=lambda _: may_go_on.wait(10)) as harness:
        harness.ask(*(harness.request(f"question {number}", max_tokens=4) for number in range(3)))
        stopping = threading.Thread(target=harness.engine.stop)
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()
        may_go_on.set()
        stopping.join(10)
        assert len(harness.traces) == 3


def test_a_trace_holds_what_the_model_computes(model_dir: Path) -> None:
    with fixed_engine(model_dir, control_share=0.3) as harness:
        prompt = "a prompt that is longer than the kept window of twenty positions"
        answer = harness.ask(harness.request(prompt, max_tokens=25, policy=CapturePolicy(domain="test")))[0]
        wait_until(lambda: harness.traces)  # handed over just after the last chunk
        trace = harness.traces[0]
    tokens = [*harness.engine.tokenizer.encode(prompt), *answer.token_ids]
    start, end = trace.header.first_position, len(tokens) - 1
    assert start == trace.header.num_prompt_tokens - 20
    assert trace.token_ids.tolist() == tokens[start:end]
    assert trace.header.domain == "test"

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    features = torch.cat([out.hidden_states[layer][0, start:end] for layer in aux_layer_ids(8)], -1)
    torch.testing.assert_close(trace.aux_hidden, features.to(torch.bfloat16))

    # The last twelve of the twenty kept prompt positions, and all of the answer's.
    assert (trace.target_topk_ids[:8] == -1).all()
    assert np.isneginf(trace.target_topk_logprobs[:8]).all()
    expected = out.logits[0, start + 8 : end].log_softmax(-1).topk(8, -1)
    assert (trace.target_topk_ids[8:] == expected.indices.numpy()).all()
    np.testing.assert_allclose(trace.target_topk_logprobs[8:], expected.values.numpy(), rtol=2e-3, atol=2e-3)

    rounds = trace.rounds
    assert (rounds.draft_version == 1).all()
    for position, proposals, accepted in zip(rounds.position, rounds.draft_tokens, rounds.num_accepted, strict=True):
        served = tokens[position + 1 : position + 1 + 3]
        agreeing = [bool(a == b) for a, b in zip(proposals, served, strict=False)]
        assert all(agreeing[:accepted])
        if accepted < len(agreeing):
            assert not agreeing[accepted]
    assert decode_trace(encode_trace(trace)).token_ids.tolist() == trace.token_ids.tolist()


def test_a_context_window_shorter_than_the_labelled_prompt_keeps_its_last_positions(model_dir: Path) -> None:
    """The engine computes distributions for the last 12 positions of a prompt."""
    traces = {}
    for window in (4, 20):
        with fixed_engine(model_dir, context_window=window) as harness:
            request = harness.request("a prompt that is longer than both of these windows are")
            harness.ask(request)
            wait_until(lambda harness=harness: harness.traces)
            assert harness.metric("slipstream_capture_failures_total") == 0
            traces[window] = harness.traces[0]
    short, long = traces[4], traces[20]
    assert short.header.first_position == len(request.prompt_token_ids) - 4
    assert np.array_equal(short.token_ids, long.token_ids[16:])
    assert np.array_equal(short.target_topk_ids, long.target_topk_ids[16:])


def test_nothing_is_captured_for_a_request_that_opted_out(harness: Harness) -> None:
    before = len(harness.traces)
    harness.ask(harness.request("private", policy=CapturePolicy(capture=False)))
    harness.ask(harness.request("public", max_tokens=2))
    wait_until(lambda: len(harness.traces) > before)
    assert [trace.header.request_id for trace in harness.traces[before:]] == ["public"]


def test_control_rounds_give_the_baseline(model_dir: Path) -> None:
    with fixed_engine(model_dir, control_share=0.3) as harness:
        harness.ask(*(harness.request(f"q {n}") for n in range(4)))
        measured = harness.meter.measure()
        control = sum(harness.metric("slipstream_rounds_total", mode="control", batch=str(b)) for b in range(1, 5))
    assert measured.baseline_rounds == control > 0
    assert measured.ratio is not None


def answers(harness: Harness, count: int) -> list[str]:
    """One after the other."""
    questions = [harness.request(f"question {number}", max_tokens=100) for number in range(count)]
    return [harness.ask(question)[0].text for question in questions]


def test_in_plain_stretches_nobody_drafts_and_no_text_changes(model_dir: Path) -> None:
    with fixed_engine(model_dir) as harness:
        texts = answers(harness, 6)
        assert harness.engine.end_to_end.measure().ratio is None
    with fixed_engine(model_dir, plain_share=0.5) as harness:
        assert answers(harness, 6) == texts
        measured = harness.engine.end_to_end.measure()
        plain = harness.metric("slipstream_rounds_total", mode="control", batch="1")
    assert measured.ratio is not None
    assert measured.baseline_rounds >= plain - 8 * 6 > 48, "but for the first ones of a stretch"


def test_the_ab_of_the_head_takes_it_away_for_stretches_and_changes_no_text(model_dir: Path) -> None:
    with fixed_engine(model_dir) as harness:
        texts = answers(harness, 3)
        assert harness.metric("slipstream_head_ab_rounds_total", arm="both", batch="1") == 0
    with fixed_engine(model_dir, head_off_share=0.5) as harness:
        assert answers(harness, 3) == texts
        wait_until(lambda: len(harness.traces) == 3)
        both, without = (
            harness.metric("slipstream_head_ab_rounds_total", arm=arm, batch="1") for arm in ("both", "suffix_only")
        )
        earned = harness.metric("slipstream_head_ab_round_tokens_total", arm="suffix_only", batch="1")
        assert harness.metric("slipstream_head_ab_round_seconds_total", arm="suffix_only", batch="1") > 0
        assert harness.metric("slipstream_head_ab_asked_rounds_total") == both > 0
        rounds = harness.metric("slipstream_verifications_total")
        proposed = harness.metric("slipstream_proposals_total", source="head", position="1")
    assert earned == without > 0, "this engine remembers no text, so without its head a round commits one token"
    assert 48 <= rounds - proposed <= 0.6 * rounds


def test_an_unsure_draft_proposes_nothing_and_a_sure_one_the_whole_chain(model_dir: Path) -> None:
    unsure = random_draft(model_dir, seed=1)
    unsure.lm_head.weight.data.zero_()
    with fixed_engine(model_dir, draft=unsure, depth=4, min_confidence=0.1) as harness:
        harness.ask(harness.request("hello"))
        # The last chunk of an answer is delivered before its round is counted.
        wait_until(lambda: harness.traces)
        assert harness.metric("slipstream_proposals_total", source="head", position="1") == 0
        assert harness.metric("slipstream_verifications_total") == 39
        assert len(harness.traces[0].rounds.position) == 0
    sure = random_draft(model_dir, seed=1)
    sure.lm_head.weight.data.mul_(100)
    with fixed_engine(model_dir, draft=sure, depth=4, min_confidence=0.1) as harness:
        harness.ask(harness.request("hello"))
        assert harness.metric("slipstream_proposals_total", source="head", position="4") > 0


class OnlyLooks(FixedPlanner):
    """Never uses the head, and looks at it in the last row."""

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        return Plan(batch=len(domains), num_keys=num_keys, probe=len(domains) - 1)


def test_a_probe_is_what_verification_would_have_said_of_that_requests_next_token(model_dir: Path) -> None:
    draft = random_draft(model_dir, seed=1)
    looked: list[Verification] = []
    sampling = SamplingParams(temperature=5.0)  # so hot that both are nearly uniform: shared noise makes them agree

    def ask(harness: Harness) -> list[Answer]:
        # Of equal length, so that the second is in the last row until both end.
        return harness.ask(
            harness.request("hello you", seed=1, sampling=sampling, max_tokens=60),
            harness.request("and another one", seed=2, sampling=sampling, max_tokens=60),
        )

    with fixed_engine(model_dir, draft=copy.deepcopy(draft), depth=1) as harness:
        verified = ask(harness)
        wait_until(lambda: len(harness.traces) == 2)
        (trace,) = [trace for trace in harness.traces if trace.header.request_id == "and another one"]
    with fixed_engine(
        model_dir,
        draft=draft,
        planner=OnlyLooks(),
        on_round=lambda round_: looked.extend(round_.verifications),
    ) as harness:
        answers = ask(harness)
    right, wrong = (harness.metric("slipstream_draft_probes_total", outcome=word) for word in ("accepted", "rejected"))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in verified]
    assert not any(answer.num_accepted for answer in answers)
    assert {(one.depth, one.stratum.of_probes) for one in looked} == {(1, True)}
    verdicts = dict(zip(trace.rounds.position.tolist(), trace.rounds.num_accepted.tolist(), strict=True))
    looks = [one.accepted for one in looked if one.request_id == "and another one"]
    seen = dict(enumerate(looks, trace.header.num_prompt_tokens))
    assert verdicts == {position: seen[position] for position in verdicts}
    assert 5 < sum(verdicts.values()) < len(verdicts), "or it shows nothing"
    assert (right, right + wrong) == (sum(one.accepted for one in looked), len(looked))


class Listens(FixedPlanner):
    """Always uses the head, and keeps what is said of it."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[HeadVerdict] = []

    def observe_head(self, verdicts: Iterable[HeadVerdict]) -> None:
        self.verdicts.extend(verdicts)


@pytest.mark.parametrize("suffix_depth", [0, 8])
def test_what_the_head_saves_is_less_where_a_suffix_would_have_known(model_dir: Path, suffix_depth: int) -> None:
    planner, draft = Listens(), random_draft(model_dir, seed=1)
    sampling = SamplingParams(temperature=5.0)  # so hot that both are nearly uniform: shared noise makes them agree
    saved = []
    with fixed_engine(model_dir, draft=draft, depth=2, planner=planner, suffix_depth=suffix_depth) as harness:
        for _ in range(2):
            planner.verdicts.clear()
            harness.ask(harness.request("hello you", seed=1, sampling=sampling, max_tokens=60))
            accepted = sum(verdict.num_accepted for verdict in planner.verdicts)
            assert accepted > 5, "or it shows nothing"
            saved.append(sum(verdict.rounds_saved or 0.0 for verdict in planner.verdicts) / accepted)
    assert saved[0] > 0.8
    assert saved[1] < 0.4 if suffix_depth else saved[1] == 1


def test_what_was_answered_before_is_proposed_again_to_the_same_tenant_alone(model_dir: Path) -> None:
    with fixed_engine(
        model_dir, draft=random_draft(model_dir, seed=9), planner=WholeTrees(), suffix_depth=8
    ) as harness:

        def rounds(tenant: str, *, capture: bool = True) -> int:
            policy = CapturePolicy(tenant=tenant, capture=capture)
            (answer,) = harness.ask(harness.request("what is 2 and 2?", policy=policy, max_tokens=60))
            return len(answer.chunks)

        private = rounds("a", capture=False)
        assert rounds("a") > 0.75 * private, "a request that opted out left its answer behind"
        assert min(rounds("a"), rounds("a")) < private / 2
        assert rounds("b") > 0.75 * private
        wait_until(lambda: len(harness.traces) == 4)
        _, _, second, _ = (decode_trace(encode_trace(trace)) for trace in harness.traces)
        assert (second.rounds.draft_version == NO_DRAFT).any()
        draft_ids_V = torch.arange(second.target_topk_ids.max() + 1)
        assert (make_verdicts(second, draft_ids_V, first_base=0).versions != NO_DRAFT).all()


class Pauses(FixedPlanner):
    """Asks the head while `asks` is set."""

    asks = False

    def plan(self, domains: Sequence[str], num_keys: int, *args: Any, head_depth: int, **kwargs: Any) -> Plan:
        return super().plan(domains, num_keys, *args, head_depth=head_depth if self.asks else 0, **kwargs)

    @property
    def is_awake(self) -> bool:
        return self.asks


def test_the_head_catches_up_after_a_pause(model_dir: Path) -> None:
    planner = Pauses()
    with fixed_engine(model_dir, planner=planner) as harness:

        def proposed() -> float:
            return harness.metric("slipstream_proposals_total", source="head", position="1")

        plain = harness.ask(harness.request("hello", max_tokens=150))[0].token_ids
        assert proposed() == 0
        # Long enough at first that the draft has more pairs to catch up with than one pass takes.
        chunks, pauses = itertools.count(), iter([True, False, True])

        def change(_: int, chunk: Chunk) -> None:
            if len(chunk.token_ids) and next(chunks) > 90:
                planner.asks = next(pauses, True)

        (answer,) = harness.ask(harness.request("hello", max_tokens=150), on_chunk=change)
        assert answer.token_ids == plain
        assert proposed() > 0


def test_a_refused_draft_leaves_the_version_in_service(model_dir: Path) -> None:
    with fixed_engine(model_dir) as harness:
        before = harness.ask(harness.request("hello"))[0]
        harness.drafts[2] = random_draft(model_dir, seed=2, draft_vocab_size=20)
        with pytest.raises(Exception, match="shapes"):
            harness.engine.install_draft(2)
        other = random_draft(model_dir, seed=2)
        other.d2t += 1
        harness.drafts[3] = other
        with pytest.raises(DraftMismatchError):
            harness.engine.install_draft(3)
        assert harness.engine.draft_version == 1
        assert harness.metric("slipstream_swaps_total", outcome="failed") == 2
        again = harness.ask(harness.request("hello"))[0]
        assert [len(chunk.token_ids) for chunk in again.chunks] == [len(chunk.token_ids) for chunk in before.chunks]


@pytest.mark.skipif(not can_pack(), reason="a CPU on which oneDNN has no bfloat16")
def test_packed_layers_compute_what_the_plain_ones_do_and_take_new_weights_in_place() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(48, 32, bias=False), torch.nn.Linear(32, 16)).to(torch.bfloat16)
    packed = copy.deepcopy(plain)
    pack_linears(packed, kernels=None)
    for rows in (1, 3, 8, 40):
        x = torch.randn(rows, 48, dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)
    new = torch.randn(32, 48, dtype=torch.bfloat16)
    plain[0].weight.data.copy_(new)
    packed[0].packed.copy_(pack(new))
    with torch.no_grad():
        torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)


def test_samples_of_a_group_read_their_prompt_once(model_dir: Path) -> None:
    """Their texts, and their traces, are those of samples that read it themselves."""
    prompt = "a prompt that is longer than the kept window of twenty positions"
    prompts = [prompt, prompt, prompt, f"{prompt} or so", "a prompt", "other"]

    def run(group_id: str) -> tuple[int, list[list[int]], list[Trace]]:
        target = WatchedTarget(model_dir, dtype=torch.float64)
        with toy_engine(model_dir, dtype="float64", target=target) as harness:
            shared = {"policy": CapturePolicy(group_id=group_id), "sampling": SamplingParams(temperature=1.0)}
            requests = [
                harness.request(text, request_id=str(seed), seed=seed, **shared) for seed, text in enumerate(prompts)
            ]
            answers = harness.ask(*requests)
            wait_until(lambda: len(harness.traces) == len(requests))
            num_read = target.num_read(*(request.prompt_token_ids for request in requests))
        traces = sorted(harness.traces, key=lambda trace: trace.header.request_id)
        return num_read, [answer.token_ids for answer in answers], traces

    alone, texts, traces = run("")
    together, same, others = run("g")
    assert texts == same
    assert alone == sum(map(len, prompts))
    assert together < alone - 2 * len(prompt)
    for trace, other in zip(traces, others, strict=True):
        np.testing.assert_array_equal(trace.token_ids, other.token_ids)
        np.testing.assert_array_equal(trace.target_topk_ids, other.target_topk_ids)
        torch.testing.assert_close(trace.aux_hidden, other.aux_hidden)


@pytest.mark.parametrize("what", ["draft", "target"])
def test_a_sample_of_a_group_takes_nothing_that_old_weights_have_read(
    model_dir: Path, tmp_path: Path, what: str
) -> None:
    """Its text and proposals are those of the new weights alone, as if it had no sibling."""
    prompt, policy = "a prompt that old weights have read", CapturePolicy(group_id="g")
    new, new_dir = random_draft(model_dir, seed=2), moved_model(model_dir, tmp_path / "1")
    apply_state(new, draft_state(new))  # to what a file holds
    target, is_over = WatchedTarget(model_dir, dtype=torch.float64), threading.Event()

    async def answer_after_a_change(harness: Harness) -> None:
        engine, inbox, is_reading = harness.engine, harness.inbox, False

        def wait_for_company(rows: list[Row]) -> None:
            """The first request decodes only while others are there, or wait, and so is there as long as they are."""
            nonlocal is_reading
            if rows[-1].start < len(prompt):
                is_reading = rows[-1].start + len(rows[-1].tokens) < len(prompt)
            elif len(rows) == 1 and not is_reading:
                wait_until(lambda: is_over.is_set() or inbox.num_waiting or inbox.num_tasks)

        target.on_pass = wait_for_company
        first = engine.generate(harness.request(prompt, policy=policy, max_tokens=200))
        await anext(first)
        if what == "draft":
            engine.install_draft(2)
        else:
            engine.update_target(1, new_dir)
        for seed in range(2):
            async for _ in engine.generate(harness.request(prompt, request_id=str(seed), policy=policy)):
                pass
        is_over.set()
        await first.aclose()  # type: ignore[attr-defined]

    with fixed_engine(model_dir, target=target) as harness:
        harness.drafts[2] = copy.deepcopy(new).to(torch.float64)
        asyncio.run(answer_after_a_change(harness))
        wait_until(lambda: sum(trace.header.request_id != prompt for trace in harness.traces) == 2)
    changed = {"draft": new} if what == "draft" else {}
    with fixed_engine(model_dir if what == "draft" else new_dir, **changed) as alone:
        alone.ask(alone.request(prompt))
        wait_until(lambda: alone.traces)
    for trace in (trace for trace in harness.traces if trace.header.request_id != prompt):
        np.testing.assert_array_equal(trace.token_ids, alone.traces[0].token_ids)
        np.testing.assert_array_equal(trace.target_topk_ids, alone.traces[0].target_topk_ids)
        if what == "draft":
            # Who copies the prompt gets the first token from a round, too.
            np.testing.assert_array_equal(trace.rounds.draft_tokens[1:], alone.traces[0].rounds.draft_tokens)


def test_answers_that_have_ended_leave_nothing(harness: Harness) -> None:
    """Objects are counted, which is exact where memory is not."""

    def census() -> Counter[type]:
        # Done between two steps, so the one that gave the last answer has ended, and its trace is out.
        harness.engine.forget([])
        harness.traces.clear()
        gc.collect()
        return Counter(kind for each in gc.get_objects() if (kind := type(each)) in kinds)

    kinds = (ActiveRequest, SuffixRequest, TopK, asyncio.Queue, types.CoroutineType)
    seen = []
    for _ in range(2):
        for number in range(8):
            harness.ask(*(harness.request(f"question {number} {other}", max_tokens=12) for other in range(2)))
        seen.append(census())
    assert (seen[1] - seen[0]).total() == 0
    assert seen[1][ActiveRequest] <= 2


def test_the_engine_reports_how_busy_it_is(model_dir: Path) -> None:
    seen: list[float] = []
    with toy_engine(model_dir) as harness:
        load = harness.engine.load
        harness.ask(
            harness.request("hello", max_tokens=12), on_chunk=lambda *_: seen.append(float(load.report()["busy"]))
        )
        wait_until(lambda: load.report()["busy"] == 0.0)
    assert max(seen) > 0.5
