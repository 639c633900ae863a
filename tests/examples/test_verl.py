"""examples/verl on a toy model, with a real server; with verl's own classes where its environment is named."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.verl.rollouts import GroupedSampling, Settings, WeightFolder, WeightSender
from slipstream.children import running_child
from slipstream.client import Sample
from slipstream.demo.servers import wait_until_ready
from speculator.errors import ConfigError, EngineError
from speculator.host import free_port
from speculator.redis.embedded import EmbeddedRedis
from tests.fixtures.toy import make_toy_model, moved_model

ADMIN_KEY = "admin-key-of-the-verl-tests"
VERL_PYTHON = "VERL_PYTHON"
pytestmark = pytest.mark.timeout(900)  # a server starts, and a machine may be slow
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What verl's agent loop worker passes."""
Served = tuple[list[int], Sample]


class Server(NamedTuple):
    url: str
    model: Path
    targets: Path

    def settings(self, **other: Any) -> Settings:
        return Settings(url=self.url, targets=str(self.targets), **other)


@contextmanager
def serving(tmp_path: Path) -> Iterator[Server]:
    model = make_toy_model(tmp_path / "toy")
    url, targets = f"http://127.0.0.1:{(port := free_port())}", tmp_path / "targets"
    targets.mkdir()
    settings = {"SLIPSTREAM_GATEWAY_ADMIN_KEY": ADMIN_KEY, "SLIPSTREAM_GATEWAY_TARGETS_DIR": str(targets)}
    with EmbeddedRedis(tmp_path / "redis") as redis:
        serve = ("--model", model, "--redis-url", redis.url, "--store", tmp_path / "drafts", "--port", port)
        more = ("--draft-vocab-size", 24, "--dtype", "float32")
        with running_child("serve", [str(word) for word in (*serve, *more)], tmp_path, **settings) as child:
            wait_until_ready(url, [child], timeout_s=240)
            yield Server(url, model, targets)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


def ask(settings: Settings, prompts: dict[str, list[int]], *, n: int = 4, max_tokens: int = 12) -> list[Any]:
    """As verl: a coroutine a sample, the samples of a prompt in a row. Failures are among the results."""

    async def run() -> list[Any]:
        sampling = GroupedSampling(settings, max_tokens=max_tokens, logprobs=True)
        return await asyncio.gather(
            *(sampling.sample(uid, PLAIN, prompt_of(tokens)) for uid, tokens in prompts.items() for _ in range(n)),
            return_exceptions=True,
        )

    return asyncio.run(asyncio.wait_for(run(), 60))


def prompt_of(tokens: list[int]) -> Callable[[], Any]:
    async def make() -> list[int]:
        await asyncio.sleep(0)  # verl tokenizes in a thread
        return tokens

    return make


