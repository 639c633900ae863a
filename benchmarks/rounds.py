"""What a decode round costs by batch size and depth, every proposal verified: the price that acceptance has to pay.

python -m benchmarks.rounds [--quick] [--json FILE] [--prompts FILE.jsonl] [--threads 1]
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.common import finish, parser, pick_prompts
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.draft import ServingDraft
from serving.local.generation import Generation
from serving.local.kernels.library import compute_with
from serving.local.prompts import Piece
from serving.local.rounds import RoundRunner
from serving.local.target import Target
from serving.local.text import AnswerText, LocalTokenizer
from slipstream.models import resolve_model
from speculator.fixed_planner import FixedPlanner
from speculator.fresh import fresh_draft
from speculator.sampling import SamplingParams

DEPTHS = (0, 1, 2, 3, 4)
BATCHES = (1, 2, 4, 8)


def main() -> None:
    options = parser("Cost of a decode round")
    options.add_argument("--threads", type=int, default=1, help="the demo's engine has one")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    compute_with(arguments.threads)
    repeats = 8 if arguments.quick else 25
    model_dir = resolve_model(arguments.model)
    prompts = [prompt.text for prompt in pick_prompts(arguments.prompts, max(BATCHES))]
    costs_ms = {batch: _measure(model_dir, prompts[:batch], repeats) for batch in BATCHES}
    rows: list[tuple[str, object]] = [("batch", "".join(f"{f'depth {depth}':>18}" for depth in DEPTHS))]
    for batch, row in costs_ms.items():
        cells = (f"{row[depth]:10.1f} ({row[depth] / row[0]:.2f}×)" for depth in DEPTHS)
        rows.append((str(batch), "".join(f"{cell:>18}" for cell in cells)))
    document = {"threads": arguments.threads, "repeats": repeats, "median_ms": costs_ms}
    finish(rows, [], document, arguments.json)


def _measure(model_dir: Path, prompts: list[str], repeats: int) -> dict[int, float]:
    """Median milliseconds of a round of all prompts by depth, depths interleaved."""
    target = Target(model_dir, num_slots=len(prompts), context_length=2048, cache_margin=max(DEPTHS) + 1)
    draft = fresh_draft(model_dir, seed=0).to(torch.bfloat16)
    serving = ServingDraft(draft, 1, num_slots=len(prompts), length=2048 + max(DEPTHS) + 1)
    runner = RoundRunner(
        target,
        serving,
        FixedPlanner(0.0),
        suffix_depth=0,
        capture_topk=64,
        prompt_labels=0,
        label=lambda *_: None,
        send=lambda: None,
    )
    tokenizer = LocalTokenizer(model_dir)
    generations = []
    for slot, prompt in enumerate(prompts):
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])[-256:]
        request = GenerateRequest(
            request_id=str(slot),
            prompt_token_ids=tuple(ids),
            max_tokens=1000,
            sampling=SamplingParams(temperature=0),
            policy=CapturePolicy(),
        )
        generation = Generation(request, AnswerText(tokenizer, ()), lambda _: None, frozenset(), capture=True)
        while generation.num_prefilled < generation.num_prompt_tokens:
            runner.prefill(Piece.next_of(generation, slot, 64), drafting=True)
        generations.append(generation)
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(repeats):
        for depth in DEPTHS:
            seconds[depth].append(runner.run(generations, depth).seconds)
    return {depth: round(1000 * statistics.median(values[2:]), 2) for depth, values in seconds.items()}


if __name__ == "__main__":
    main()
