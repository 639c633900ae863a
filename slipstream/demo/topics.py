"""Prompts of the demo and of benchmarks: real questions that come with the package, or those of a file.

`prompts/` has GSM8K, HumanEval and Spec-Bench, with their licences. No prompt is repeated before all were used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from speculator.draft.initialization import Text
from speculator.errors import ConfigError
from speculator.host import read_json_lines
from speculator.recording import RecordingReader, is_recording

_FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Prompt:
    domain: str
    text: str
    tenant: str = ""
    """The tenant that sends it; empty where there are no tenants."""


def built_in_prompts() -> list[Prompt]:
    """All prompts of the package, in a fixed order."""
    return [prompt for path in sorted(_FOLDER.glob("*.jsonl")) for prompt in read_prompts(path)]


class _Row(msgspec.Struct):
    domain: str
    prompt: str


def read_prompts(path: Path) -> list[Prompt]:
    """One JSON object a line with `domain` and `prompt`. Raises ConfigError naming the line at fault."""
    rows = read_json_lines(path, _Row, example='{"domain": "math", "prompt": "…"}')
    prompts = [Prompt(row.domain, row.prompt) for _, row in rows]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt: give one JSON object a line")
    return prompts


def read_texts(path: Path) -> list[Text]:
    """Texts for choosing a draft vocabulary: a recording's traces as token ids, or the prompts of a file. Raises
    ConfigError.
    """
    if not is_recording(path):
        return [prompt.text for prompt in read_prompts(path)]
    with RecordingReader(path) as reader:
        return [trace.token_ids.tolist() for trace in reader.traces()]


def cycle_prompts(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    """Repeat all prompts for ever, each time in a new random order; domains keep their shares in the list."""
    order = random.Random(seed)
    while True:
        yield from order.sample(prompts, len(prompts))


class TenantTraffic(Iterator[Prompt]):
    """Prompts of several tenants, each about a topic of its own; `shift` changes the topics.

    The first phase has the domains with the most prompts, so many that they have at least half of all prompts; the
    second phase has the others. Each tenant has one domain in either phase. Where its domain has no unused prompt left,
    it takes one of another domain of the phase, then of any domain, and only then are prompts repeated.
    """

    def __init__(self, prompts: Sequence[Prompt], tenants: Sequence[str], seed: int) -> None:
        """`prompts`: at least one; the `tenants` take turns in a random order."""
        self._prompts, self._tenants, self._random = prompts, tenants, random.Random(seed)
        self._asked_by: list[str] = []
        self._left: dict[str, list[Prompt]] = {}
        self._refill()
        domains = sorted(self._left, key=lambda domain: -len(self._left[domain]))
        num_first, covered = 0, 0
        while 2 * covered < len(prompts):
            covered += len(self._left[domains[num_first]])
            num_first += 1
        self._topics = domains[:num_first], domains[num_first:]
        self.is_shifted = False

    @property
    def can_shift(self) -> bool:
        """False where all prompts are of one domain."""
        return bool(self._topics[1])

    def topics(self) -> Sequence[str]:
        """The domains of the current phase."""
        return self._topics[self.is_shifted and self.can_shift]

    def shift(self, *, to_second: bool) -> None:
        """Switch to the second phase's topics, or back to the first's."""
        self.is_shifted = to_second

    def __next__(self) -> Prompt:
        if not self._asked_by:
            self._asked_by = self._random.sample(self._tenants, len(self._tenants))
        tenant = self._asked_by.pop()
        topics = self.topics()
        own = topics[self._tenants.index(tenant) % len(topics)]
        for domain in (own, self._fullest(topics), self._fullest(list(self._left))):
            if self._left[domain]:
                return replace(self._left[domain].pop(), tenant=tenant)
        self._refill()
        return replace(self._left[own].pop(), tenant=tenant)

    def _fullest(self, domains: Sequence[str]) -> str:
        return max(domains, key=lambda domain: len(self._left[domain]))

    def _refill(self) -> None:
        for prompt in self._random.sample(self._prompts, len(self._prompts)):
            self._left.setdefault(prompt.domain, []).append(prompt)
