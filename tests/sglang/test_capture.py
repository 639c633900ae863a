"""What the plugin captures in real SGLang: what the target computed, what was served, what SGLang itself counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculator.draft.checkpoint import SWITCHES, read_target_tensor, target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft, aux_layer_ids
from speculator.host import now_ms
from speculator.trace import Trace
from speculator.versions.lineage import ensure_lineage, load_draft
from speculator.versions.store import DraftStore
from tests.sglang.plugged import Plugged, plugged_server
from trainer.learning.labels import draft_ids_by_target_id

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "A train travels 60 km in 45 minutes. How fast is it in km per hour?",
    "Why is the sky blue?",
    "List five vegetables that grow in winter.",
    "Explain what a hash table is.",
    "Tom has 3 apples and buys 5 more. He eats 2. How many are left?",
    "Translate 'good morning' into Spanish and German.",
    "Who wrote Romeo and Juliet?",
    "What does the ls command do?",
    "How do vaccines work?",
    "Write a haiku about the sea.",
    "What is 17 times 23?",
    "Name the planets of the solar system in order.",
    "Summarise the plot of Cinderella in two sentences.",
    "How is bread made?",
    "What is the difference between a list and a tuple in Python?",
    "If a shirt costs 20 dollars and is reduced by 15%, what does it cost?",
    "Describe a sunset in the mountains to someone who has never seen one, in as much detail as you can give.",
    "What are the primary colours?",
)
_NUM_YARDSTICKS = 10
"""Traces whose rounding is measured: without bfloat16 in hardware a pass takes three times as long as in float32."""


@pytest.fixture(scope="module")
def draft_store(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftStore:
    """A slim draft with every norm that SGLang computes; other files' drafts have none, and the target's MLP."""
    store = DraftStore(tmp_path_factory.mktemp("normed"))
    ensure_lineage(store, model_dir, target_fingerprint(model_dir), switches=SWITCHES, intermediate_size=512)
    return store


@pytest.fixture(scope="module")
def plugged(model_dir: Path, draft_store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    """A chain of three, prompts read in chunks of 32, the radix cache on, features as they were computed."""
    with plugged_server(
        tmp_path_factory.mktemp("capture"),
        model_dir,
        draft_store,
        flags=("--chunked-prefill-size", "32", "--max-running-requests", "8"),
        settings={"CAPTURE_FEATURES": "bfloat16", "CONTEXT_WINDOW": "200", "BRANCH_SHARE": "0.1"},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def answers(plugged: Plugged) -> dict[str, dict[str, Any]]:
    """Twenty greedy answers, four at a time, by request id."""

    def ask(question: str) -> dict[str, Any]:
        ids = plugged.ids(question)
        return {**plugged.server.generate(ids, max_new_tokens=32), "prompt_ids": ids}

    with ThreadPoolExecutor(4) as pool:
        return {answer["meta_info"]["id"]: answer for answer in pool.map(ask, QUESTIONS)}


@pytest.fixture(scope="module")
def traces(plugged: Plugged, answers: dict[str, dict[str, Any]]) -> dict[str, Trace]:
    return plugged.traces(len(answers))


def test_every_finished_request_has_its_trace(answers: dict[str, dict[str, Any]], traces: dict[str, Trace]) -> None:
    assert traces.keys() == answers.keys()
    for request_id, trace in traces.items():
        answer = answers[request_id]
        completion = answer["output_ids"]
        start = trace.header.num_prompt_tokens - trace.header.first_position
        assert trace.header.num_prompt_tokens == answer["meta_info"]["prompt_tokens"]
        assert trace.token_ids[start:].tolist() == completion[:-1]
        assert not trace.constrained.any()


def test_the_targets_likeliest_token_is_the_served_one(
    answers: dict[str, dict[str, Any]], traces: dict[str, Trace]
) -> None:
    for request_id, trace in traces.items():
        last_prompt = trace.header.num_prompt_tokens - trace.header.first_position - 1
        assert trace.target_topk_ids[last_prompt:, 0].tolist() == answers[request_id]["output_ids"]


def test_accepted_counts_are_sglangs_own(answers: dict[str, dict[str, Any]], traces: dict[str, Trace]) -> None:
    for request_id, trace in traces.items():
        counted = answers[request_id]["meta_info"]
        assert len(trace.rounds.position) == counted["spec_verify_ct"]
        assert trace.rounds.num_accepted.sum() == counted["spec_num_correct_drafts"]
        assert (trace.rounds.draft_version == 1).all()


def test_features_and_distributions_are_hugging_faces(
    model_dir: Path, answers: dict[str, dict[str, Any]], traces: dict[str, Trace], rounding: tuple[Tensor, Tensor]
) -> None:
    """At every position of every trace, prompts in chunks and behind cached prefixes among them."""
    check_against_hugging_face(model_dir, answers, traces, rounding)


def test_rows_behind_rejections_are_those_of_a_prompt_that_ends_there(
    plugged: Plugged, answers: dict[str, dict[str, Any]], traces: dict[str, Trace]
) -> None:
    """SGLang reads the same text anew, up to and with the rejected proposal. A neighbour's row is far off."""
    found = []
    for request_id, trace in traces.items():
        rows, rounds, answer = trace.branches, trace.rounds, answers[request_id]
        for row in range(trace.num_branches):
            assert rows is not None
            round_, node = int(rows.round[row]), int(rows.node[row])
            assert node >= rounds.num_accepted[round_]
            text = [*answer["prompt_ids"], *answer["output_ids"]][: rounds.position[round_] + 1]
            found.append((rows, row, [*text, *rounds.draft_tokens[round_, : node + 1].tolist()]))
    num_rejected = sum(
        int((one.rounds.draft_tokens >= 0).sum() - one.rounds.num_accepted.sum()) for one in traces.values()
    )
    assert 0.04 < len(found) / num_rejected < 0.16
    kept = int(
        plugged.wait_for(lambda report: "kept" in report["branch_rows"])["branch_rows"].split(",")[0].split("=")[1]
    )
    assert kept == len(found)
    chosen = found[:: max(len(found) // 24, 1)]
    asked = [plugged.server.generate(text, max_new_tokens=2, ignore_eos=True) for _, _, text in chosen]
    read = plugged.traces(len(chosen))
    errors, misplaced, differences = [], [], []
    for (rows, row, text), one in zip(chosen, asked, strict=True):
        trace = read[one["meta_info"]["id"]]
        last = len(text) - 1 - trace.header.first_position
        feature = trace.aux_hidden[last].float()
        errors.append(float((rows.hidden[row].float() - feature).norm() / feature.norm()))
        other = rows.hidden[(row + 1) % len(rows)].float()
        misplaced.append(float((other - feature).norm() / feature.norm()))
        logprobs = dict(
            zip(trace.target_topk_ids[last].tolist(), trace.target_topk_logprobs[last].tolist(), strict=True)
        )
        likeliest = zip(rows.topk_ids[row, :4].tolist(), rows.topk_logprobs[row, :4].tolist(), strict=True)
        differences += [abs(logprobs[token] - value) for token, value in likeliest]
    assert max(errors) < 0.1
    assert float(np.median(misplaced)) > 0.3
    assert max(differences) < 0.5
    assert float(np.median(differences)) < 0.1


def test_they_are_whatever_the_temperatures_of_a_batch(
    plugged: Plugged, model_dir: Path, rounding: tuple[Tensor, Tensor]
) -> None:
    def ask(number: int) -> dict[str, Any]:
        ids = plugged.ids(f"{number}. {QUESTIONS[number % len(QUESTIONS)]}")
        answer = plugged.server.generate(
            ids, max_new_tokens=8 + number % 5, temperature=(0, 0.7, 1.0)[number % 3], ignore_eos=True
        )
        return {**answer, "prompt_ids": ids}

    with ThreadPoolExecutor(8) as pool:
        answers = {answer["meta_info"]["id"]: answer for answer in pool.map(ask, range(40))}
    traces = plugged.traces(len(answers))
    assert traces.keys() == answers.keys()
    assert {trace.header.sampling.temperature for trace in traces.values()} == {0.0, 0.7, 1.0}
    likeliest = [trace.target_topk_ids[:, 0] for trace in traces.values() if trace.header.sampling.temperature == 1]
    served = [
        answers[trace_id]["output_ids"] for trace_id, trace in traces.items() if trace.header.sampling.temperature == 1
    ]
    assert any(ids[-len(tokens) :].tolist() != tokens for ids, tokens in zip(likeliest, served, strict=True))
    check_against_hugging_face(model_dir, answers, traces, rounding)


def check_against_hugging_face(
    model_dir: Path, answers: dict[str, dict[str, Any]], traces: dict[str, Trace], rounding: tuple[Tensor, Tensor]
) -> None:
    """A misplaced position is off by more than the size of the feature itself."""
    exact = _hugging_face(model_dir, torch.float32)
    errors = [_captured_errors(exact, answers[request_id], trace) for request_id, trace in traces.items()]
    for of_all, allowed in zip(zip(*errors, strict=True), rounding, strict=True):
        error = torch.cat(of_all)
        assert error.median() < 1.5 * allowed.median()
        assert error.max() < 3 * allowed.max()


@pytest.fixture(scope="module")
def rounding(model_dir: Path, answers: dict[str, dict[str, Any]], traces: dict[str, Trace]) -> tuple[Tensor, Tensor]:
    """The yardstick: what bfloat16 does to features and log-probabilities of Hugging Face's own forward pass, against
    the same in float32.
    """
    exact, rounded = _hugging_face(model_dir, torch.float32), _hugging_face(model_dir, torch.bfloat16)
    features_off, logprobs_off = [], []
    for request_id, trace in itertools.islice(traces.items(), _NUM_YARDSTICKS):
        tokens, labelled, top = _served(answers[request_id], trace)
        features, logprobs = _forward(exact, tokens, trace.header.first_position)
        features_bf16, logprobs_bf16 = _forward(rounded, tokens, trace.header.first_position)
        features_off.append((features_bf16 - features).norm(dim=-1) / features.norm(dim=-1))
        logprobs_off.append((logprobs_bf16 - logprobs)[labelled].gather(1, top).abs().flatten())
    return torch.cat(features_off), torch.cat(logprobs_off)


def _hugging_face(model_dir: Path, dtype: torch.dtype) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)


def _served(answer: dict[str, Any], trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [1, T] of a trace's rows, which of its rows have a label, and the four likeliest tokens of these."""
    labelled = torch.from_numpy(trace.target_topk_ids[:, 0] >= 0)
    tokens = torch.tensor([answer["prompt_ids"] + answer["output_ids"][:-1]])
    return tokens, labelled, torch.from_numpy(trace.target_topk_ids[:, :4]).long()[labelled]


def _captured_errors(exact: Any, answer: dict[str, Any], trace: Trace) -> tuple[Tensor, Tensor]:
    tokens, labelled, top = _served(answer, trace)
    features, logprobs = _forward(exact, tokens, trace.header.first_position)
    captured = torch.from_numpy(trace.target_topk_logprobs[:, :4].astype(np.float32))[labelled]
    feature_errors = (trace.aux_hidden.float() - features).norm(dim=-1) / features.norm(dim=-1)
    return feature_errors, (captured - logprobs[labelled].gather(1, top)).abs().flatten()


def nothing_computed(report: dict[str, str]) -> int:
    """How many answers had nothing to learn from."""
    counts = dict(one.split("=") for one in report["dropped_by_reason"].split(",") if one)
    return int(counts.get("nothing_computed", 0))


def test_the_label_after_a_prompt_is_the_targets_own_however_its_first_token_is_chosen(
    plugged: Plugged, model_dir: Path, traces: dict[str, Trace]
) -> None:
    """SGLang samples in the memory of its logits, for all requests of a prefill as soon as one of them samples."""
    sampling = ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9})
    sampling += ({"temperature": 0, "logit_bias": {"28": 50.0}}, {"temperature": 1.0, "repetition_penalty": 1.5})
    prompts = [plugged.tokenizer.encode(f"{word} The capital of France is") for word in ("A", "Be", "See", "Do", "I")]
    body = {
        "input_ids": prompts,
        "sampling_params": [{"max_new_tokens": 4, "ignore_eos": True} | one for one in sampling],
    }
    before = nothing_computed(plugged.report())
    answered = httpx.post(f"{plugged.server.url}/generate", json=body, timeout=60, trust_env=False).raise_for_status()
    # Of the biased one nothing can be learned, so it leaves no trace; it is in the batch, though.
    found = plugged.traces(4)
    plugged.wait_for(lambda report: nothing_computed(report) == before + 1)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, answer in itertools.compress(zip(prompts, answered.json(), strict=True), (1, 1, 1, 0, 1)):
        trace = found[answer["meta_info"]["id"]]
        last = len(prompt) - 1 - trace.header.first_position
        _, logprobs = _forward(model, torch.tensor([prompt]), len(prompt) - 1)
        ids = torch.from_numpy(trace.target_topk_ids[last]).long()
        recorded = torch.from_numpy(trace.target_topk_logprobs[last].astype(np.float32))
        # bfloat16 moves them by some hundredths; a uniform label would lie at -10.8.
        assert (recorded - logprobs[0, ids])[:8].abs().max() < 0.5


