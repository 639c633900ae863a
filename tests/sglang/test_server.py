"""Real SGLang serves EAGLE-3 on a CPU: the same text with and without speculation, and its endpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculator.draft.checkpoint import target_fingerprint
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.sglang.server import ServerEndedError, SglangServer, speculative_flags

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "List five animals that live in the sea and say a sentence about each of them:\n1.",
    "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0",
)
MAX_TOKENS = 48


def ask_all(server: SglangServer, prompts: Sequence[Sequence[int]]) -> list[dict]:
    """All at the same time, so that they decode in one batch."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, max_new_tokens=MAX_TOKENS, ignore_eos=True), prompts))


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def guessing_draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft that can propose four tokens only, so that its guesses are right now and then."""
    store = DraftStore(tmp_path_factory.mktemp("guesses"))
    ensure_lineage(store, model_dir, target_fingerprint(model_dir), draft_vocab_size=4, texts=[PROMPTS[-1]])
    return store.root / "versions" / "000001"


def gaps(model_dir: Path, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """By how much Hugging Face's best logit beats that of each token served, given the same tokens before it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.max(-1).values - logits_TV[range(len(answer)), list(answer)]


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_greedy_text_is_the_targets_own(
    model_dir: Path, guessing_draft_dir: Path, prompts: list[list[int]], tmp_path: Path, topk: int
) -> None:
    """Exactly so in float32, where no two logits are closer than the difference between two ways to add them up."""
    flags = [*speculative_flags(guessing_draft_dir, topk=topk), "--dtype", "float32"]
    with SglangServer(model_dir, log_path=tmp_path / "sglang.log", flags=flags) as server:
        answers = ask_all(server, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer["output_ids"]) == MAX_TOKENS
        assert gaps(model_dir, prompt, answer["output_ids"]).max() < 1e-3, answer["text"]
    # Neither way through a verification stayed untried.
    proposed = sum(answer["meta_info"]["spec_num_proposed_drafts"] for answer in answers)
    correct = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    assert 10 < correct < proposed - 10


@pytest.fixture(scope="module")
def adaptive_server(
    model_dir: Path, draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """In bfloat16, with a draft that knows nothing and SGLang's own choice between three depths."""
    home = tmp_path_factory.mktemp("adaptive")
    config = home / "adaptive.json"
    config.write_text(json.dumps({"1": {"candidate_steps": [0, 1, 3]}}))
    flags = [*speculative_flags(draft_dir), "--speculative-adaptive", "--speculative-adaptive-config", str(config)]
    with SglangServer(model_dir, log_path=home / "sglang.log", flags=flags) as server:
        yield server


def test_adaptive_speculation_turns_drafting_off_without_changing_the_text(
    adaptive_server: SglangServer, model_dir: Path, prompts: list[list[int]]
) -> None:
    answers = ask_all(adaptive_server, prompts)
    gap = torch.cat([gaps(model_dir, *pair) for pair in zip(prompts, (a["output_ids"] for a in answers), strict=True)])
    # bfloat16 has 8 bits: logits near 16 are 0.1 apart, and only where two are that close may the choice differ.
    assert gap.max() < 0.5
    assert (gap > 0).float().mean() < 0.05
    assert re.search(r"steps \d -> 0", adaptive_server.log_text())
    assert re.search(r"steps 0 -> 1", adaptive_server.log_text())


def test_the_openai_endpoint_answers(adaptive_server: SglangServer) -> None:
    with openai.OpenAI(base_url=f"{adaptive_server.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        question = {"role": "user", "content": "What is the capital of France?"}
        chunks = list(
            client.chat.completions.create(model=model, messages=[question], temperature=0, max_tokens=8, stream=True)
        )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("The capital of France is Paris.")


def test_the_native_endpoints_answer(adaptive_server: SglangServer) -> None:
    parts = list(adaptive_server.stream(PROMPTS[0], max_new_tokens=8))
    assert len(parts) > 1
    whole = adaptive_server.generate(PROMPTS[0], max_new_tokens=8)
    assert parts[-1]["text"] == whole["text"]
    info = adaptive_server.server_info()
    assert info["version"] == "0.5.23"
    assert info["speculative_algorithm"] == "EAGLE3"


def test_a_server_that_cannot_start_is_reported_at_once(model_dir: Path, tmp_path: Path) -> None:
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "many"]
    server = SglangServer(model_dir, log_path=tmp_path / "sglang.log", flags=flags)
    with pytest.raises(ServerEndedError, match="invalid int value: 'many'"), server:
        pass
