"""Suffix drafts of the requests of one scheduler: how earlier text says that theirs goes on.

`RememberedText` follows each request's answer as SGLang commits it. Before each decode step it looks for continuations
in the request's own prompt and answer, in its prompt group, and in its tenant's other requests
(serving/sglang/proposals/chain_drafter.py). With `GroupSharing` the group includes the text of other engines.

Where SGLang overlaps steps, a thread of its own looks while the device computes: once the scheduler has processed the
result of a step, and before it launches the next one. The device is then a step ahead, so a continuation begins before
the newest token. It is proposed if the tokens since then match it (serving/sglang/proposals/splice.py). A step does not
wait for the thread: it takes the newest result. Without overlap the scheduler looks itself, and knows all tokens.

A request that opts out of capture, or lacks a policy where all must have one, is continued from its own text alone and
leaves no text for others.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from serving.group_cache.sync import GroupSharing, Publish
from serving.group_cache.texts import GroupKey
from serving.sglang.capture.device_reads import LEAST_PROBABILITY
from serving.sglang.capture.request import has_metadata, is_health_check, policy_of
from serving.sglang.proposals.chain_drafter import ChainDrafter
from speculator.proposals.suffix_drafter import MAX_MATCH, TENANT_WINDOW

_ATTRIBUTE = "_slipstream_text"
_COUNT_EVERY = 64
"""Lookups between two counts of the kept tokens."""
_MOST_JOBS = 4
_CLOSING_S = 5.0
_NO_TEXT = -1


def text_width(depth: int, *, overlaps: bool) -> int:
    """Most tokens of a continuation, where a step proposes at most `depth`.

    With overlap the device is a step ahead, and may have committed `depth` + 1 tokens by then.
    """
    return 2 * depth + 1 if overlaps else depth


def ring_size(width: int) -> int:
    """How many tokens of each request `CommittedTokens` keeps, for continuations of at most `width` tokens.

    They reach back to where a continuation begins, and ahead to where a verification writes tokens that it may reject.
    """
    return 2 * (width + 1)


class _Followed:
    """One request's text, as far as it was read."""

    def __init__(self, slot: int = _NO_TEXT, publish: Publish | None = None) -> None:
        """`publish` takes new tokens, for the drafts of other engines."""
        self.slot, self.publish, self.num_read = slot, publish, 0
        """Tokens of the answer that were read."""


@dataclass(eq=False)
class Continuations:
    """Continuations of the texts of a batch: what earlier text proposes for each request."""

    tokens: np.ndarray
    """[B, W] of each request."""
    probabilities: np.ndarray
    """[B, W] the probability that each is accepted, once reached."""
    counts: np.ndarray
    """[B] the number of tokens of each."""
    first: np.ndarray
    """[B] the position of its first token."""
    sources: np.ndarray
    """[B] whose text it is from, as a `TextSource`."""
    num_answered: Sequence[int]
    """The length of each request's answer at which its continuation begins."""
    expected: np.ndarray = field(init=False)
    """[B, W + 1] how many of the first ones are expected to be accepted."""
    table: np.ndarray = field(init=False)
    """[B, 2 + 3W] int64, what the device needs: how many there are, 1 − the first position, then W each of tokens,
    their log-probabilities (float32 in the lower halves), and their positions' places in `CommittedTokens`.
    """

    def __post_init__(self) -> None:
        num_rows, width = self.tokens.shape
        reaches = np.multiply.accumulate(self.probabilities, 1)
        self.expected = np.zeros((num_rows, width + 1))
        np.add.accumulate(reaches, 1, out=self.expected[:, 1:])
        self.table = np.empty((num_rows, 2 + 3 * width), np.int64)
        self.table[:, 0], self.table[:, 1] = self.counts, 1 - self.first
        tokens, logprobs, places = np.split(self.table[:, 2:], 3, axis=1)
        tokens[:] = self.tokens
        logprobs[:] = np.log(np.maximum(self.probabilities, LEAST_PROBABILITY), dtype=np.float32).view(np.uint32)
        places[:] = (self.first[:, None] + np.arange(width)) % ring_size(width)

    def packed(self) -> np.ndarray:
        """[B, 3 + 2W] int32, from which `unpacked` makes them again."""
        bits = self.probabilities.astype(np.float32).view(np.int32)
        numbers = np.stack([self.counts, self.first, self.sources], 1)
        return np.concatenate([numbers, self.tokens, bits], 1, dtype=np.int32)

    @classmethod
    def unpacked(cls, packed: np.ndarray, requests: Sequence[Any]) -> Continuations:
        """The continuations of these requests again."""
        counts, first, sources = packed[:, :3].T.astype(np.int64)
        tokens, bits = np.split(packed[:, 3:], 2, axis=1)
        answered = [int(at) - len(request.origin_input_ids) for at, request in zip(first, requests, strict=True)]
        return cls(tokens, bits.view(np.float32).astype(float), counts, first, sources, answered)

    def of(self, rows: np.ndarray) -> Continuations:
        """The continuations of these rows, none for −1."""
        is_known = rows >= 0
        return Continuations(
            self.tokens[rows],
            np.where(is_known[:, None], self.probabilities[rows], 0.0),
            np.where(is_known, self.counts[rows], 0),
            self.first[rows],
            self.sources[rows],
            [self.num_answered[row] for row in rows],
        )

    def gains(self, lengths: Sequence[int]) -> np.ndarray:
        """[B, L] how many tokens are expected to be accepted of so many proposals."""
        most = self.expected.shape[1] - 1
        return self.expected.take([min(length, most) for length in lengths], 1)

    def agree(self, requests: Sequence[Any], chosen: Sequence[bool]) -> list[bool]:
        """Which of the chosen continuations the device has proposed: those that match the tokens committed since.

        Call it when the host has the tokens that the device had then.
        """
        agreed = [False] * len(requests)
        for row, is_chosen in enumerate(chosen):
            if is_chosen:
                came = requests[row].output_ids[self.num_answered[row] :]
                has_more = len(came) < self.counts[row]
                agreed[row] = bool(has_more and list(came) == self.tokens[row, : len(came)].tolist())
        return agreed