def test_a_health_check_is_no_lost_trace(plugged: Plugged) -> None:
    before = nothing_computed(plugged.report())
    httpx.get(f"{plugged.server.url}/health_generate", timeout=60, trust_env=False).raise_for_status()
    plugged.server.generate("The capital of France is", max_new_tokens=4)
    assert len(plugged.traces(1)) == 1
    assert nothing_computed(plugged.wait_for(lambda report: report["pending"] == "0")) == before


def _forward(model: Any, tokens: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Aux features [T, 3d] and log-probabilities [T, V] of the positions from `start`, in float32."""
    with torch.inference_mode():
        output = model(tokens, output_hidden_states=True)
    layers = aux_layer_ids(model.config.num_hidden_layers)
    features = torch.cat([output.hidden_states[layer][0, start:] for layer in layers], -1)
    return features.float(), output.logits[0, start:].float().log_softmax(-1)


def test_the_drafts_own_logprobs_are_those_of_our_network(
    plugged: Plugged, model_dir: Path, draft_store: DraftStore, traces: dict[str, Trace]
) -> None:
    """SGLang's draft and `speculator.draft.eagle3` propose the same chains with the same probabilities."""
    # A first token that no other prompt has: behind a cached prefix, the trace would lack what SGLang's draft has read.
    for number, question in enumerate(QUESTIONS[:3]):
        plugged.server.generate([1000 + number, *plugged.ids(question)], max_new_tokens=32)
    uncached = plugged.traces(3)
    draft = load_draft(
        draft_store,
        1,
        embed=read_target_tensor(model_dir, "model.embed_tokens.weight"),
        target_fingerprint=draft_store.manifest(1).target_fingerprint,
    )
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    same, differences = np.zeros(3), [list[float]() for _ in range(3)]
    num_rounds = 0
    for trace in uncached.values():
        assert trace.header.first_position == 0
        rounds = trace.rounds
        for position, tokens, behaviour in zip(
            rounds.position, rounds.draft_tokens, rounds.draft_logprobs, strict=True
        ):
            num_rounds += 1
            logprobs_KD = _chain_logprobs(draft, trace, int(position), tokens.tolist())
            proposed_K = draft_ids_V[torch.from_numpy(tokens).long()]
            same += (logprobs_KD.argmax(-1) == proposed_K).numpy()
            ours_K = logprobs_KD.gather(-1, proposed_K[:, None].long())[:, 0]
            for step, difference in enumerate((ours_K - torch.from_numpy(behaviour).float()).abs().tolist()):
                differences[step].append(difference)
    assert num_rounds > 20
    assert (same / num_rounds > 0.9).all(), same
    assert all(float(np.median(of_step)) < 0.05 for of_step in differences)


@torch.no_grad()
def _chain_logprobs(draft: Eagle3Draft, trace: Trace, position: int, proposals: Sequence[int]) -> Tensor:
    """[K, D] log-probabilities along a recorded chain behind the token at `position`, everything computed anew."""
    fused = draft.fuse(trace.aux_hidden[:position])
    tokens = torch.tensor([*trace.token_ids[1 : position + 1].tolist(), *proposals])
    logprobs = []
    for _ in proposals:
        read = torch.arange(len(fused))
        output = draft(tokens[None, : len(fused)], fused[None], read[None], _attend_causally)[0, -1:]
        logprobs.append(draft.logits(output[0]).log_softmax(-1))
        fused = torch.cat([fused, output])
    return torch.stack(logprobs)


def _attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_who_opts_out_leaves_no_trace(plugged: Plugged, traces: dict[str, Trace]) -> None:
    silent = {"slipstream": {"capture": False}}
    named = {"slipstream": {"capture": True, "tenant": "acme", "group_id": "g1", "domain": "geography"}}
    ids = plugged.ids("What is the longest river of Africa?")
    plugged.server.generate(ids, max_new_tokens=8, custom_params=silent)
    asked_ms = now_ms()
    answer = plugged.server.generate(ids, max_new_tokens=8, custom_params=named)
    answered_ms = now_ms()
    header = next(iter(plugged.traces(1).values())).header
    assert header.request_id == answer["meta_info"]["id"]
    assert (header.tenant, header.group_id, header.domain) == ("acme", "g1", "geography")
    assert asked_ms - 100 <= header.created_ms <= answered_ms, "by SGLang's clock"
    assert plugged.stream.read(1, 200) == []


def test_a_one_token_answer_teaches_nothing(plugged: Plugged, traces: dict[str, Trace]) -> None:
    before = nothing_computed(plugged.report())
    plugged.server.generate(plugged.ids("Say yes."), max_new_tokens=1)
    plugged.wait_for(lambda report: nothing_computed(report) == before + 1)


def test_a_prompt_longer_than_the_window_is_cut_and_others_go_on(plugged: Plugged, traces: dict[str, Trace]) -> None:
    words = " ".join(f"number {index}" for index in range(250))  # three windows
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(plugged.server.generate, plugged.ids(words), max_new_tokens=8)
        short = pool.submit(plugged.server.generate, plugged.ids("Who painted the Mona Lisa?"), max_new_tokens=8)
        long_id, short_id = long.result()["meta_info"]["id"], short.result()["meta_info"]["id"]
    found = plugged.traces(2)
    prompt = found[long_id].header.num_prompt_tokens
    assert prompt > 600
    assert found[long_id].header.first_position == prompt - 200
    assert found[short_id].num_tokens < 200


def test_an_aborted_request_leaves_nothing(plugged: Plugged, traces: dict[str, Trace]) -> None:
    dropped = int(plugged.report()["dropped"])
    chunks = plugged.server.stream(plugged.ids("Tell me a very long story about a dragon."), max_new_tokens=400)
    next(chunks)
    chunks.close()
    report = plugged.wait_for(lambda report: int(report["dropped"]) == dropped + 1)
    assert "aborted=" in report["dropped_by_reason"]
    assert plugged.stream.read(1, 200) == []


def test_sampling_and_constraints_are_recorded(plugged: Plugged, traces: dict[str, Trace]) -> None:
    ids = plugged.ids("Invent a name for a cat.")
    plugged.server.generate(ids, max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=40)
    (free,) = plugged.traces(1).values()
    assert (free.header.sampling.temperature, free.header.sampling.top_p, free.header.sampling.top_k) == (0.7, 0.9, 40)
    assert not free.constrained.any()
    before = nothing_computed(plugged.report())
    plugged.server.generate(ids, max_new_tokens=6, min_p=0.5)
    plugged.wait_for(lambda report: nothing_computed(report) == before + 1)
    penalised = plugged.server.generate(ids, max_new_tokens=24, frequency_penalty=1.5)
    ((_, trace),) = plugged.traces(1).items()
    served = penalised["output_ids"]
    assert trace.target_topk_ids[-len(served) :, 0].tolist() == served, "the labels have the penalties"
    assert served != plugged.server.generate(ids, max_new_tokens=24)["output_ids"]
    assert len(plugged.traces(1)) == 1
    assert plugged.stream.read(1, 200) == []


def test_the_number_of_requests_that_somebody_gave_is_kept(plugged: Plugged) -> None:
    assert plugged.server.max_running_requests() == 8


def test_the_accounts_add_up(plugged: Plugged, traces: dict[str, Trace]) -> None:
    report = plugged.wait_for(lambda report: report["pending"] == "0")
    # Of those without a token to learn from some are only found to be so once they are captured.
    num_appended = int(report["appended"])
    assert num_appended <= int(report["captured"]) <= num_appended + nothing_computed(report)
    assert report["failures"] == ""
