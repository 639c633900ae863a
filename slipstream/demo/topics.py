"""Built-in traffic for the demo: question forms over many topics, in four domains.

They repeat themselves, so they flatter acceptance; figures are reported on real prompts (`--prompts`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from speculator.errors import ConfigError
from speculator.host import read_json_lines

_THINGS = (
    "the water cycle, photosynthesis, a volcano, the moon, an earthquake, a rainbow, a hurricane, gravity, "
    "magnetism, electricity, a battery, a bicycle, a steam engine, a refrigerator, a telescope, a microscope, the "
    "internet, a computer, a database, a compiler, an operating system, a search engine, encryption, a "
    "blockchain, a vaccine, the immune system, the heart, the lungs, the brain, sleep, memory, a dream, bread, "
    "cheese, coffee, tea, chocolate, honey, wine, a bridge, a dam, a lighthouse, a windmill, a submarine, an "
    "airplane, a rocket, a satellite, a black hole, a comet, the sun, Mars, an ocean current, a glacier, a "
    "desert, a rainforest, a coral reef, a bee, an ant colony, a whale, an octopus, an elephant, a wolf, an owl, "
    "a butterfly, a dinosaur, a fossil, a diamond, gold, iron, glass, paper, ink, a clock, a calendar, money, a "
    "bank, inflation, a market, a tax, an election, a law, a court, a city, a library, a museum, a school, a "
    "hospital, a farm, a garden, a forest, chess, football, music, a violin, a piano, painting, photography, a "
    "novel, a poem, a language, an alphabet, a map, a compass"
).split(", ")

_FORMS = {
    "explain": (
        "What is {}? Explain it simply.",
        "How does {} work?",
        "Why is {} important? Give three reasons.",
        "Explain {} to a ten year old child.",
        "What would a day without {} be like?",
    ),
    "write": (
        "Write a short story about {}.",
        "Write a short letter to a friend about {}.",
        "Describe {} in one paragraph.",
        "Write a dialogue in which two friends argue about {}.",
    ),
    "list": (
        "List five facts about {}.",
        "Give me a step by step plan to teach a class about {}.",
        "What are the advantages and disadvantages of {}?",
        "List four mistakes that people make about {}.",
    ),
    "code": (
        "Write a Python class that models {}.",
        "Write a Python function that returns a dictionary with facts about {}.",
        "Write a Python script that asks three questions about {} and counts the right answers.",
    ),
}


@dataclass(frozen=True)
class Prompt:
    domain: str
    text: str


def built_in_prompts() -> list[Prompt]:
    """Every form over every thing, in a fixed order."""
    return [
        Prompt(domain, form.format(thing)) for domain, forms in _FORMS.items() for form in forms for thing in _THINGS
    ]


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


def endless(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """All prompts in a random order, then again in another: domains come in the shares that the list has."""
    order = random.Random(seed)
    while True:
        yield from order.sample(prompts, len(prompts))