def check_logprobs(model: Path, answers: list[Served]) -> None:
    """The logprobs are those of these tokens under these weights."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, sample in answers:
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *sample.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
        assert sample.logprobs is not None
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-4, rtol=0)


def test_samples_come_as_verl_asks_and_weights_go(server: Server, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.model)
    prompts = {f"uid-{text}": tokenizer.encode(text, add_special_tokens=False) for text in ("what is 1", "a", "bc")}
    answers = ask(server.settings(), prompts)
    for number, (uid, tokens) in enumerate(prompts.items()):
        group = answers[4 * number : 4 * number + 4]
        assert [prompt for prompt, _ in group] == [tokens] * 4, uid
        assert [(sample.group_id, sample.sample) for _, sample in group] == [(str(number), n) for n in range(4)]
    samples = [sample for _, sample in answers]
    assert len({sample.seed for sample in samples}) == 12
    assert {sample.target_version for sample in samples} == {0}
    for sample in samples:
        assert (sample.tokens[-1] == tokenizer.eos_token_id) == (sample.finish_reason == "stop"), "the end is a token"
        assert len(sample.tokens) == 12 or sample.finish_reason == "stop"
    check_logprobs(server.model, answers)

    sender = WeightSender(server.settings(), server.model, dtype=torch.float32, admin_key=ADMIN_KEY)
    assert sender.open(0) is None, "the server was started with them"
    for version, seed in ((2, 1), (5, 2)):
        moved = moved_model(server.model, tmp_path / f"moved-{version}", seed=seed)
        written = sender.open(version)
        assert written is not None
        fill(written, moved)
        sender.send(version, written)
        answers = ask(server.settings(), prompts)
        assert {sample.target_version for _, sample in answers} == {version}
        check_logprobs(moved, answers)
        assert [folder.name for folder in server.targets.iterdir()] == [f"verl-{version}"]
    assert sender.open(5) is None, "the server has them"

    # Weights that do not fit are refused with the server's reason, and those in service stay.
    written = sender.open(6)
    assert written is not None
    written.add("model.norm.weight", torch.zeros(3))
    with pytest.raises(EngineError, match=r"weights of step 6.*target_refused"):
        sender.send(6, written)
    assert {sample.target_version for _, sample in ask(server.settings(), prompts, n=1)} == {5}
    wrong = WeightSender(server.settings(), server.model, dtype=torch.float32, admin_key="not-the-key-of-the-admin")
    written = wrong.open(7)
    assert written is not None
    with pytest.raises(EngineError, match="weights of step 7"):
        wrong.send(7, written)


def test_a_server_that_had_the_version_before_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps the weights that it has under this version, which may be those of another run."""
    model = make_toy_model(tmp_path / "toy")
    settings = Settings(url="http://gone", targets=str(tmp_path / "targets"))
    sender = WeightSender(settings, model, dtype=torch.float32, admin_key=ADMIN_KEY)
    answer = httpx.Response(200, json={"version": 5, "previous": 5, "stall_ms": 0.0})
    monkeypatch.setattr(httpx, "post", lambda *_, **__: answer)
    written = sender.open(5)
    assert written is not None
    fill(written, model)
    with pytest.raises(EngineError, match="has weights of step 5 already: restart it"):
        sender.send(5, written)


def fill(folder: WeightFolder, model: Path) -> None:
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, and yet the trainer has it
    for name, tensor in weights.items():
        folder.add(name, tensor)


def test_failures_say_why(server: Server) -> None:
    long = ask(server.settings(), {"good": [7, 8], "long": [7] * 600}, n=2)
    assert all(isinstance(answer, ConfigError) and "prompt long: " in str(answer) for answer in long)
    # More than the server has slots: an answer may end before its deadline is looked at.
    late = ask(server.settings(deadline_s=0.001), {"late": [7, 8]}, n=100, max_tokens=400)
    failed = [str(answer) for answer in late if isinstance(answer, EngineError)]
    assert failed
    assert all("was aborted (deadline" in reason for reason in failed)
    wrong = ask(server.settings(job="no name!"), {"a": [7]}, n=2)
    assert all(isinstance(answer, ConfigError) and "job" in str(answer) for answer in wrong)


def test_a_server_that_is_away_fails_every_sample() -> None:
    settings = Settings(url=f"http://127.0.0.1:{free_port()}", targets="/nowhere")
    away = ask(settings, {"a": [1], "b": [2]}, n=2)
    assert [str(answer) for answer in away] == [str(away[0])] * 4
    assert "nothing answers" in str(away[0])


def test_a_prompt_that_cannot_be_made_fails_its_samples() -> None:
    async def broken() -> list[int]:
        raise ConfigError("rollouts take text alone")

    async def run() -> None:
        sampling = GroupedSampling(Settings(url="http://127.0.0.1:1", targets="/"), max_tokens=4, logprobs=True)
        await sampling.sample("uid", PLAIN, broken)

    with pytest.raises(ConfigError, match="text alone"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "why"),
    [({}, "url"), ({"url": "http://a", "targets": "/t", "deadline": 3}, "deadline"), (None, "url")],
)
def test_settings_are_checked(given: dict[str, Any] | None, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine_kwargs.slipstream: .*{why}"):
        Settings.of({"slipstream": given})


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.2}, {"min_p": 0.1}])
def test_sampling_that_no_group_knows_is_refused(more: dict[str, float]) -> None:
    sampling = GroupedSampling(Settings(url="http://127.0.0.1:1", targets="/"), max_tokens=4, logprobs=True)
    with pytest.raises(ConfigError, match=next(iter(more))):
        asyncio.run(sampling.sample("uid", {**PLAIN, **more}, prompt_of([1])))


