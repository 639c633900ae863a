"""Traces of a real, if tiny, target: what an engine would have recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import LlamaForCausalLM

from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.eagle3 import aux_layer_ids
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import NO_DRAFT, Trace, TraceHeader, VerifyRounds

PROMPT_TOKENS, ANSWER_TOKENS, TOP_K = 6, 40, 16


def answer_traces(model_dir: Path, *, num_traces: int, seed: int = 0) -> list[Trace]:
    """Greedy answers to random prompts; the last token of each is left out, as nothing has read it."""
    model = LlamaForCausalLM.from_pretrained(model_dir).eval()
    fingerprint = target_fingerprint(model_dir)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(6, model.config.vocab_size, (num_traces, PROMPT_TOKENS), generator=generator)
    token_ids = prompts
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            token_ids = torch.cat([token_ids, model(token_ids).logits[:, -1:].argmax(-1)], 1)
        output = model(token_ids, output_hidden_states=True)
    aux = torch.cat([output.hidden_states[layer] for layer in aux_layer_ids(8)], -1).bfloat16()
    top = output.logits.log_softmax(-1).topk(TOP_K, -1)
    ids, logprobs = top.indices.int().numpy(), top.values.half().numpy()
    ids[:, : PROMPT_TOKENS - 1], logprobs[:, : PROMPT_TOKENS - 1] = -1, -np.inf
    return [
        Trace(
            header=TraceHeader(
                trace_id=f"trace-{index}",
                request_id=f"request-{index}",
                engine_id="engine-0",
                target_fingerprint=fingerprint,
                num_prompt_tokens=PROMPT_TOKENS,
                first_position=0,
                created_ms=1_700_000_000_000,
                sampling=SamplingParams(temperature=0.0),
            ),
            token_ids=token_ids[index].numpy().astype(np.int32),
            aux_hidden=aux[index].clone(),
            target_topk_ids=ids[index],
            target_topk_logprobs=logprobs[index],
            constrained=np.zeros(token_ids.shape[1], np.bool_),
            rounds=no_rounds(),
        )
        for index in range(num_traces)
    ]


def no_rounds() -> VerifyRounds:
    return VerifyRounds(
        position=np.zeros(0, np.int32),
        draft_tokens=np.zeros((0, 1), np.int32),
        draft_logprobs=np.zeros((0, 1), np.float16),
        draft_parents=np.zeros((0, 1), np.int8),
        num_accepted=np.zeros(0, np.int8),
        draft_version=np.zeros(0, np.int32),
    )


def by_text(trace: Trace) -> Trace:
    """An answer all of whose tokens were proposed from earlier text, three at a time."""
    starts = np.arange(PROMPT_TOKENS, len(trace.token_ids) - 4, 4)
    shape = (len(starts), 3)
    rounds = VerifyRounds(
        position=starts.astype(np.int32),
        draft_tokens=np.stack([trace.token_ids[start + 1 : start + 4] for start in starts]),
        draft_logprobs=np.zeros(shape, np.float16),
        draft_parents=np.broadcast_to(np.arange(-1, 2, dtype=np.int8), shape).copy(),
        num_accepted=np.full(len(starts), 3, np.int8),
        draft_version=np.full(len(starts), NO_DRAFT, np.int32),
    )
    return dataclasses.replace(trace, rounds=rounds)


def renamed(trace: Trace, trace_id: str, **header: str | bool) -> Trace:
    return dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, trace_id=trace_id, **header))


def different(trace: Trace, number: int) -> Trace:
    """The same answer to another prompt."""
    token_ids = trace.token_ids.copy()
    token_ids[0] = number
    return dataclasses.replace(renamed(trace, f"flood-{number}", tenant="flood"), token_ids=token_ids)
