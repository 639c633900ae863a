"""Plain decoding: the local engine at depth 0 beside Hugging Face `generate`, interleaved in one run.

    python -m benchmarks.local_engine [--quick] [--json FILE] [--prompts FILE.jsonl]

Targets: depth 0 at least as fast as `generate` (batch 1, greedy, 128 tokens); 8 requests at least 3 × one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import Spread, Target, finish, parser, pick_prompts
from benchmarks.engines import greedy, local_engine
from slipstream.models import resolve_model

NUM_TOKENS = 128


def main() -> None:
    options = parser("Depth 0 of the local engine against Hugging Face generate")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = options.parse_args()
    model_dir = resolve_model(arguments.model)
    repeats = 3 if arguments.quick else 7
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=False
        )[:512]
        for prompt in pick_prompts(arguments.prompts, 8 * repeats)
    ]
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()

    def generate(prompt: list[int]) -> None:
        with torch.inference_mode():
            reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )

    rates: dict[str, list[float]] = {"generate": [], "one": [], "eight": []}
    with local_engine(model_dir, depth=0, num_threads=arguments.threads) as engine:
        generate(prompts[0])
        greedy(engine, prompts[:1], NUM_TOKENS)
        for repeat in range(repeats):
            batch = prompts[8 * repeat : 8 * repeat + 8]
            rates["generate"].append(_rate(NUM_TOKENS, lambda batch=batch: generate(batch[0])))
            rates["one"].append(_rate(NUM_TOKENS, lambda batch=batch: greedy(engine, batch[:1], NUM_TOKENS)))
            rates["eight"].append(_rate(8 * NUM_TOKENS, lambda batch=batch: greedy(engine, batch, NUM_TOKENS)))

    ratio = Spread.of([one / theirs for one, theirs in zip(rates["one"], rates["generate"], strict=True)])
    scaling = Spread.of([eight / one for eight, one in zip(rates["eight"], rates["one"], strict=True)])
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    finish(
        [
            (f"threads {arguments.threads}, {NUM_TOKENS} tokens, {repeats} repeats", "median    (min … max)"),
            ("Hugging Face generate, token/s", spreads["generate"]),
            ("local engine depth 0, token/s", spreads["one"]),
            ("local engine, 8 requests, token/s", spreads["eight"]),
            ("depth 0 over generate", ratio),
            ("8 requests over one", scaling),
        ],
        [Target("depth0_over_generate", ratio.median, 1.0), Target("eight_over_one", scaling.median, 3.0)],
        {
            "threads": arguments.threads,
            "repeats": repeats,
            "tokens_per_s": {name: spread.to_dict() for name, spread in spreads.items()},
            "depth0_over_generate": ratio.to_dict(),
            "eight_over_one": scaling.to_dict(),
        },
        arguments.json,
    )


def _rate(num_tokens: int, run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return num_tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
