"""A target that moves under real SGLang: by its own updates, with what runs going on, and the draft left alone."""

from __future__ import annotations

import asyncio
import base64
import functools
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from serving.answer_text import LocalTokenizer
from serving.engine import CapturePolicy
from serving.rollout.driver import Driver
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.order import ContextAware
from serving.rollout.samples import GroupRequest, GroupWork, SampleResult, SampleState
from serving.rollout.scheduler import Policy
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.rollouts import PoolSettings, ServerPool
from serving.target import read_layout
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import EngineError, TargetError
from speculator.versions.store import DraftStore
from tests.sglang.plugged import ENGINE_ID, Plugged, plugged_server
from tests.sglang.server import IS_ON_GPU

QUESTION = "Name three rivers, and say where they end."


@pytest.fixture(scope="module")
def plugged(model_dir: Path, draft_store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    flags = ("--dtype", "float32", "--max-running-requests", "8")
    with plugged_server(tmp_path_factory.mktemp("target"), model_dir, draft_store, flags=flags) as server:
        yield server


@pytest.fixture(scope="module")
def step(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights after a step of somebody's training."""
    folder = tmp_path_factory.mktemp("targets") / "step-1"
    shutil.copytree(model_dir, folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        weights = safetensors.torch.load_file(file)
        safetensors.torch.save_file({name: _moved(one, generator) for name, one in weights.items()}, file)
    return folder


def _moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    return (weight.float() * (1 + 0.05 * noise)).to(weight.dtype)


@pytest.fixture
def client(plugged: Plugged, model_dir: Path) -> Iterator[SglangClient]:
    with closing_client(plugged) as client:
        client.target_layout = functools.partial(read_layout, model_dir)
        yield client


def closing_client(plugged: Plugged) -> closing[SglangClient]:
    client = SglangClient(
        plugged.server.url,
        plugged.pointer,
        engine_id=ENGINE_ID,
        draft_version=1,
        is_process_alive=lambda: True,
        poll_s=0.1,
    )
    client.close = client.stop  # type: ignore[attr-defined]
    client.start()
    return closing(client)


def follows(folder: Path, prompt: list[int], answer: list[int]) -> bool:
    """Whether the answer is the greedy one of the model in `folder`; where two tokens are as likely, either is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((chosen >= logits.max(1).values - 1e-2).all())


def group(plugged: Plugged, name: str, alpha: int | None) -> GroupWork:
    request = GroupRequest(
        group_id=name,
        prompt_token_ids=tuple(plugged.ids(f"Write a long story about the {name}.")),
        seeds=(0, 1),
        max_tokens=160,
        max_staleness=alpha,
    )
    policy = CapturePolicy(tenant="t", group_id=name)
    return GroupWork(request=request, sampling=SamplingParams(temperature=0.0), ignore_eos=True, policy=policy)


def test_a_step_of_training_comes_into_service_between_two_tokens(
    plugged: Plugged, client: SglangClient, model_dir: Path, step: Path
) -> None:
    """What may mix targets goes on under the new weights, what may not ends with tokens of the old ones alone."""
    before = plugged.server.generate(plugged.ids(QUESTION), max_new_tokens=24)["output_ids"]
    assert follows(model_dir, plugged.ids(QUESTION), before)
    results: list[SampleResult] = []

    async def scene() -> None:
        driver = Driver([], Policy(order=ContextAware(), chunk_tokens=64), on_ended=results.append)
        wiring = PoolSettings(
            tokenizer=LocalTokenizer(model_dir),
            target="",
            share=SlotsShare(),
            target_version=lambda: 0,
            heeds_seed=lambda: False,
            end_group=lambda tenant, group_id: None,
        )
        async with ServerPool((plugged.server.url,), False, wiring, poll_s=0.1).running(driver.set_engines):
            await until(driver, lambda: driver.has_engine)
            driver.submit([group(plugged, "sea", None), group(plugged, "moon", 0)])
            await until(driver, lambda: driver.num_tokens >= 64)
            moved = await asyncio.to_thread(client.update_target, 1, step)
            assert (moved.version, moved.previous) == (1, 0)
            assert moved.stall_ms > 0
            driver.set_target_version(1)
            await until(driver, lambda: len(results) == 4)
            await driver.close()

    asyncio.run(asyncio.wait_for(scene(), 240))
    for result in results:
        prompt, tokens = plugged.ids(f"Write a long story about the {result.sample_id.group_id}."), list(result.tokens)
        assert result.target_version == 0
        if result.sample_id.group_id == "sea":
            assert (result.state, len(tokens)) == (SampleState.FINISHED, 160)
            assert not follows(model_dir, prompt, tokens), "it went on under the new weights"
        else:
            assert (result.state, 0 < len(tokens) < 160) == (SampleState.STALE, True)
            assert follows(model_dir, prompt, tokens)
    after = plugged.server.generate(plugged.ids(QUESTION), max_new_tokens=24)
    assert after["meta_info"]["weight_version"] == "1"
    assert after["output_ids"] != before, "also where a prefix was cached"
    assert follows(step, plugged.ids(QUESTION), after["output_ids"])
    report = plugged.wait_for(lambda report: report["target_version"] == report["target_label"] == "1")
    assert (report["version"], report["failures"]) == ("1", "")
    traced = [trace.header.target_version for trace in plugged.traces(4).values()]
    assert sorted(traced) == [0, 1, 1, 1], "of what went on its whole text, as the new weights have read it"


def test_weights_that_do_not_fit_leave_the_server_as_it_was(
    plugged: Plugged, client: SglangClient, step: Path, tmp_path: Path
) -> None:
    served = plugged.server.generate(plugged.ids(QUESTION), max_new_tokens=24)["output_ids"]
    half = tmp_path / "half"
    shutil.copytree(step, half)
    [file] = half.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(TargetError, match="half"):
        client.update_target(2, half)
    client.target_layout = None
    with pytest.raises(EngineError, match="version 2 is not on"):
        client.update_target(2, tmp_path / "nowhere")
    after = plugged.server.generate(plugged.ids(QUESTION), max_new_tokens=24)
    assert (after["output_ids"], after["meta_info"]["weight_version"]) == (served, "1")


@pytest.mark.skipif(IS_ON_GPU, reason="tensors would have to be shared with the server's device")
def test_weights_from_tensors_are_the_targets_too_and_without_a_label_the_next_version(
    plugged: Plugged, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    # By the names of files: descriptors pass between parents and children alone.
    monkeypatch.setattr("torch.multiprocessing._sharing_strategy", "file_system")

    before = int(plugged.report()["target_version"])
    weights = [
        (name, weight)
        for file in model_dir.glob("*.safetensors")
        for name, weight in safetensors.torch.load_file(file).items()
    ]
    with httpx.Client(base_url=plugged.server.url, timeout=100, trust_env=False) as http:
        for path, body in (("pause_generation", {"mode": "retract"}), ("begin_weight_update", {"selector": "all"})):
            assert http.post(f"/{path}", json=body).is_success
        for part in (weights[::2], weights[1::2]):
            said = base64.b64encode(MultiprocessingSerializer.serialize(part)).decode()
            body = {"serialized_named_tensors": [said], "flush_cache": True}
            assert http.post("/update_weights_from_tensor", json=body).json()["success"]
        for path in ("end_weight_update", "continue_generation"):
            assert http.post(f"/{path}", json={}).is_success
    answer = plugged.server.generate(plugged.ids(QUESTION), max_new_tokens=24)["output_ids"]
    assert follows(model_dir, plugged.ids(QUESTION), answer)
    report = plugged.wait_for(lambda report: report["target_version"] != str(before))
    assert report["target_version"] == str(before + 1), "two parts are one update"
    label = {"new_version": str(before + 3), "abort_all_requests": False}
    assert httpx.post(f"{plugged.server.url}/update_weight_version", json=label, trust_env=False).is_success
    plugged.wait_for(lambda report: report["target_version"] == report["target_label"] == str(before + 3))


async def until(driver: Driver, condition: object) -> None:
    assert callable(condition)
    while not condition():
        driver.tick()
        await asyncio.sleep(0.01)