def test_large_weights_are_split_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.verl.rollouts._SHARD_BYTES", 64)
    folder = WeightFolder(tmp_path, ["a", "b", "c"], torch.bfloat16)
    shared = torch.ones(32)
    for number, name in enumerate(["a", "b", "unknown", "c"]):
        shared.fill_(number)  # the caller uses the memory again
        folder.add(name, shared[: 32 if name != "c" else 4])
    folder.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {"a": "model-00001.safetensors", "b": "model-00002.safetensors", "c": "model-00003.safetensors"}
    for name, value in (("a", 0.0), ("b", 1.0), ("c", 3.0)):
        tensor = safetensors.torch.load_file(tmp_path / index[name])[name]
        assert tensor.dtype == torch.bfloat16
        assert set(tensor.tolist()) == {value}


@pytest.mark.skipif(
    VERL_PYTHON not in os.environ,
    reason=f"set {VERL_PYTHON} to the Python of an environment with verl[verl-core]==0.9.1, httpx and msgspec",
)
def test_verls_own_classes(tmp_path: Path) -> None:
    """Its agent loop workers, DataProto, advantages and registry of rollouts, in its environment."""
    with serving(tmp_path) as server:
        check_verls_own_classes(server, tmp_path)


def check_verls_own_classes(server: Server, tmp_path: Path) -> None:
    new = moved_model(server.model, tmp_path / "moved")
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [os.environ[VERL_PYTHON], "-m", "tests.examples.verl_step", server.url, server.model, server.targets, new],
        env={**os.environ, "PYTHONPATH": str(root), "SLIPSTREAM_GATEWAY_ADMIN_KEY": ADMIN_KEY},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["address"] == server.url
    eos = AutoTokenizer.from_pretrained(server.model).eos_token_id
    for batch, version in ((said["before"], 0), (said["after"], 3)):
        assert batch["uid"] == [f"uid-{number}" for number in range(3) for _ in range(4)]
        assert batch["min_global_steps"] == [version] * 12
        assert [len(row) for row in batch["prompts"]] == [40] * 12
        assert [len(row) for row in batch["responses"]] == [16] * 12
        for row in range(12):
            mask, response = batch["response_mask"][row], batch["responses"][row]
            assert batch["prompts"][row] == batch["prompts"][row - row % 4], "the samples of a prompt are in a row"
            length = sum(mask)
            assert mask == [1] * length + [0] * (16 - length)
            assert length == 16 or response[length - 1] == eos
            assert batch["attention_mask"][row][40:] == mask
            drawn = torch.tensor(batch["rollout_log_probs"][row])
            assert drawn[length:].tolist() == [0.0] * (16 - length)
            torch.testing.assert_close(
                drawn[:length], torch.tensor(batch["log_probs"][row][:length]), atol=2e-4, rtol=0
            )
        # Rewards 0, 1, 2, 3 in each group: verl compares the samples of a prompt with each other alone.
        firsts = torch.tensor([row[0] for row in batch["advantages"]]).view(3, 4)
        assert torch.equal(firsts, firsts[:1].expand(3, 4))
        assert firsts[0].tolist() == sorted(firsts[0].tolist())
    assert [folder.name for folder in server.targets.iterdir()] == ["verl-3"]
    status, samples = said["queued"]["status"], said["queued"]["samples"]
    assert status == {f"uid-{number}": "train finished" for number in range(3)}
    assert sorted(samples) == [f"uid-{number}_{sample}_0" for number in range(3) for sample in range(4)]
    for sample in samples.values():
        lengths = {len(sample[name]) for name in ("responses", "response_mask", "rollout_log_probs")}
        assert lengths == {sample["response_len"]}
        assert (sample["global_steps"], sample["min_global_steps"], sample["max_global_steps"]) == (4, 3, 3)
