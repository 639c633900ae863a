"""The examples as a reader runs them: against a server, on a recording, in the recorder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from examples import capture_filter, own_loss, replay_study
from examples.openai_client import ask
from serving.capture.filter import CaptureFilter
from speculator.draft.checkpoint import target_fingerprint
from speculator.recording import RecordingHeader, RecordingWriter
from speculator.trace import encode_trace
from tests.fixtures.toy import make_toy_model
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import url_in
from tests.slipstream.conftest import service
from tests.trainer.answers import answer_traces
from trainer.learning.labels import Labels

FOLDER = Path(replay_study.__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def url(model: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    words = ("serve", "--model", model, "--redis-url", redis_url, "--store", folder / "drafts", "--port", 0)
    words = (*words, "--capture", "--capture-filter", "examples.capture_filter:keep", "--draft-vocab-size", 24)
    with service(folder / "serve.log", *words):
        yield url_in(folder / "serve.log")


def test_the_client_reads_a_stream_and_the_accept_length(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    length = ask(f"{url}/v1", "again and again and again and again and again and again")
    said = capsys.readouterr().out
    assert 1 <= length <= 17
    assert f"a verification committed {length:.2f} tokens" in said
    assert re.search(r"\n[1-9]\d* tokens, of which \d+ were proposed", said)


def test_the_filter_drops_what_it_says(model: Path) -> None:
    assert capture_filter.keep("What is 2 + 2? 4", "default")
    for text in ("my password is x", "api-key: x", "write to a.b@example.org"):
        assert not capture_filter.keep(text, "default")
    assert not capture_filter.keep("What is 2 + 2? 4", "clinic")
    loaded = CaptureFilter.load("examples.capture_filter:keep", model)
    assert loaded is not None
    assert loaded.reason_to_drop(make_trace(tenant="clinic")) == "filtered"


def test_the_loss_is_least_where_draft_and_target_agree() -> None:
    same = torch.ones(1, dtype=torch.bool)
    labels = Labels(
        draft_ids=torch.tensor([[2, 0, 0]]),
        probs=torch.tensor([[0.75, 0.25, 0.0]]),
        tail=torch.zeros(1),
        temperature=torch.ones(1),
        greedy=~same,
        labelled=same,
    )
    agreeing = torch.tensor([[0.25, 1e-9, 0.75]]).log()
    opposed = torch.tensor([[1e-9, 1.0, 1e-9]]).log()
    assert own_loss.total_variation(agreeing, labels).item() == pytest.approx(0, abs=1e-6)
    assert own_loss.total_variation(opposed, labels).item() == pytest.approx(1, abs=1e-6)


def test_the_study_compares_losses_within_a_seed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "toy.rec"
    header = RecordingHeader(target_fingerprint=target_fingerprint(model), model="toy", created_ms=1)
    with RecordingWriter(recording, header) as writer:
        for trace in answer_traces(model, num_traces=10):
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
    found = replay_study.main([str(recording), "--model", str(model), "--seeds", "2", "--steps", "3"])
    assert {loss: len(lengths) for loss, lengths in found.items()} == dict.fromkeys(replay_study.LOSSES, 2)
    assert capsys.readouterr().out.count("tokens a verification") == len(replay_study.LOSSES)
    own = "examples.own_loss:total_variation"
    found = replay_study.main([str(recording), "--model", str(model), "--seeds", "1", "--steps", "3", "--loss", own])
    assert set(found) == {replay_study.LOSSES[0], own}


def test_litellms_configuration_names_what_a_server_serves() -> None:
    """That LiteLLM takes it was tried by hand: it wants an environment of its own."""
    config = yaml.safe_load((FOLDER / "litellm.yaml").read_text())
    [model] = config["model_list"]
    protocol, _, name = model["litellm_params"]["model"].partition("/")
    assert (protocol, name) == ("openai", "SmolLM2-135M-Instruct")
    assert model["litellm_params"]["api_base"] == "os.environ/SLIPSTREAM_URL"


def test_every_example_is_in_the_list() -> None:
    listed = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        assert path.name.startswith("__") or path.name == "README.md" or f"`{path.name}" in listed, path.name
