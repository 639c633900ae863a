"""Kill -9 of engine, gateway and trainer right before and right after each of their steps.

Whoever starts next finds a consistent store and a good version to serve, and brings to its end what was cut short.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import redis
import torch

from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from speculator.draft.checkpoint import (
    config_from_json,
    draft_config_json,
    draft_state,
    expected_shapes,
    model_key,
    target_fingerprint,
)
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from speculator.versions.lifecycle import ALLOWED, BARRED, VersionState
from speculator.versions.lineage import version_to_serve
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.preloaded import Preloaded
from tests.fixtures.toy import random_draft
from tests.fixtures.waiting import PATIENCE_S, wait_until
from tests.slipstream.mortal import KEY, Role
from tests.trainer.answers import answer_traces
from trainer.checkpoint import load_checkpoint

VARIABLES = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "error",
}
PROMPTS = ["a", "7", "6"]
FAVOURITE = 29
"""The token that their answers consist of."""
OTHER_PROMPT = "what?"
"""Its answer is more of a text, and takes a draft longer to be known by."""
SCORED = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)
LIVE = (*SCORED, VersionState.LIVE)
PROMOTED = (*LIVE, VersionState.PROMOTED)
ROLLED_BACK = (*LIVE, VersionState.ROLLED_BACK)

FIRST_VERSION = ("stored 1", "written 1", "validated 1", "scored 1", "live 1", "promoted 1")
TRIALS = {
    "good": ("install 2", "live 2", "promoted 2"),
    "useless": ("install 2", "live 2", "install 1", "rolled_back 2", "quarantined 2", "replace 2 by 1"),
}
PUBLISHING = (
    *("checkpoint of 1", "ack", "stored 2", "written 2", "validated 2", "scored 2"),
    *("checkpoint of 2", "publish 2"),
)
STARTING_OVER = ("start over from 1", "checkpoint of 1", "ack")

Texts = dict[str, str]
"""By prompt."""


def moments(steps: Sequence[str]) -> list[str]:
    return [f"{side} {step}" for step in steps for side in ("before", "after")]


class Life:
    """A service, from its first breath."""

    def __init__(self, place: Place, role: Role) -> None:
        self._place, self._past = place, len(place.steps())
        self._process = place.nursery.start(role, VARIABLES, place.folder / "log")

    def steps(self) -> list[str]:
        return self._place.steps()[self._past :]

    def first_word(self) -> str:
        """What it says when it serves, or trains."""

        def words() -> list[str]:
            return [step for step in self.steps() if step.startswith(("serves", "trains"))]

        wait_until(words)
        return words()[0]

    @property
    def url(self) -> str:
        return self.first_word().split()[-1]

    def end(self, number: int | None = None) -> None:
        """By a signal, or by itself."""
        if number is not None:
            self._process.send_signal(number)
        self._process.wait(PATIENCE_S)

    @property
    def status(self) -> int | None:
        return self._process.returncode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What the services of one deployment share, and the nursery that they come from, one at a time."""

    folder: Path
    model_dir: Path
    redis_url: str
    client: redis.Redis
    nursery: Preloaded
    http: httpx.Client

    def __post_init__(self) -> None:
        self.folder.mkdir()

    @cached_property
    def store(self) -> DraftStore:
        return DraftStore(self.folder / "store")

    @cached_property
    def fingerprint(self) -> str:
        return target_fingerprint(self.model_dir)

    @cached_property
    def pointer(self) -> DraftPointer:
        return DraftPointer(self.client, model_key(self.model_dir, self.fingerprint))

    @cached_property
    def stream(self) -> TraceStream:
        return TraceStream(self.client, model_key(self.model_dir, self.fingerprint), max_bytes=10**8)

    def state(self, version: int) -> VersionState | None:
        return self.store.lifecycle.state(version)

    def steps(self) -> list[str]:
        path = self.folder / "steps"
        return path.read_text().splitlines() if path.exists() else []

    @contextmanager
    def start(self, service: str, *, dies: str = "") -> Iterator[Life]:
        """It ends with the block: where it is to die, or by SIGTERM and without complaint."""
        life = Life(self, Role(service, str(self.model_dir), self.redis_url, str(self.folder), dies))
        try:
            yield life
            life.end(None if dies else signal.SIGTERM)
        finally:
            if life.status is None:
                life.end(signal.SIGKILL)
        log = (self.folder / "log").read_text()
        assert life.status == (-signal.SIGKILL if dies else 0), log
        assert not dies or self.steps()[-1] == dies, log

    def add(self, *states: VersionState, is_good: bool = True) -> None:
        """The next version: it proposes the favourite token, or anything at all."""
        draft = random_draft(self.model_dir, seed=9, draft_vocab_size=16, scale=0.0 if is_good else 1.0)
        draft.d2t.copy_(torch.full_like(draft.d2t, FAVOURITE))
        weights, config = draft_state(draft), draft_config_json(draft.config)
        written = self.store.write(weights, config, parent=None, target_fingerprint=self.fingerprint, info={})
        for state in states[1:]:
            self.store.lifecycle.move(written.version, state, actor="engine:test")

    def send(self, traces: Sequence[Trace]) -> None:
        for trace in traces:
            self.stream.append(encode_trace(trace), trace_id=trace.header.trace_id)

    def ask(self, life: Life, *prompts: str) -> Texts:
        """Greedy answers; none from a server that has died."""
        body = {"model": "toy", "prompt": prompts, "max_tokens": 40, "temperature": 0}
        try:
            reply = self.http.post(f"{life.url}/v1/completions", json=body)
        except httpx.TransportError:
            return {}
        assert reply.status_code == 200, reply.text
        return {prompt: choice["text"] for prompt, choice in zip(prompts, reply.json()["choices"], strict=True)}

    def version_in_service(self, life: Life) -> int:
        version: int = self.http.get(f"{life.url}/ready").json()["draft_version"]
        return version

    def check(self) -> None:
        """The store is consistent, and what was barred has never come into service again."""
        files, histories = self.store.versions(), self.store.lifecycle.histories()
        assert histories.keys() <= set(files)
        for version in files:
            shapes = expected_shapes(config_from_json(self.store.config(version)))
            self.store.load(version, expected_fingerprint=self.fingerprint, expected_shapes=shapes)
        made = {one.sequence: (version, one.state) for version, history in histories.items() for one in history}
        assert len(made) == sum(map(len, histories.values()))
        for history in histories.values():
            for before, after in itertools.pairwise([None, *(one.state for one in history)]):
                assert after in ALLOWED[before]
        told = [event for event in self.store.lifecycle.recent_events(999) if event.sequence]
        assert [event.sequence for event in told] == list(range(1, 1 + len(told))), "no death loses an event"
        assert made == {event.sequence: (event.fields["version"], VersionState(event.kind)) for event in told}
        barred = set()
        for step in self.steps():
            match step.split():
                case ["after", "rolled_back" | "quarantined", version]:
                    barred.add(version)
                case ["before", "install", version] | ["serves", version, "at", _]:
                    assert version not in barred

    def check_start(self) -> int:
        """The same, and an engine that starts now starts with a good version: this one."""
        self.check()
        newest = self.store.lifecycle.newest_servable()
        assert newest is not None
        version = version_to_serve(self.store, newest)
        assert self.state(version) is VersionState.PROMOTED
        return version


