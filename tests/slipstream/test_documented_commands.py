"""Commands of the documentation, run on a toy deployment."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.demo.servers import Scrape
from speculator.draft.checkpoint import model_key, target_fingerprint, write_folder
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lifecycle import VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.docs.commands import Command, fenced, only_parses
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import url_in, wait_until
from tests.serving.gateway.keyfile import KeyFile
from tests.slipstream.conftest import service

ADMIN_KEY = "a-key-of-the-workshop"
NUM_ANSWERS = 6
HEAD = "somebodys-head"


@pytest.mark.parametrize("command", [each for each in fenced() if not only_parses(each)], ids=str)
def test_it_runs(command: Command, workshop: Workshop) -> None:
    workshop.run(command)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """A gateway that has answered, its traces in Redis and in a recording, a store of three versions."""
    folder = tmp_path_factory.mktemp("workshop")
    model = make_toy_model(folder / "toy")
    for name in ("texts.jsonl", "my.jsonl"):
        (folder / name).write_text('{"domain": "toy", "prompt": "question 0123456789"}\n')
    (folder / "deploy" / "secrets").mkdir(parents=True)
    KeyFile(folder / "keys.json").add("bob")
    with contextlib.ExitStack() as running:
        redis = running.enter_context(EmbeddedRedis(tmp_path_factory.mktemp("redis")))
        served = next(
            each
            for each in fenced()
            if each.words[:2] == ("slipstream", "serve")
            and {"--store", "--capture"} <= set(each.words)
            and "--engine" not in each.words
        )
        made = Workshop(folder, model, redis.url, served)
        log = folder / "gateway.log"
        words = [*made.meant(served)[1:], "--port", "0"]
        running.enter_context(service(log, *words, folder=folder, **made.environment))
        made.gateway_url = url_in(log)
        _answer(made.gateway_url)
        _roll_out(made)
        store = DraftStore(folder / "drafts")
        write_folder(folder / HEAD, store.load(1), store.config(1))
        _write_versions(store, target_fingerprint(model))
        _record(made, folder / "traffic.rec")
        yield made


def _answer(url: str) -> None:
    for number in range(NUM_ANSWERS):
        # To the last token: an answer that ends with its first one leaves no trace.
        body = {"model": "toy", "prompt": f"question {number}", "max_tokens": 40, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()

    def recorded() -> bool:
        sample = Scrape.parse(0, httpx.get(f"{url}/metrics").text)
        return sample.total("slipstream_traces_captured_total") == NUM_ANSWERS and not sample.total(
            "slipstream_traces_pending"
        )

    wait_until(recorded)


def _roll_out(workshop: Workshop) -> None:
    # One token leaves no trace.
    group = {"id": "sum", "prompt": "2 2", "n": 4, "max_tokens": 1}
    (workshop.folder / "groups.jsonl").write_text(json.dumps(group) + "\n")
    body = {"id": "step-1", "model": workshop.model.name, "groups": [group]}
    httpx.post(f"{workshop.gateway_url}/v1/rollouts", json=body, timeout=60).raise_for_status()


def _write_versions(store: DraftStore, fingerprint: str) -> None:
    """Two more, as if a trainer had published them."""
    for parent in (1, 2):
        weights = store.load(parent)
        weights["fc.weight"] = weights["fc.weight"] + 0.01
        manifest = store.write(weights, store.config(parent), parent=parent, target_fingerprint=fingerprint, info={})
        admit(store, manifest.version, target_fingerprint=fingerprint, actor="trainer", reason="better")
    for state in (VersionState.LIVE, VersionState.PROMOTED):
        store.lifecycle.move(2, state, actor="engine", reason="as good")


def _record(workshop: Workshop, out: Path) -> None:
    words = ["traces", "record", "--model", workshop.model, "--redis-url", workshop.redis_url, "--out", out]
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@dataclass
class Workshop:
    """`folder` has what the pages name: prompts, a recording, a store of three versions. Every command gets a copy."""

    folder: Path
    model: Path
    redis_url: str
    served: Command
    """The page's own way to serve; it answers at `gateway_url`."""
    gateway_url: str = ""

    def run(self, command: Command) -> None:
        """Run it and check that it ends well; a service has to come up, and to end on SIGTERM."""
        if command == self.served:
            return
        program, *words = self.meant(command)
        environment = self.environment | dict(assignment.split("=", 1) for assignment in command.environment)
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(shutil.copytree(self.folder, Path(scratch) / "copy"))
            if program == "curl":
                self._curl(words)
            elif words[0] in ("serve", "train"):
                _run_service(words, copy, environment)
            else:
                self._run_to_its_end(words, copy, environment)

    @property
    def environment(self) -> dict[str, str]:
        """What somebody exports who leaves `--redis-url` out; and nothing that makes a small thing slow."""
        return {
            "SLIPSTREAM_REDIS_URL": self.redis_url,
            "SLIPSTREAM_GATEWAY_ADMIN_KEY": ADMIN_KEY,
            "SLIPSTREAM_TRAINER_NICE": "0",
            "OMP_NUM_THREADS": "1",
        }

    def meant(self, command: Command) -> list[str]:
        """The command's words, with something that exists in the place of what a page can only name."""
        return [self._meant(word) for word in command.words]

    def _meant(self, word: str) -> str:
        whole = {
            "HEAD_DIR_OR_ID": HEAD,
            "DIR_OR_ID": str(self.model),
            "M": str(self.model),
            "41": "2",
            "42": "3",
            "300": "20",
        }
        word = whole.get(word, word)
        for shown, meant in (("redis://127.0.0.1:6379/0", self.redis_url), ("http://127.0.0.1:8000", self.gateway_url)):
            word = word.replace(shown, meant)
        word = word.replace('"NAME"', f'"{self.model.name}"')
        # The workshop has a rollout of that name, which the page's other commands ask about.
        word = word.replace('"id": "step-1"', '"id": "step-2"')
        return word.replace("$SLIPSTREAM_GATEWAY_ADMIN_KEY", ADMIN_KEY)

    def _run_to_its_end(self, words: list[str], copy: Path, environment: dict[str, str]) -> None:
        if words[0] == "doctor":
            # The bundled model takes a while, and 8000 may be in use on the machine that tests.
            words = ["doctor", "--port", "0", *(() if "--model" in words else ("--model", str(self.model))), *words[1:]]
        if words[0] == "drafts":
            self._point_at_the_newest()
        with contextlib.chdir(copy):
            result = CliRunner().invoke(app, words, env=environment, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    def _point_at_the_newest(self) -> None:
        """As the trainer leaves it; commands before have moved it."""
        with connect(self.redis_url) as client:
            pointer = DraftPointer(client, model_key(self.model, target_fingerprint(self.model)))
            pointer.unpin()
            pointer.publish(3)

    def _curl(self, words: list[str]) -> None:
        options = ("--fail-with-body", "--silent", "--show-error", "--max-time", "60")
        result = subprocess.run(["curl", *options, *words], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr + result.stdout
        assert result.stdout


def _run_service(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    if words[0] == "serve":
        words = [*words, "--port", "0"]
    sign = {"serve": '"event": "serving"', "train": '"event": "training"'}[words[0]]
    log = folder / "service.log"
    # Where `serve --learn` keeps what it learns.
    environment = {"XDG_DATA_HOME": str(folder / "data"), **environment}
    with service(log, *words, folder=folder, **environment) as process:
        wait_until(lambda: sign in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
