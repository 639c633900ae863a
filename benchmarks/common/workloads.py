"""Four workloads of `benchmarks.serving` and `benchmarks.demo`: chat, editing, structured output, groups of samples.

Editing asks for a small change in a program that the model has written before, structured output for a JSON list, and a
group for several sampled answers to one prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.engines import engine_with, greedy
from benchmarks.common.report import shuffled_prompts
from slipstream.models import resolve_model
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.host import read_json_lines

SAMPLES = 8
"""Samples of a group."""
MAX_PROMPT = 700
"""Longest prompt that is used, in tokens."""
EDITS = ("Rename the first function to `run`", "Add a docstring to every function", "Add a comment above each line")
LIST_REQUEST = 'Answer with a JSON list of objects with the keys "title", "description" and "importance".'


@dataclass(frozen=True)
class Work:
    """Requests that run at the same time: one prompt, or several samples of one prompt. `limit` is max_tokens."""

    workload: str
    prompt: tuple[int, ...]
    limit: int
    num_samples: int


def asks_for(edit: str, program: str) -> str:
    """A prompt that asks for one small change in a program."""
    return f"```python\n{program}\n```\n{edit} in this code and change nothing else. Answer with the whole code."


def load_works(options: argparse.Namespace) -> list[Work]:
    """Load the works from the file of `--answers`, or make them and write the file where it does not exist. Raises
    ConfigError where there are too few prompts for it.
    """
    path: Path | None = options.answers
    if path is not None and path.exists():
        example = '{"workload": "chat", "prompt": [1], "limit": 8, "num_samples": 1}'
        return [work for _, work in read_json_lines(path, Work, example=example)]
    works = list(_make(options, *((4, 64) if options.quick else (24, 200))))
    if path is not None:
        path.write_text("".join(json.dumps(asdict(work)) + "\n" for work in works))
    return works


def _make(options: argparse.Namespace, count: int, limit: int) -> Iterator[Work]:
    """`count` works of each workload, a quarter as many groups, with answers of about `limit` tokens."""
    model_dir = resolve_model(options.model)
    settings = {"depth": 0, "control_share": 0.0}
    with engine_with(model_dir, fresh_draft(model_dir, seed=0), options.threads, settings=settings) as engine:
        tokenizer = engine.tokenizer

        def asked(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))

        texts = [one for one in shuffled_prompts(options.prompts) if len(tokenizer.encode(one.text)) < MAX_PROMPT]
        others = [text.text for text in texts if text.domain != "code"]
        programs = [asked(text.text) for text in texts if text.domain == "code"][:count]
        if len(programs) < 2 or len(others) < 3 * count:
            raise ConfigError(
                f"{len(programs)} prompts of the domain code and {len(others)} of others, none longer than "
                f"{MAX_PROMPT} tokens, are too few: 2 and {3 * count} are needed"
            )
        written = greedy(engine, programs, limit, ignore_eos=False)
        for edit, program in zip(itertools.cycle(EDITS), written, strict=False):
            yield Work("editing", asked(asks_for(edit, tokenizer.decode(program))), limit + 60, 1)
    yield from (Work("group", asked(text), limit, SAMPLES) for text in others[: count // 4])
    yield from (Work("structured", asked(f"{text}\n{LIST_REQUEST}"), limit, 1) for text in others[count : 2 * count])
    yield from (Work("chat", asked(text), limit, 1) for text in others[2 * count : 3 * count])