@pytest.fixture(scope="module")
def new_place(toy_model: Path, redis_url: str) -> Iterator[Callable[..., Place]]:
    nursery = Preloaded("tests.slipstream.mortal", VARIABLES, str(toy_model))
    with httpx.Client(trust_env=False, verify=False, timeout=30) as http:  # noqa: S501 - no certificate anywhere
        yield lambda folder, client: Place(
            folder=folder, model_dir=toy_model, redis_url=redis_url, client=client, nursery=nursery, http=http
        )


@pytest.fixture
def place(new_place: Callable[..., Place], tmp_path: Path, redis_client: redis.Redis) -> Place:
    return new_place(tmp_path / "place", redis_client)


@pytest.fixture(scope="module")
def traces(toy_model: Path) -> list[Trace]:
    return answer_traces(toy_model, num_traces=8)


@pytest.fixture(scope="module")
def texts(new_place: Callable[..., Place], tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Texts:
    """From an engine whose draft nobody touches."""
    place = new_place(tmp_path_factory.mktemp("plain") / "place", connect(redis_url))
    place.add(*PROMOTED)
    with place.start("serve") as life:
        found = place.ask(life, *PROMPTS, OTHER_PROMPT)
    place.client.close()
    return found


# -- engine -----------------------------------------------------------------------------------------------------------


def serve_until_settled(place: Place, texts: Texts, kind: str) -> None:
    version = place.check_start()
    with place.start("serve") as life:
        assert life.first_word().startswith(f"serves {version} ")

        def is_settled() -> bool:
            assert place.ask(life, *PROMPTS).items() < texts.items()
            if kind == "good":
                return place.state(2) is VersionState.PROMOTED
            return place.state(2) is VersionState.QUARANTINED and place.pointer.published() == 1

        wait_until(is_settled)
        assert place.version_in_service(life) == place.pointer.desired() == (2 if kind == "good" else 1)
        assert place.ask(life, *texts) == texts
    assert place.check_start() == place.pointer.desired()


def begin_trial(place: Place, kind: str) -> None:
    place.add(*PROMOTED)
    place.add(*SCORED, is_good=kind == "good")
    place.pointer.publish(2)


@pytest.mark.parametrize("kind", TRIALS)
def test_these_are_the_steps_of_an_engine(place: Place, texts: Texts, kind: str) -> None:
    begin_trial(place, kind)
    serve_until_settled(place, texts, kind)
    assert place.steps()[1:] == moments(TRIALS[kind])


@pytest.mark.parametrize(("kind", "dies"), [(kind, dies) for kind in TRIALS for dies in moments(TRIALS[kind])])
def test_an_engine_is_killed(place: Place, texts: Texts, kind: str, dies: str) -> None:
    begin_trial(place, kind)
    with place.start("serve", dies=dies) as life:
        while found := place.ask(life, *PROMPTS):
            assert found.items() < texts.items()
    assert place.check_start() == (2 if dies == "after promoted 2" else 1)
    serve_until_settled(place, texts, kind)


@pytest.mark.parametrize("dies", moments(FIRST_VERSION))
def test_an_engine_is_killed_as_it_writes_the_first_version(place: Place, dies: str) -> None:
    with place.start("serve", dies=dies):
        pass
    place.check()
    with place.start("serve") as life:
        assert place.version_in_service(life) == 1
    assert place.check_start() == 1


# -- gateway ----------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """What an operator asks for, and how it is meant to end."""

    path: str
    steps: tuple[str, ...]
    desired: int
    third: tuple[VersionState, ...] = SCORED
    """How version 3 came to where it is; versions 1 and 2 are good."""
    published: int | None = 2
    pinned: int | None = None
    body: dict[str, object] | None = None


CHANGES = {
    "promote, never seen": Change(
        "3/promote", ("validated 3", "scored 3", "publish 3"), 3, third=(VersionState.WRITTEN,)
    ),
    "promote, barred": Change("3/promote", ("quarantined 3", "scored 3", "publish 3"), 3, third=ROLLED_BACK),
    "promote, good before": Change("1/promote", ("promoted 1", "publish 1"), 1),
    "rollback, on trial": Change(
        "rollback",
        ("rolled_back 3", "quarantined 3", "unpin", "replace 3 by 2"),
        2,
        third=LIVE,
        published=3,
        pinned=3,
        body={"version": 3, "reason": "slow"},
    ),
    "rollback, nothing published": Change(
        "rollback",
        ("rolled_back 2", "quarantined 2", "publish 1"),
        1,
        published=None,
        body={"version": 2, "reason": "slow"},
    ),
    "pin": Change("1/pin", ("pin 1",), 1),
    "unpin": Change("unpin", ("unpin",), 2, pinned=1),
}


def begin_change(place: Place, change: Change) -> None:
    place.add(*PROMOTED)
    place.add(*PROMOTED)
    place.add(*change.third)
    if change.published is not None:
        place.pointer.publish(change.published)
    if change.pinned is not None:
        place.pointer.pin(change.pinned)


def order(place: Place, life: Life, change: Change) -> int | None:
    """The status that the gateway answers with; None from one that has died."""
    try:
        url, key = f"{life.url}/admin/drafts/{change.path}", {"authorization": f"Bearer {KEY}"}
        return place.http.post(url, json=change.body, headers=key).status_code
    except httpx.TransportError:
        return None


def follow(place: Place) -> int:
    """The version in service where an engine has started and looked at the pointer."""
    engine = DoubleEngine(draft_version=place.check_start())
    watch, states = LiveWatch(engine.draft_version), place.store.lifecycle
    follower = DraftFollower(engine, place.pointer, engine_id="engine-0", watch=watch, lifecycle=states)
    for _ in range(2):
        follower.poll()
        assert place.state(engine.draft_version) not in BARRED
    return engine.draft_version


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_these_are_the_steps_of_a_gateway(place: Place, change: Change) -> None:
    begin_change(place, change)
    with place.start("gateway") as life:
        assert order(place, life, change) == 200
    assert place.steps()[1:] == moments(change.steps)
    assert place.pointer.desired() == change.desired
    place.check()


@pytest.mark.parametrize(
    ("change", "dies"),
    [
        pytest.param(change, dies, id=f"{name}-{dies}")
        for name, change in CHANGES.items()
        for dies in moments(change.steps)
    ],
)
def test_a_gateway_is_killed(place: Place, change: Change, dies: str) -> None:
    begin_change(place, change)
    with place.start("gateway", dies=dies) as life:
        assert order(place, life, change) is None
    follow(place)
    with place.start("gateway") as life:
        # What is unpinned already cannot be unpinned.
        assert order(place, life, change) == (409 if dies == "after unpin" and change.path == "unpin" else 200)
    assert place.pointer.desired() == change.desired
    if follow(place) != change.desired:
        assert place.state(change.desired) is VersionState.SCORED, "it is tried first"


# -- trainer ----------------------------------------------------------------------------------------------------------


def publish_again(place: Place, traces: list[Trace], *, newer_than: int) -> int:
    """A trainer that nobody kills uses every trace and publishes a version: this one."""
    with place.start("train"):
        place.send(traces)
        wait_until(lambda: (place.pointer.published() or 0) > newer_than)
        wait_until(lambda: not place.stream.lag().pending and not place.stream.lag().undelivered)
    assert place.stream.lag().lost == place.stream.lag().dead_lettered == 0
    published = place.pointer.published()
    assert published is not None
    check_trainer(place)
    return published


def check_trainer(place: Place) -> None:
    """The store, and that only those traces are settled that a durable step has used."""
    place.check()
    saved = load_checkpoint(place.folder / "state")
    used = set() if saved is None else set(saved[1].used_trace_ids)
    published = place.pointer.published()
    if saved is not None and published is not None and place.state(published) not in BARRED:
        assert saved[1].version >= published, "engines hear of a version after the trainer will remember it"
    assert {entry.trace_id for entry in place.stream.recent(10**8)} <= used


def test_these_are_the_steps_of_a_trainer(place: Place, traces: list[Trace]) -> None:
    publish_again(place, traces[:4], newer_than=1)
    steps = dict.fromkeys(step for step in place.steps() if step != "trains")
    expected = moments(FIRST_VERSION + PUBLISHING)
    assert list(steps)[: len(expected)] == expected


@pytest.mark.parametrize("dies", moments(PUBLISHING))
def test_a_trainer_is_killed(place: Place, traces: list[Trace], dies: str) -> None:
    place.send(traces[:4])
    with place.start("train", dies=dies):
        pass
    check_trainer(place)
    newest = place.store.latest()
    published = publish_again(place, traces[4:], newer_than=place.pointer.published() or 1)
    assert published > (newest or 0)
    assert place.check_start() == 1


@pytest.mark.parametrize("dies", moments(("scored 4", "publish 4")))
def test_a_trainer_is_killed_with_a_version_on_trial(place: Place, traces: list[Trace], dies: str) -> None:
    """Engines have rolled back two versions in a row: one may be published, and its trial is waited for."""
    place.add(*PROMOTED)
    for _ in range(2):
        place.add(*ROLLED_BACK, VersionState.QUARANTINED)
    place.send(traces[:4])
    with place.start("train", dies=dies):
        pass
    check_trainer(place)
    on_trial = place.pointer.published() or 5
    assert publish_again(place, traces[4:], newer_than=3) == on_trial
    assert place.check_start() == 1


def publish_and_bar(place: Place, traces: list[Trace], *, dies: str = "") -> int:
    """A trainer publishes a version, this one, and rests; it comes back, and an engine bars the version."""
    published = publish_again(place, traces, newer_than=1)
    with place.start("train", dies=dies) as life:
        life.first_word()
        for state in (VersionState.LIVE, VersionState.ROLLED_BACK, VersionState.QUARANTINED):
            place.store.lifecycle.move(published, state, actor="engine:test")
        if not dies:
            wait_until(lambda: life.steps()[1:] == moments(STARTING_OVER))
    return published


def test_these_are_the_steps_of_a_trainer_that_starts_over(place: Place, traces: list[Trace]) -> None:
    published = publish_and_bar(place, traces[:4])
    assert place.state(published) is VersionState.QUARANTINED


@pytest.mark.parametrize("dies", moments(STARTING_OVER))
def test_a_trainer_is_killed_as_it_starts_over(place: Place, traces: list[Trace], dies: str) -> None:
    barred = publish_and_bar(place, traces[:4], dies=dies)
    check_trainer(place)
    publish_again(place, traces[4:], newer_than=barred)
    assert place.store.manifest(barred + 1).parent == 1
    assert place.check_start() == 1
