"""Plain decoding: the local engine at depth 0 beside Hugging Face `generate`, interleaved in one run.

    python -m benchmarks.local_engine [--quick] [--json FILE] [--prompts FILE.jsonl] [--threads 1 2]
                                      [--compile-target] [--int8-target]

Greedy answers of 128 tokens. Every thread count is run with both; each side is then judged at the one that it decodes
fastest with. Decoding is what comes after an answer's first token; with the prompt, the whole answer. Eight requests
run on the first thread count, and are compared with one request on the same.

Targets: depth 0 decodes at least twice as fast as `generate`; 8 requests get at least 4 × the tokens of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import Spread, Target, finish, parser, pick_prompts
from benchmarks.engines import add_target_options, greedy, local_engine, stream, target_settings
from serving.local.engine import LocalEngine
from slipstream.models import resolve_model

NUM_TOKENS = 128
ONE, EIGHT, GENERATE = "local engine, 1 request", "local engine, 8 requests", "Hugging Face generate"

Rates = defaultdict[tuple[str, int], list[float]]
"""Tokens a second by what ran and its number of threads."""


def main() -> None:
    options = parser("Depth 0 of the local engine against Hugging Face generate")
    options.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    add_target_options(options)
    arguments = options.parse_args()
    model_dir = resolve_model(arguments.model)
    repeats = 2 if arguments.quick else 5
    prompts = _prompts(model_dir, arguments.prompts, 8 * repeats)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    decoding, whole = Rates(list), Rates(list)
    with contextlib.ExitStack() as stack:
        engines = {
            threads: stack.enter_context(
                local_engine(model_dir, depth=0, num_threads=threads, **target_settings(arguments))
            )
            for threads in arguments.threads
        }
        for threads, engine in engines.items():
            torch.set_num_threads(threads)
            _generate(reference, prompts[0][:64], num_tokens=8)
            greedy(engine, [prompt[:64] for prompt in prompts[:8]], 8)
        for repeat in range(repeats):
            batch = prompts[8 * repeat : 8 * repeat + 8]
            for threads, engine in engines.items():
                torch.set_num_threads(threads)
                one = {GENERATE: _generate(reference, batch[0]), ONE: asyncio.run(_answer(engine, batch[0]))}
                for kind, (decoded, answered) in one.items():
                    decoding[kind, threads].append(decoded)
                    whole[kind, threads].append(answered)
            threads = arguments.threads[0]
            whole[EIGHT, threads].append(_together(engines[threads], batch))
            print(f"repeat {repeat + 1} of {repeats}", flush=True)
    _finish(decoding, whole, repeats, arguments)


def _prompts(model_dir: Path, path: Path | None, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=False
        )[:512]
        for prompt in pick_prompts(path, count)
    ]


def _rates(started_s: float, tokens_s: Sequence[float]) -> tuple[float, float]:
    """Tokens a second of decoding and of the whole answer, from the times at which its tokens came."""
    first, last = tokens_s[0], tokens_s[-1]
    return (len(tokens_s) - 1) / (last - first), len(tokens_s) / (last - started_s)


def _generate(reference: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> tuple[float, float]:
    tokens_s: list[float] = []

    def note_time(ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        tokens_s.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    started_s = time.perf_counter()
    with torch.inference_mode():
        reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
    return _rates(started_s, tokens_s)


async def _answer(engine: LocalEngine, prompt: list[int]) -> tuple[float, float]:
    started_s = time.perf_counter()
    tokens_s = [time.perf_counter() async for _ in stream(engine, "one", prompt, NUM_TOKENS)]
    assert len(tokens_s) == NUM_TOKENS, "at depth 0 every chunk is one token"
    return _rates(started_s, tokens_s)


def _together(engine: LocalEngine, prompts: list[list[int]]) -> float:
    """Tokens a second of whole answers: prompts are read while others decode."""
    started_s = time.perf_counter()
    greedy(engine, prompts, NUM_TOKENS)
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - started_s)


def _finish(decoding: Rates, whole: Rates, repeats: int, arguments: Any) -> None:
    rows: list[tuple[str, object]] = [
        (f"token/s, {NUM_TOKENS} tokens, {repeats} repeats", "median    (min … max)"),
    ]
    document: dict[str, Any] = {"repeats": repeats}
    for part, rates in (("decoding", decoding), ("whole answers", whole)):
        spreads = {f"{kind}, {threads} threads: {part}": Spread.of(values) for (kind, threads), values in rates.items()}
        rows += spreads.items()
        document |= {name: spread.to_dict() for name, spread in spreads.items()}
    ours, theirs = (
        max(arguments.threads, key=lambda threads: Spread.of(decoding[kind, threads]).median)
        for kind in (ONE, GENERATE)
    )
    ratios = {
        "depth 0 over generate, decoding": _ratio(decoding[ONE, ours], decoding[GENERATE, theirs]),
        "depth 0 over generate, whole answers": _ratio(whole[ONE, ours], whole[GENERATE, theirs]),
        "8 requests over one, whole answers": _ratio(
            whole[EIGHT, arguments.threads[0]], whole[ONE, arguments.threads[0]]
        ),
    }
    rows += [("threads of either at its best", f"ours {ours}, generate {theirs}"), *ratios.items()]
    document |= {"best_threads": {"ours": ours, "generate": theirs}}
    document["ratios"] = {name: spread.to_dict() for name, spread in ratios.items()}
    over_generate, _, scaling = ratios.values()
    targets = [Target("depth0_over_generate", over_generate.median, 2.0), Target("8_over_1", scaling.median, 4.0)]
    finish(rows, targets, document, arguments.json)


def _ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    return Spread.of([one / other for one, other in zip(above, below, strict=True)])


if __name__ == "__main__":
    main()