class _Found(NamedTuple):
    continuations: Continuations
    requests: list[Any]
    """Kept alive with this, or another request could get the `id` of one that is gone."""
    ids: list[int]


class RememberedText:
    """Finds continuations for the scheduler's requests. For its thread, except where a method says otherwise."""

    def __init__(
        self,
        *,
        depth: int,
        width: int = 0,
        overlaps: bool,
        captures_unmarked: bool,
        ttl_s: float = 0.0,
        sharing: GroupSharing | None = None,
    ) -> None:
        """At most `depth` proposals a round, in arrays of at least `width`. Text that may be older than `ttl_s` is
        dropped; 0 sets no limit. `sharing` exchanges the text of prompt groups with other engines.
        """
        self._most = text_width(depth, overlaps=overlaps)
        self.width = max(self._most, width)
        self._drafter = ChainDrafter(width=self.width)
        self.sharing = sharing
        self._captures_unmarked, self._ttl_s = captures_unmarked, ttl_s
        self._looking = threading.Lock()
        """Held by who uses the drafter."""
        self._is_stopped = False
        self._ended: deque[int] = deque()
        self._num_looks = 0
        self.num_tokens = self.num_evicted = 0
        """Kept tokens, and evicted windows; may be read by any thread."""
        self._found: _Found | None = None
        self._error: Exception | None = None
        self._jobs: queue.SimpleQueue[tuple[list[Any], list[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="slipstream-text", daemon=True) if overlaps else None
        if self._thread is not None:
            self._thread.start()

    def processed(self, requests: Sequence[Any]) -> None:
        """Queue a lookup for these requests, after a step's result or at their prefill."""
        # A later lookup makes up for one that is skipped; only the ends of texts are missed.
        if self._thread is not None and requests and self._jobs.qsize() < _MOST_JOBS:
            self._jobs.put((list(requests), [len(request.output_ids) for request in requests]))

    def find(self, requests: Sequence[Any]) -> Continuations | None:
        """Continuations for these requests; None without any. Raises the error that has ended the thread."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            with self._looking:
                found = self._look_up(requests, [len(request.output_ids) for request in requests])
            return found.continuations if found.continuations.counts.any() else None
        if (newest := self._found) is None:
            return None
        ids, continuations = list(map(id, requests)), newest.continuations
        if ids != newest.ids:
            row = {one: number for number, one in enumerate(newest.ids)}
            continuations = continuations.of(np.array([row.get(one, -1) for one in ids]))
        return continuations if continuations.counts.any() else None

    def report(self) -> dict[str, int]:
        """Fields of the engine's report; for any thread."""
        return {"text_tokens": self.num_tokens, "text_evicted": self.num_evicted}

    def stop(self) -> None:
        """Drop all text, after an error; nothing may be looked up afterwards. It waits for a lookup at most.

        Groups go on ending in Redis.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        with self._looking:
            self._is_stopped = True
            self._drafter = ChainDrafter(width=self.width, arena_tokens=TENANT_WINDOW)
            # The frames of an error hold requests, too.
            self._found = self._error = None
            # The old one gets slots of the old drafter.
            self._ended = deque()
            self.num_tokens = 0

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSING_S)
        if self.sharing is not None:
            self.sharing.close(_CLOSING_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._looking:
                if self._is_stopped:
                    return
                try:
                    self._found = self._look_up(*job)
                except Exception as error:
                    self._error = error
                    return

    def _look_up(self, requests: Sequence[Any], lengths: Sequence[int]) -> _Found:
        """Look up continuations at these lengths of the answers."""
        self._tidy()
        slots, limits, first, starts = [], [], [], [0]
        committed = array("q")
        for request, length in zip(requests, lengths, strict=True):
            followed: _Followed = getattr(request, _ATTRIBUTE, None) or self._begin(request)
            if length > followed.num_read:
                came = request.output_ids[followed.num_read : length]
                committed.extend(came)
                followed.num_read = length
                if followed.publish is not None:
                    followed.publish(came)
            slots.append(followed.slot)
            starts.append(len(committed))
            # The last token of an answer is the target's own in any case.
            limits.append(min(request.sampling_params.max_new_tokens - length - 1, self._most))
            first.append(len(request.origin_input_ids) + length)
        tokens, probabilities, counts, sources = self._drafter.advance(slots, np.array(committed), starts, limits)
        continuations = Continuations(tokens, probabilities, counts, np.array(first), sources, lengths)
        return _Found(continuations, list(requests), list(map(id, requests)))

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; for any thread but those that look up."""
        # Sharing first: what it has already taken is dropped with the windows.
        if self.sharing is not None:
            self.sharing.forget(tenants)
        with self._looking:
            # The requests of the newest lookup may have ended.
            self._found = None
            self._free_ended()
            self._drafter.forget(tenants)

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a prompt group that has ended, here and in Redis; for any thread."""
        if self.sharing is not None:
            self.sharing.drop(tenant, group_id)
        with self._looking:
            self._drafter.drop(tenant, group_id)

    def expire(self) -> None:
        """Drop what is too old, also where nothing is looked up; for any thread but those that look up."""
        if self._ttl_s:
            with self._looking:
                self._drafter.expire(self._ttl_s)

    def target_updated(self, version: int) -> None:
        """Note a new version of the target; for any thread."""
        if self.sharing is not None:
            self.sharing.set_target_version(version)
        with self._looking:
            self._drafter.target_updated()

    def _free_ended(self) -> None:
        while self._ended:
            self._drafter.end(self._ended.popleft())

    def _tidy(self) -> None:
        self._free_ended()
        if self._ttl_s:
            self._drafter.expire(self._ttl_s)
        if self.sharing is not None:
            self.sharing.index_received()
        if self._num_looks % _COUNT_EVERY == 0:
            self.num_tokens = self._drafter.num_tokens
        self.num_evicted = self._drafter.num_evicted
        self._num_looks += 1

    def _begin(self, request: Any) -> _Followed:
        followed = self._follow(request)
        setattr(request, _ATTRIBUTE, followed)
        if followed.slot != _NO_TEXT:
            # The slot is freed with the request, however it ends.
            weakref.finalize(followed, self._ended.append, followed.slot).atexit = False
        return followed

    def _follow(self, request: Any) -> _Followed:
        if request.multimodal_inputs is not None or request.input_embeds is not None:
            # Placeholder tokens of images or embeddings are no text.
            return _Followed()
        if is_health_check(request):
            return _Followed()
        marks, prompt = request.sampling_params.custom_params, request.origin_input_ids
        policy = policy_of(marks)
        slot = self._drafter.start(
            prompt,
            max_answer=request.sampling_params.max_new_tokens,
            tenant=policy.tenant,
            group_id=policy.group_id,
            shared=policy.capture and (self._captures_unmarked or has_metadata(marks)),
        )
        group = self._drafter.group_of(slot)
        if self.sharing is None or group is None:
            return _Followed(slot)
        key = GroupKey(policy.tenant, policy.group_id)
        return _Followed(slot, self.sharing.join(key, group, prompt[-MAX_MATCH:]))
