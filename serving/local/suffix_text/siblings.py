"""What a request can take of a running sample of the same prompt group."""

from __future__ import annotations

from collections.abc import Sequence

from serving.local.request import Generation


def longest_prefix(generation: Generation, running: Sequence[Generation], *, prompt_labels: int) -> tuple[int, int]:
    """The slot of the running sibling that has read most of the prompt, and how much: all but the last token counts."""
    policy, best = generation.request.policy, (0, 0)
    # Who opts out of capture leaves nothing for other requests.
    if not (policy.group_id and policy.capture):
        return best
    for slot, sibling in enumerate(running):
        if sibling.lends_prompt and sibling.request.policy == policy and sibling.capture == generation.capture:
            found = slot, _common(generation, sibling, prompt_labels)
            best = max(best, found, key=lambda one: (one[1], running[one[0]].lends_pairs))
    return best


def _common(generation: Generation, sibling: Generation, prompt_labels: int) -> int:
    prompt = generation.tokens
    most = min(len(prompt), len(sibling.tokens)) - 1
    if generation.capture and sibling.request.prompt_token_ids != generation.request.prompt_token_ids:
        # What is kept of a prompt's end is not what was kept of the sibling's.
        most = min(most, max(0, len(prompt) - prompt_labels))
    pairs = enumerate(zip(prompt[:most], sibling.tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), most)
