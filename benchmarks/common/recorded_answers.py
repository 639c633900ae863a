"""Recorded greedy answers as traffic: recorded once, read back, and requested in turn."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.common.drafts import last_good, last_good_manifest
from benchmarks.common.engines import engine_with
from benchmarks.common.replayed import Answer
from benchmarks.common.report import prompts_of
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.engine import LocalEngine
from slipstream.demo.topics import Prompt
from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import ConfigError, TraceError
from speculator.host import cache_root, now_ms
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.trace import Trace, encode_trace
from tests.fixtures.decoding import FixedPlanner
from trainer.learning.batch import make_example
from trainer.learning.labels import draft_ids_by_target_id

SHORTEST = 16
"""Tokens of an answer that is worth serving."""
RECORDING_DEFAULTS = {"answers": (64, 480), "max_tokens": (64, 160)}
CHAIN = 4
"""Proposals a round of the draft that serves while answers are recorded."""
FEWEST = 48
"""Least number of usable answers in a recording."""


def add_recording_options(options: argparse.ArgumentParser) -> None:
    """Where `recording` has its answers from; `RECORDING_DEFAULTS` fills in what is left out."""
    options.add_argument("--traces", type=Path, metavar="FILE.rec", help="greedy answers, instead of recording some")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--answers", type=int, help="answers to record; default 480, quick 64")
    options.add_argument("--max-tokens", type=int, help="of an answer that is recorded; default 160, quick 64")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the engine that records")


Choice = Callable[[Sequence[Prompt], int], list[Prompt]]


def from_both_halves(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Half of `count` prompts from each half of the domains, so that no large domain outnumbers all others."""
    names = sorted({prompt.domain for prompt in prompts})
    if len(names) < 2:
        raise ConfigError("all prompts have one domain: use prompts of several")
    middle, chosen = (len(names) + 1) // 2, list[Prompt]()
    for half in (names[:middle], names[middle:]):
        of_half = [prompt for prompt in prompts if prompt.domain in half]
        chosen += random.Random(0).sample(of_half, min(count // 2, len(of_half)))
    return chosen


def in_turn(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, one of each domain after the other, as far as the smallest domain reaches."""
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_domain[prompt.domain].append(prompt)
    share = min(count // len(by_domain), *map(len, by_domain.values()))
    rng = random.Random(0)
    samples = [rng.sample(of_domain, share) for of_domain in by_domain.values()]
    return [prompt for turn in zip(*samples, strict=True) for prompt in turn]


def recording(
    arguments: argparse.Namespace,
    model_dir: Path,
    choose: Choice = from_both_halves,
    *,
    engine: Mapping[str, float] | None = None,
) -> Path:
    """The path of a recording of answers, made now where the cache has none: greedy ones unless `arguments.temperature`
    says otherwise, decoded plainly or with whole chains of the last good draft of `arguments.drafts`. `engine` has
    settings of `LocalEngineConfig` that are to be others.

    Raises what `choose` does, by default ConfigError where the prompts have one domain only.
    """
    prompts = prompts_of(arguments.prompts)
    chosen, fingerprint = choose(prompts, arguments.answers), target_fingerprint(model_dir)
    # Latency does not matter here, so prompts are prefilled in long chunks.
    settings = {
        "depth": 0,
        "control_share": 0.0,
        "num_slots": 16,
        "max_waiting": len(chosen),
        "prefill_chunk": 256,
        **(engine or {}),
    }
    texts = [(prompt.domain, prompt.text) for prompt in chosen]
    temperature = getattr(arguments, "temperature", 0.0)
    drafts: Path | None = getattr(arguments, "drafts", None)
    served = None if drafts is None else last_good_manifest(drafts)
    if served is not None:
        settings |= {"depth": CHAIN, "suffix_depth": 0}
    about = (
        fingerprint,
        arguments.max_tokens,
        sorted(settings.items()),
        texts,
        *([temperature] if temperature else []),
        *([served.weights_sha256] if served else []),
    )
    key = hashlib.sha256(repr(about).encode())
    path: Path = arguments.cache / f"{key.hexdigest()[:16]}.rec"
    if path.exists():
        return path
    print(f"recording {len(chosen)} answers", flush=True)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    header = RecordingHeader(target_fingerprint=fingerprint, model=model_dir.name, created_ms=now_ms())
    with RecordingWriter(temporary, header) as writer:

        def keep(trace: Trace) -> None:
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)

        draft = last_good(drafts, model_dir) if drafts else fresh_draft(model_dir, seed=0)
        with engine_with(
            model_dir,
            draft,
            arguments.threads,
            draft_version=served.version if served else 1,
            settings=settings,
            on_trace=keep,
            planner=FixedPlanner() if drafts else None,
        ) as running:
            asyncio.run(_ask_all(running, chosen, arguments.max_tokens, temperature))
    temporary.rename(path)
    return path


async def _ask_all(engine: LocalEngine, prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> None:
    async def one(number: int, prompt: Prompt) -> None:
        tokens = engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        request = GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(tokens[-(engine.info.context_length - max_tokens) :]),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature),
            seed=number,
            policy=CapturePolicy(domain=prompt.domain),
        )
        async for _ in engine.generate(request):
            pass

    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def read_answers(path: Path, draft: Eagle3Draft) -> list[Answer]:
    """The greedy answers of a recording. Raises ConfigError where there are too few."""
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    answers: list[Answer] = []
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            is_greedy = trace.header.sampling.temperature == 0 and not trace.constrained.any()
            if not is_greedy or trace.num_completion_tokens < SHORTEST:
                continue
            with contextlib.suppress(TraceError):
                example = make_example(trace, draft_ids_V, feature_width=draft.fc.in_features)
                answers.append(Answer(number=len(answers), trace=trace, example=example))
    if len(answers) < FEWEST:
        raise ConfigError(f"{path} has {len(answers)} usable greedy answers: record more at temperature 0")
    return answers


class Traffic:
    """Chooses the next answer: in a random answer's domain, the one that was requested least so far."""

    def __init__(self, answers: Sequence[Answer], *, seed: int) -> None:
        self._answers, self._rng = answers, random.Random(seed)
        self._asked: Counter[int] = Counter()

    def __call__(self) -> Answer:
        domain = self._rng.choice(self._answers).trace.header.domain
        candidates = [one for one in self._answers if one.trace.header.domain == domain]
        fewest = min(self._asked[one.number] for one in candidates)
        answer = self._rng.choice([one for one in candidates if self._asked[one.number] == fewest])
        self._asked[answer.number] += 1
        return answer
