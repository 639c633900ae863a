"""Drafts come into real SGLang between two steps: nothing waits, nothing fails, no text changes.

The server computes in float32, where speculation and its absence give the same text token for token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.layers import amx_utils
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.upstream import Upstream
from serving.sglang.device import CpuDevice
from serving.sglang.swap import SglangDraft
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import serve
from tests.sglang.learning import train_version
from tests.sglang.plugged import Plugged, plugged_server
from tests.sglang.test_capture import QUESTIONS

ASKED = QUESTIONS[:8]


@pytest.fixture(scope="module")
def plugged(model_dir: Path, store: DraftStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugged]:
    with plugged_server(
        tmp_path_factory.mktemp("swap"), model_dir, store, flags=("--dtype", "float32", "--max-running-requests", "8")
    ) as server:
        yield server


@pytest.fixture(scope="module")
def plain(plugged: Plugged) -> dict[str, list[int]]:
    """The answers under the first version, without any swap."""
    return _ask_all(plugged)


@pytest.fixture(scope="module")
def trained(plugged: Plugged, plain: dict[str, list[int]], store: DraftStore, model_dir: Path) -> int:
    """A version that has learnt these answers from their traces."""
    return train_version(store, model_dir, plugged.traces(len(plain)).values(), num_steps=60)


def _ask(plugged: Plugged, question: str) -> dict[str, Any]:
    return plugged.server.generate(plugged.ids(question), max_new_tokens=48)


def _ask_all(plugged: Plugged) -> dict[str, list[int]]:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda question: _ask(plugged, question), ASKED)
        return {question: answer["output_ids"] for question, answer in zip(ASKED, answers, strict=True)}


def _publish(plugged: Plugged, version: int) -> dict[str, str]:
    plugged.pointer.publish(version)
    return plugged.wait_for(lambda report: report["version"] == str(version))


def test_a_version_learnt_from_traces_is_accepted_and_changes_no_text(
    plugged: Plugged, plain: dict[str, list[int]], trained: int
) -> None:
    question = ASKED[1]
    before = _ask(plugged, question)["meta_info"]
    report = _publish(plugged, trained)
    assert float(report["last_stall_ms"]) > 0
    answer = _ask(plugged, question)
    assert answer["output_ids"] == plain[question]
    assert before["spec_num_correct_drafts"] <= 2
    assert answer["meta_info"]["spec_accept_length"] > 1.4
    plugged.traces(2)


def test_swaps_under_load(plugged: Plugged, plain: dict[str, list[int]], trained: int) -> None:
    """Four clients without pause, six swaps between the random and the trained draft."""
    swaps = int(plugged.report()["swaps"])
    stop = False

    def client(number: int) -> list[tuple[str, list[int]]]:
        answers = []
        for turn in range(200):
            if stop:
                break
            question = ASKED[(number + turn) % len(ASKED)]
            answers.append((question, _ask(plugged, question)["output_ids"]))
        return answers

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        for _ in range(3):
            _publish(plugged, 1)
            _publish(plugged, trained)
        stop = True
        answers = [answer for done in clients for answer in done.result()]
    assert len(answers) >= 4
    for question, tokens in answers:
        assert tokens == plain[question], question
    traces = plugged.traces(len(answers)).values()
    assert any(len(set(trace.rounds.draft_version.tolist())) > 1 for trace in traces), "no swap fell into an answer"
    report = plugged.report()
    assert int(report["swaps"]) == swaps + 6
    assert report["swap_failures"] == "0"


def _version_dir(store: DraftStore, version: int) -> Path:
    return store.root / "versions" / f"{version:06d}"


def _forge(store: DraftStore, version: int, weights: dict[str, torch.Tensor], **manifest: Any) -> int:
    """A version with other weights whose manifest fits them, as only somebody with access to the store could make."""
    forged = (store.latest() or 0) + 1
    folder = _version_dir(store, forged)
    shutil.copytree(_version_dir(store, version), folder)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    values = json.loads((folder / "manifest.json").read_bytes())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    values |= {"version": forged, "weights_sha256": digest, **manifest}
    (folder / "manifest.json").write_text(json.dumps(values))
    for state in (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED):
        store.lifecycle.move(forged, state, actor="test")
    return forged


def _truncated(store: DraftStore, version: int) -> int:
    forged = _forge(store, version, store.load(version))
    path = _version_dir(store, forged) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return forged


def _wrong_shape(store: DraftStore, version: int) -> int:
    weights = store.load(version)
    return _forge(store, version, {**weights, "fc.weight": weights["fc.weight"][:-1].contiguous()})


def _with_embedding(store: DraftStore, version: int) -> int:
    weights = store.load(version)
    return _forge(store, version, {**weights, "embed_tokens.weight": torch.zeros(49152, 576, dtype=torch.bfloat16)})


def _not_finite(store: DraftStore, version: int) -> int:
    weights = store.load(version)
    return _forge(store, version, {**weights, "norm.weight": torch.full_like(weights["norm.weight"], float("nan"))})


def _other_target(store: DraftStore, version: int) -> int:
    return _forge(store, version, store.load(version), target_fingerprint="0" * 64)


@pytest.mark.parametrize("forge", [_truncated, _wrong_shape, _with_embedding, _not_finite, _other_target])
def test_a_bad_version_is_refused_and_serving_goes_on(
    plugged: Plugged, plain: dict[str, list[int]], trained: int, store: DraftStore, forge: Any
) -> None:
    in_service = plugged.report()["version"]
    bad = forge(store, trained)
    plugged.pointer.publish(bad)
    report = plugged.wait_for(lambda report: str(bad) in report["refused"].split(","))
    assert report["version"] == in_service
    assert store.lifecycle.state(bad) is VersionState.QUARANTINED
    assert _ask(plugged, ASKED[1])["output_ids"] == plain[ASKED[1]]
    plugged.traces(1)


def test_redis_may_die(plugged: Plugged, plain: dict[str, list[int]], trained: int) -> None:
    """Serving goes on without it; capture and swaps resume by themselves when it is back."""
    appended = int(plugged.report()["appended"])
    plugged.redis.stop()
    assert _ask(plugged, ASKED[2])["output_ids"] == plain[ASKED[2]]
    plugged.redis = EmbeddedRedis(plugged.redis.directory)
    plugged.connect()
    plugged.wait_for(lambda report: int(report["appended"]) > appended)
    plugged.traces(1)
    _publish(plugged, 1)
    assert _ask(plugged, ASKED[2])["output_ids"] == plain[ASKED[2]]
    plugged.traces(1)


def test_killed_in_the_middle_of_an_answer(plugged: Plugged) -> None:
    """Nothing asks this server afterwards. Behind a gateway nobody takes half an answer for a whole one."""
    asyncio.run(_ask_while_it_is_killed(plugged))


async def _ask_while_it_is_killed(plugged: Plugged) -> None:
    upstream, host = Upstream(plugged.server.url), DoubleEngine(model="killed", context_length=2048)
    app = create_passthrough_app(host, upstream, settings=GatewaySettings(), registry=CollectorRegistry())
    question = {"model": "killed", "prompt": "One, two, three,", "max_tokens": 400, "temperature": 0}
    async with (
        serve(app, grace_s=0) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        seen = 0

        async def read() -> None:
            nonlocal seen
            async for _ in await client.completions.create(**question, stream=True, extra_body={"ignore_eos": True}):
                seen += 1
                if seen == 3:
                    os.killpg(plugged.server.pid, signal.SIGKILL)

        with pytest.raises(openai.APIError):
            await read()
        assert seen >= 3
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(**question)
        assert refused.value.status_code == 503
        assert "retry-after" in refused.value.response.headers
    await upstream.close()


def test_weights_that_sglang_has_packed_for_amx_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's operators for AMX change the order of a layer's weight in place, once it is loaded."""
    monkeypatch.setattr(amx_utils, "cpu_has_amx_support", lambda: True)
    monkeypatch.setattr(torch.ops.sgl_kernel, "convert_weight_packed", lambda weight: weight.flip(1), raising=False)
    versions = {version: {"qkv.weight": torch.randn(32, 64, dtype=torch.bfloat16)} for version in (1, 2)}
    model = _OneLayer()
    model.load_weights(versions[1].items())
    amx_utils.PackWeightMethod(["weight"]).process_weights_after_loading(model.qkv)
    packed = model.qkv.weight
    draft = SglangDraft(model, 1, versions.__getitem__, device=CpuDevice(), alone=True)
    draft.install_draft(2)
    assert model.qkv.weight is packed
    assert torch.equal(packed, versions[2]["qkv.weight"].flip(1))


class _OneLayer(nn.Module):
    """As SGLang's draft: a layer of SGLang's own, and its weight loader."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Module()
        UnquantizedLinearMethod().create_weights(self.qkv, 64, [32], 64, 32, torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)
