"""What benchmarks of SGLang do before and after they ask a server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, cast

import pytest

from benchmarks.common.decoding import NeverTogetherError, decode
from benchmarks.common.report import shuffled_prompts
from benchmarks.sglang_hybrid import _halves, _turns
from benchmarks.sglang_scene.servers import IN_TURNS, LEARNT_FROM, UNSEEN, _parted
from slipstream.demo.topics import Prompt, built_in_prompts
from speculator.errors import ConfigError
from tests.sglang.server import SglangServer


class Streams:
    """Answers a prompt of one number with as many events, the first of which has the whole first token."""

    def stream(self, ids: list[int], **_: Any) -> Iterator[dict[str, Any]]:
        for number in range(ids[0]):
            yield {"meta_info": {"completion_tokens": number + 1}}


def test_answers_of_one_event_have_no_rate() -> None:
    server = cast("SglangServer", Streams())
    with pytest.raises(NeverTogetherError):
        decode(server, [[1]])
    with pytest.raises(NeverTogetherError):
        decode(server, [[1], [40]])
    assert decode(server, [[40]]).rate > 0


def test_workloads_of_one_run_have_no_prompt_in_common() -> None:
    learnt, by_domain = _halves(built_in_prompts())
    arguments = argparse.Namespace(clients=2, turns=20, warm_up=2)
    turns = _turns(["editing", "rag", "mixed"], by_domain, arguments)
    assert [len(turns[name]) for name in ("editing", "rag", "mixed")] == [19, 14, 22], "rag and editing have fewer"
    texts = [text for of in turns.values() for turn in of for text in turn]
    assert len({*texts, *(prompt.text for prompt in learnt)}) == len(texts) + len(learnt)
    with pytest.raises(ConfigError, match="rag has 4 new prompts"):
        _turns(["rag"], {"rag": [Prompt("rag", str(number)) for number in range(4)]}, arguments)
    with pytest.raises(ConfigError, match="editing has 0"):
        _turns(["editing"], {"math": [Prompt("math", "1 + 1")]}, arguments)


@pytest.mark.parametrize("count", [300, 2260])
def test_prompts_that_are_asked_unseen_are_not_learnt_from(count: int) -> None:
    prompts = shuffled_prompts(None)[:count]
    chosen = _parted(prompts, UNSEEN.stop)
    unseen = set(chosen[UNSEEN])
    assert len(chosen) == LEARNT_FROM.stop
    assert len(unseen) == UNSEEN.stop - UNSEEN.start
    assert unseen.isdisjoint(chosen[IN_TURNS])
    assert set(chosen[LEARNT_FROM]).isdisjoint(chosen[: LEARNT_FROM.start])
    with pytest.raises(ConfigError, match="of 100 only 50"):
        _parted(prompts[:100], UNSEEN.stop)
