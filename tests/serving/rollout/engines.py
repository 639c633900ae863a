"""An engine for the tests of the driver, whose tokens depend on seed and position alone, as a real one's do."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from serving.engine import Chunk, GenerateRequest
from serving.rollout.samples import GroupWork, SampleResult
from speculator.errors import EngineDeadError
from tests.serving.rollout.groups import request

PROMPT = 10
CHUNK = 3


def work(group_id: str = "a", **fields: object) -> GroupWork:
    """A group of `groups.request`, with prompts of PROMPT tokens."""
    return GroupWork(request=request(group_id, **fields), logprobs=True)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    """Let the others run; nothing here waits for a clock."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come")


def token_at(seed: int, position: int) -> int:
    return zlib.crc32(f"{seed}/{position}".encode()) % 1000


def length_of(seed: int) -> int:
    """Tokens of the answer of a seed, unless its limit is lower: from 5 to 64."""
    return 5 + zlib.crc32(str(seed).encode()) % 60


def expected(seed: int, limit: int) -> tuple[int, ...]:
    return tuple(token_at(seed, PROMPT + index) for index in range(min(length_of(seed), limit)))


@dataclass
class SeededEngine:
    """Implements RolloutEngine; its attributes say how it misbehaves, and what was asked of it."""

    name: str
    num_slots: int = 4
    memory_tokens: int = 10**6
    is_alive: bool = True
    takes_new: bool = True
    dies_after: int | None = None
    """Chunks, of all streams together; until then it lives."""
    holds_after: int | None = None
    """Chunks of a stream after which it waits for `release`."""
    failures: list[Exception] = field(default_factory=list)
    """Raised by the next streams instead of an answer."""
    target_version: int = 0
    """Of the chunks to come."""
    is_answered: bool = False
    """Environments speak between the turns of samples."""
    requests: list[GenerateRequest] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    num_chunks: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def drop_group_text(self, tenant: str, group_id: str) -> None:
        self.dropped.append(group_id)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            if self.failures:
                raise self.failures.pop(0)
            async for chunk in self._chunks(request):
                yield chunk
        finally:
            self.num_open -= 1

    async def _chunks(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        assert request.seed is not None
        begun, position = request.num_answered, len(request.prompt_token_ids)
        if not self.is_answered:
            assert position - begun == PROMPT
            assert request.prompt_token_ids[PROMPT:] == expected(request.seed, 10**6)[:begun], "not its own tokens"
        left = min(length_of(request.seed) - begun, request.max_tokens)
        reason = "stop" if left == length_of(request.seed) - begun else "length"
        for number, start in enumerate(range(0, left, CHUNK)):
            await asyncio.sleep(0)
            if number == self.holds_after:
                await self.release.wait()
            self.num_chunks += 1
            if not self.is_alive or (self.dies_after is not None and self.num_chunks > self.dies_after):
                self.is_alive = False
                raise EngineDeadError("gone")
            tokens = tuple(token_at(request.seed, position + index) for index in range(start, min(start + CHUNK, left)))
            yield Chunk(
                text="".join(f"{token} " for token in tokens),
                token_ids=tokens,
                logprobs=tuple(-token / 1000 for token in tokens),
                finish_reason=reason if start + CHUNK >= left else None,  # type: ignore[arg-type]
                target_version=self.target_version,
            )


@dataclass
class Results:
    """What a driver hands on."""

    by_sample: dict[str, SampleResult] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, result: SampleResult) -> None:
        name = f"{result.sample_id.group_id}{result.sample_id.number}"
        assert name not in self.by_sample, "it ended twice"
        self.by_sample[name] = result
        self.changed.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.by_sample) < count:
                self.changed.clear()
                await self.changed.wait()


def check_whole(result: SampleResult, *, limit: int) -> None:
    """It is the sample that one request would have given."""
    seed = result.sample_id.number
    assert result.tokens == expected(seed, limit), result.sample_id
    assert result.text == "".join(f"{token} " for token in result.tokens)
    assert result.logprobs == tuple(-token / 1000 for token in result.tokens)
