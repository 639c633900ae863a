"""Where greedy texts with and without speculation part in bfloat16, and how close the two best logits are there.

    python -m benchmarks.lossless_bf16 [--quick] [--json FILE] [--prompts FILE.jsonl] [--store DRAFTS]
                                       [--compile-target] [--int8-target]

In exact arithmetic the texts are equal (tests/serving/local/test_lossless.py, float64), and where the engine computes
with its own kernels (serving/local/kernels) they are in any. Elsewhere the same position computed in bfloat16 in a
pass of one token and in a pass of several rounds differently; that noise is measured here on the same texts. Target:
wherever texts part, the gap between the two best logits is within the measured noise. Without noise no text may part.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Spread, Target, finish, parser, pick_prompts
from benchmarks.engines import add_target_options, greedy, local_engine, target_settings
from serving.local.kernels.library import compute_with
from serving.local.target import Target as TargetModel
from slipstream.models import resolve_model

DEPTH = 5
NUM_TOKENS = 128


def main() -> None:
    options = parser("Greedy text with and without speculation in bfloat16")
    options.add_argument("--store", type=Path, help="draft store of a demo or trainer; default: a fresh draft")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    add_target_options(options)
    arguments = options.parse_args()
    model_dir = resolve_model(arguments.model)
    num_prompts = 8 if arguments.quick else 32
    texts: dict[int, list[list[int]]] = {}
    for depth in (0, DEPTH):
        with local_engine(
            model_dir, depth=depth, num_threads=arguments.threads, store=arguments.store, **target_settings(arguments)
        ) as engine:
            prompts = [
                engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])[:512]
                for prompt in pick_prompts(arguments.prompts, num_prompts)
            ]
            texts[depth] = [greedy(engine, [prompt], NUM_TOKENS)[0] for prompt in prompts]

    torch.set_num_threads(arguments.threads)
    compute_with(arguments.threads)
    target = TargetModel(
        model_dir,
        num_slots=1,
        context_length=1024,
        cache_margin=1,
        compile_threads=arguments.threads if arguments.compile_target else None,
        int8=arguments.int8_target,
    )
    noise, gaps = [], []
    for prompt, plain, drafted in zip(prompts, texts[0], texts[DEPTH], strict=True):
        single, several = (_logits(target, prompt, plain, width) for width in (1, DEPTH + 1))
        best_two = single.topk(2, -1).indices
        gap, other_gap = (logits.gather(-1, best_two).diff(dim=-1)[:, 0].neg() for logits in (single, several))
        noise += (gap - other_gap).abs().tolist()
        parted = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
        if parted is not None:
            gaps.append(float(gap[parted]))

    noise_spread = Spread.of(noise)
    widest = max(gaps, default=0.0)
    finish(
        [
            (f"{num_prompts} prompts × {NUM_TOKENS} tokens, depth {DEPTH}", ""),
            ("texts that part", f"{len(gaps)} of {num_prompts}"),
            ("noise of the gap between the two best logits", noise_spread),
            ("widest gap where texts part", f"{widest:8.3f}"),
        ],
        [Target("widest_gap_within_noise", widest, noise_spread.high, at_least=False)],
        {
            "prompts": num_prompts,
            "parted": len(gaps),
            "gaps_at_parting": [round(gap, 4) for gap in gaps],
            "noise": noise_spread.to_dict(),
        },
        arguments.json,
    )


@torch.inference_mode()
def _logits(target: TargetModel, prompt: list[int], answer: list[int], width: int) -> Tensor:
    """The logits [T, V] before each of the T answer tokens, read in passes of `width` tokens."""
    target.forward(torch.tensor([prompt[:-1]]), first_slot=0, starts=[0])
    tokens, rows = [prompt[-1], *answer[:-1]], []
    for start in range(0, len(tokens), width):
        chunk = torch.tensor([tokens[start : start + width]])
        hidden, _ = target.forward(chunk, first_slot=0, starts=[len(prompt) - 1 + start])
        rows.append(target.logits(hidden[0]).float())
    return torch.cat(rows)


if __name__ == "__main__":
    main()
