"""What 8 bits change: the target's choices and distributions in bfloat16 and with int8 layers, beside float32.

    python -m benchmarks.int8 [--quick] [--json FILE] [--prompts FILE.jsonl]

Prompts in the model's chat template, each token given those before it. Printed are, for both, the share of positions
where the likeliest token is float32's, the Kullback-Leibler divergence from float32 and the mean loss of the next
token. There is no target: the option is for those who want the speed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import finish, parser, pick_prompts
from serving.local.target import Target as TargetModel
from slipstream.models import resolve_model

CONTEXT = 512


def main() -> None:
    arguments = parser("A target in 8 bits beside bfloat16").parse_args()
    model_dir = resolve_model(arguments.model)
    num_prompts = 16 if arguments.quick else 128
    texts = _texts(model_dir, arguments.prompts, num_prompts)
    num_tokens = sum(map(len, texts))
    exact = TargetModel(model_dir, num_slots=1, context_length=CONTEXT, cache_margin=1, dtype=torch.float32)
    rows: list[tuple[str, object]] = [(f"{num_prompts} prompts, {num_tokens} tokens", "")]
    document: dict[str, object] = {"prompts": num_prompts, "tokens": num_tokens}
    for kind, int8 in (("bfloat16", False), ("int8", True)):
        target = TargetModel(model_dir, num_slots=1, context_length=CONTEXT, cache_margin=1, int8=int8)
        sums = torch.stack([_compared(exact, target, text) for text in texts]).sum(0)
        counts = torch.tensor([num_tokens, num_tokens, num_tokens - len(texts), num_tokens - len(texts)])
        same, divergence, loss, exact_loss = (sums / counts).tolist()
        rows += [
            (f"{kind}: same likeliest token as float32", f"{same:8.4f}"),
            (f"{kind}: divergence from float32, nats", f"{divergence:8.4f}"),
            (f"{kind}: loss of the next token (float32), nats", f"{loss:8.4f}  ({exact_loss:.4f})"),
        ]
        document[kind] = {"same_choice": same, "kl": divergence, "loss": loss, "float32_loss": exact_loss}
    finish(rows, [], document, arguments.json)


def _texts(model_dir: Path, path: Path | None, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}], return_dict=False)[:CONTEXT]
        for prompt in pick_prompts(path, count)
    ]


def _compared(exact: TargetModel, target: TargetModel, text: list[int]) -> Tensor:
    """Sums over the positions: same choice, divergence, loss, loss of the exact one; float64 [4]."""
    theirs, ours = (_log_probs(model, text) for model in (exact, target))
    same = theirs.argmax(-1) == ours.argmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    following = torch.tensor(text[1:])[:, None]
    losses = [-log_probs[:-1].gather(1, following).sum() for log_probs in (ours, theirs)]
    return torch.stack([same.sum(), divergence.sum(), *losses]).double()


@torch.inference_mode()
def _log_probs(target: TargetModel, text: list[int]) -> Tensor:
    """[T, V] in float32."""
    hidden, _ = target.forward(torch.tensor([text]), first_slot=0, starts=[0])
    return target.logits(hidden[0]).float().log_softmax(-1)


if __name__ == "__main__":
    main()
