"""A task that a model of 135M parameters learns within minutes: answer a sum with the number alone."""

from __future__ import annotations

import random
import re
from typing import Any

from datasets import Dataset

_NUMBER = re.compile(r"\d+")


def make_sums(count: int, *, seed: int) -> Dataset:
    """`count` rows with a chat as `prompt` and the sum as `answer`."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = drawn.randint(1, 9), drawn.randint(1, 9)
        rows.append({"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def score(text: str, answer: str) -> float:
    """Reward: 1 for the right number alone, less with words around it, at most 0.2 for a wrong number."""
    numbers = _NUMBER.findall(text)
    is_right = answer in numbers
    brevity = 1 / (1 + 0.1 * len(text.strip().removesuffix(".").replace(answer, "", 1)))
    if is_right and numbers[-1] == answer:
        return 0.4 + 0.6 * brevity
    return 0.2 * brevity if numbers else 0.0


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """TRL's reward function: `score` of each completion."""
    return [score(said[0]["content"], right) for said, right in zip(completions, answer, strict=True)]
