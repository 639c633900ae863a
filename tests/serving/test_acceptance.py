"""What became of proposals, of one answer and by length."""

from __future__ import annotations

import random

from serving.acceptance import BEYOND, LENGTHS, Acceptance, AcceptanceByLength


def test_an_answers_acceptance_adds_up() -> None:
    first, second = Acceptance(), Acceptance()
    for proposed, accepted in ((3, 0), (3, 3), (8, 5), (0, 0)):
        first.add(proposed, accepted)
    second.add(2, 1)
    assert Acceptance.over([first, second, Acceptance()]).metrics()["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 9 / 5,
        "draft_acceptance_rate": 9 / 16,
        "acceptance_histogram": [2, 1, 0, 1, 0, 1],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 9,
        "num_draft_tokens": 16,
    }
    assert Acceptance.over([first, second]).usage_details() == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 9,
        "rejected_prediction_tokens": 7,
    }
    assert first.histogram == [2, 0, 0, 1, 0, 1], "a sum leaves its parts alone"


def test_an_answer_without_a_verification_has_figures_all_the_same() -> None:
    assert Acceptance().metrics()["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
    }


def test_verifications_are_counted_where_they_stand() -> None:
    rng, by_length = random.Random(0), AcceptanceByLength()
    seen: dict[tuple[str, ...], list[int]] = {}
    for _ in range(50):
        source = rng.choice(("head", "suffix"))
        rows = [(rng.choice((1, 512, 513, 9000, 40_000)), rng.choice((0, 32, 33, 9000)), rng.randint(1, 9))] * 3
        by_length.add(source, *zip(*rows, strict=True))
        for context, answer, committed in rows:
            for of, length in (("context", context), ("answer", answer)):
                name = next((str(bound) for bound in LENGTHS[of] if length <= bound), BEYOND)
                seen.setdefault((source, of, name), []).append(committed)
    assert by_length.verifications() == {key: len(tokens) for key, tokens in seen.items()}
    assert by_length.tokens() == {key: sum(tokens) for key, tokens in seen.items()}
    assert ("head", "context", "1024") in seen
