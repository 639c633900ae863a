"""The real small model that installs from a package: converted once, and right about France."""

from __future__ import annotations

from serving.engine import GenerateRequest
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.draft.initialization import fresh_draft
from tests.serving.local.harness import GREEDY, toy_engine


def test_the_bundled_model_answers_with_and_without_speculation() -> None:
    model_dir = resolve_model(BUNDLED_MODEL)
    assert resolve_model(BUNDLED_MODEL) == model_dir
    assert len({path.stat().st_mode for path in model_dir.iterdir()}) == 1, "containers run as another user"
    for depth in (0, 3):
        draft = fresh_draft(model_dir, seed=0)
        with toy_engine(model_dir, draft=draft, depth=depth, dtype="bfloat16") as harness:
            # The best token leads by a nat everywhere: CPUs whose sums round in different ways agree.
            question = "Name the capital of France in one sentence."
            prompt = tuple(harness.engine.tokenizer.encode_chat([{"role": "user", "content": question}]))
            request = GenerateRequest(request_id="1", prompt_token_ids=prompt, max_tokens=8, sampling=GREEDY)
            assert harness.ask(request)[0].text.startswith("The capital of France is Paris.")
