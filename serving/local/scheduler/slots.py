"""Which request has which place in the caches, and what it can take of a running sample of the same prompt group.

Running requests fill slots 0…n−1; the one that is being prefilled, if any, sits in slot n.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.local.decode.rounds import RoundRunner
from serving.local.request import ActiveRequest


class Slots:
    """Used by the engine's thread; others may read how many there are."""

    def __init__(self, runner: RoundRunner, *, num_slots: int, prompt_labels: int) -> None:
        self._runner, self._num_slots, self._prompt_labels = runner, num_slots, prompt_labels
        self.running: list[ActiveRequest] = []
        self.prefilling: ActiveRequest | None = None

    @property
    def everybody(self) -> list[ActiveRequest]:
        return [*self.running, *([self.prefilling] if self.prefilling else [])]

    @property
    def can_admit(self) -> bool:
        """One prompt is read at a time."""
        return self.prefilling is None and len(self.running) < self._num_slots

    def admit(self, generation: ActiveRequest) -> None:
        """Its prompt is read next, but for what a running sample of the same group has read of it."""
        self.prefilling = generation
        slot, length = longest_prefix(generation, self.running, prompt_labels=self._prompt_labels)
        if length > 0:
            self._copy_prefix(generation, slot, length)

    def _copy_prefix(self, generation: ActiveRequest, slot: int, length: int) -> None:
        """Where the whole prompt is there, its last token is pending and the sample decodes."""
        sibling, last = self.running[slot], generation.num_prompt_tokens - 1
        self._runner.move_slot(slot, len(self.running), generation)
        # A pair needs the token after it.
        generation.num_pairs_read = min(sibling.num_pairs_read, length - 1) if sibling.can_share_draft_kv else 0
        if sibling.request.prompt_token_ids == generation.request.prompt_token_ids:
            generation.topk = [top.before(length) for top in sibling.topk if top.position < length]
        generation.num_prefilled = length
        if length == last:
            self.start_decoding()

    def start_decoding(self) -> None:
        """The prompt has been read: its slot is the next of the running ones."""
        if self.prefilling is not None:
            self.running.append(self.prefilling)
            self.prefilling = None

    def free(self, generation: ActiveRequest) -> None:
        """Close the gap: the last running request moves into the freed slot, the prefilling one follows."""
        slot, last = self.running.index(generation), len(self.running) - 1
        if slot != last:
            self.running[slot] = self.running[last]
            self._runner.move_slot(last, slot, self.running[slot])
        self.running.pop()
        if self.prefilling is not None:
            self._runner.move_slot(last + 1, last, self.prefilling)

    def drop_aborted(self) -> int:
        """How many clients have left."""
        gone = [generation for generation in self.everybody if generation.aborted]
        for generation in gone:
            if generation is self.prefilling:
                self.prefilling = None
            else:
                self.free(generation)
        return len(gone)


def longest_prefix(
    generation: ActiveRequest, running: Sequence[ActiveRequest], *, prompt_labels: int
) -> tuple[int, int]:
    """The slot of the running sibling that has read most of the prompt, and how much: all but the last token counts."""
    policy, best = generation.request.policy, (0, 0)
    # Who opts out of capture leaves nothing for other requests.
    if not (policy.group_id and policy.capture):
        return best
    for slot, sibling in enumerate(running):
        if sibling.can_share_prefix_kv and sibling.request.policy == policy and sibling.capture == generation.capture:
            found = slot, _common(generation, sibling, prompt_labels)
            best = max(best, found, key=lambda one: (one[1], running[one[0]].can_share_draft_kv))
    return best


def _common(generation: ActiveRequest, sibling: ActiveRequest, prompt_labels: int) -> int:
    prompt = generation.tokens
    most = min(len(prompt), len(sibling.tokens)) - 1
    if generation.capture and sibling.request.prompt_token_ids != generation.request.prompt_token_ids:
        # What is kept of a prompt's end is not what was kept of the sibling's.
        most = min(most, max(0, len(prompt) - prompt_labels))
    pairs = enumerate(zip(prompt[:most], sibling.tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), most)
