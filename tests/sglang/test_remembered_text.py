"""Earlier text beside the head in a real SGLang server: the text that it commits, what it proposes, and for whom."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from serving.sglang.report import EngineReport
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.draft.checkpoint import draft_state
from speculator.draft.initialization import fresh_draft
from speculator.trace import NO_DRAFT
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.schemas import SCHEMAS, Schema
from tests.sglang.plugged import Plugged, plugged_server
from tests.sglang.server import SglangServer, ranks_environment

DEPTH = 3
"""Of the head; text alone goes further."""
LIST = "\n".join(f"{number}. The {name} is in the northern hall." for number, name in enumerate("abcdefghij", 1))
COPIED = [f"Repeat this list without any change:\n{LIST}\nYour answer:\n{LIST[: 40 + 3 * cut]}" for cut in range(4)]
OTHERS = ["Why is the sky blue?", "Name three rivers.", "What is a prime number?", "How do birds fly?"]


@contextlib.contextmanager
def remembering(
    folder: Path, model_dir: Path, store: DraftStore, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[Plugged]:
    config = folder / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [0, 1, 3, 8, 16]}}')
    flags = ("--speculative-adaptive", "--speculative-adaptive-config", str(config), "--dtype", "float32", *flags)
    settings = {"SUFFIX_DEPTH": "16"}
    with plugged_server(folder, model_dir, store, num_steps=DEPTH, flags=flags, settings=settings, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def plugged(model_dir: Path, store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    with remembering(tmp_path_factory.mktemp("text"), model_dir, store) as server:
        yield server


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    log_path = tmp_path_factory.mktemp("plain") / "sglang.log"
    with SglangServer(model_dir, log_path=log_path, flags=("--dtype", "float32")) as server:
        yield server


def compare(plugged: Plugged, plain: SglangServer, texts: Sequence[str], length: int) -> None:
    """All at the same time, on both servers."""
    prompts = [plugged.ids(text) for text in texts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda ids: plugged.server.generate(ids, max_new_tokens=length), prompts))
        expected = list(pool.map(lambda ids: plain.generate(ids, max_new_tokens=length), prompts))
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]


def random_version(store: DraftStore, seed: int) -> int:
    """Another one."""
    manifest, first = store.manifest(1), store.load(1)
    draft = fresh_draft(resolve_model(BUNDLED_MODEL), seed=seed)
    state = {**draft_state(draft), "d2t": first["d2t"], "t2d": first["t2d"]}
    fingerprint = manifest.target_fingerprint
    version = store.write(state, store.config(1), parent=1, target_fingerprint=fingerprint, info={}).version
    admit(store, version, target_fingerprint=fingerprint, actor="test", reason="random")
    return version


def compare_until_in_service(plugged: Plugged, plain: SglangServer, version: int, texts: Sequence[str]) -> int:
    """How many answers that took: ranks exchange a draft only while they have steps to make."""
    for turn in range(8):
        compare(plugged, plain, [f"{text} ({version}.{turn})" for text in texts], 64)
        if plugged.report()["version"] == str(version):
            return (turn + 1) * len(texts)
    raise AssertionError(f"version {version} did not come into service: {plugged.report()}")


def test_the_text_is_that_of_a_plain_server_and_much_of_it_was_remembered(
    plugged: Plugged, plain: SglangServer
) -> None:
    compare(plugged, plain, (*COPIED, *OTHERS), 96)
    report = plugged.wait_for(lambda report: report.get("text_accepted", "") != "")
    assert report["failures"] == ""
    read = EngineReport.parse(report)
    assert sum(read.accepted_text.values()) == sum(read.text_accepted.values())
    assert read.accepted_text["own"] > 0
    alone = plugged.server.generate(plugged.ids(COPIED[0] + "\n"), max_new_tokens=96)
    tokens, rounds = len(alone["output_ids"]), alone["meta_info"]["spec_verify_ct"]
    assert tokens > 1.3 * rounds, "how long the chains are is up to the machine's times"


PENALTIES = (
    {"frequency_penalty": 0.1},
    {"presence_penalty": 0.4},
    {"repetition_penalty": 1.02},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.3},
)


def test_penalties_are_those_of_a_plain_server(plugged: Plugged, plain: SglangServer) -> None:
    """SGLang itself counts one token of a step, however many it commits. The last two end with a word of the list."""
    stop = {"stop_token_ids": [plugged.tokenizer.encode(" the")[-1]]}
    sampling: list[dict[str, Any]] = [{}, {}, *PENALTIES, {"min_new_tokens": 30, **stop}, stop]
    asked = [(plugged.ids(COPIED[number % 4]), one) for number, one in enumerate(sampling)]

    def answer(server: SglangServer) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda one: server.generate(one[0], max_new_tokens=96, **one[1]), asked))

    answers, expected = answer(plugged.server), answer(plain)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
    steps, lengths = zip(
        *((one["meta_info"]["spec_verify_ct"], len(one["output_ids"]) - 1) for one in answers), strict=True
    )
    assert sum(steps) < 0.9 * sum(lengths), "proposals are taken"
    assert lengths[-2] >= 29 > lengths[-1]


def test_it_stays_so_beside_a_head_that_is_asked_and_swapped(
    plugged: Plugged, plain: SglangServer, store: DraftStore
) -> None:
    """Of random weights: what it proposes is wrong."""
    plugged.traces(len(COPIED) + len(OTHERS) + 1)
    num_asked = 0
    for seed in (1, 2):
        version = random_version(store, seed)
        plugged.pointer.publish(version)
        num_asked += compare_until_in_service(plugged, plain, version, (*COPIED[:2], *OTHERS))
        assert plugged.report()["failures"] == ""
    rounds = [trace.rounds for trace in plugged.traces(num_asked).values()]
    versions = np.concatenate([of.draft_version for of in rounds])
    accepted = np.concatenate([of.num_accepted for of in rounds])
    assert accepted[versions == NO_DRAFT].mean() > 2
    assert (versions > 1).any()
    assert accepted[versions > 1].mean() < 0.2


def test_schemas_are_followed_and_drafts_change_no_text(plugged: Plugged, plain: SglangServer) -> None:
    # The others SGLang's grammars do not know, and it refuses them.
    schemas = [schema for schema in SCHEMAS if not re.search("multipleOf|allOf|oneOf", json.dumps(schema))]

    def answer(server: SglangServer, schema: Schema) -> tuple[str, str]:
        asked = plugged.ids(f"Give an example of {json.dumps(schema)[:100]}")
        found = server.generate(asked, json_schema=json.dumps(schema), max_new_tokens=120)
        return found["text"], found["meta_info"]["finish_reason"]["type"]

    with ThreadPoolExecutor(8) as pool:
        drafted = list(pool.map(lambda schema: answer(plugged.server, schema), schemas))
        expected = list(pool.map(lambda schema: answer(plain, schema), schemas))
    assert drafted == expected
    # Some go on with white space up to the limit, which SGLang's grammars allow.
    whole = [(schema, text) for schema, (text, reason) in zip(schemas, drafted, strict=True) if reason == "stop"]
    assert len(whole) > 30
    for schema, text in whole:
        jsonschema.validate(json.loads(text), schema)
    assert plugged.report()["failures"] == ""


def test_several_ranks_propose_verify_and_swap_the_same(
    plain: SglangServer, model_dir: Path, draft_store: DraftStore, tmp_path: Path
) -> None:
    """Three: the model's heads can be parted among so many."""
    shutil.copytree(draft_store.root, tmp_path / "drafts")
    store = DraftStore(tmp_path / "drafts")
    with remembering(tmp_path, model_dir, store, "--tp-size", "3", env=ranks_environment(3)) as plugged:
        compare(plugged, plain, (COPIED[0], OTHERS[0]), 48)
        version = random_version(store, 1)
        plugged.pointer.publish(version)
        num_asked = 2 + compare_until_in_service(plugged, plain, version, (COPIED[1], OTHERS[1]))
        assert plugged.report()["failures"] == ""
        rounds = [trace.rounds for trace in plugged.traces(num_asked).values()]
    versions = np.concatenate([of.draft_version for of in rounds])
    assert np.concatenate([of.num_accepted for of in rounds])[versions == NO_DRAFT].mean() > 1
