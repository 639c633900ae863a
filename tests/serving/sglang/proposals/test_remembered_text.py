"""Whose text a request goes on after, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from serving.sglang.proposals.remembered_text import Continuations, RememberedText
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import Request

TEXT = list(range(100, 160))
SEEN = TEXT[:16]
"""Enough to be sure of how it goes on."""


def make_text(**changes: Any) -> RememberedText:
    return RememberedText(**{"depth": 8, "overlaps": False, "captures_unmarked": True, **changes})


def request(prompt: Sequence[int], answer: Sequence[int] = (), *, rid: str = "r", **policy: Any) -> Request:
    marks = {"custom_params": {"slipstream": {"tenant": "t", **policy}}} if policy.pop("marked", True) else {}
    made = Request(list(prompt), rid, max_new_tokens=64, **marks)
    made.output_ids += answer
    return made


def wrote(text: RememberedText, tokens: Sequence[int], **policy: Any) -> None:
    """A request that has answered with these tokens and ended."""
    done = request([1, 2, 3], **policy)
    text.find([done])
    done.output_ids += tokens
    text.find([done])


def found(text: RememberedText, asked: Any) -> list[int]:
    continuations = text.find([asked])
    return [] if continuations is None else tokens_of(continuations)[0]


def tokens_of(continuations: Continuations) -> list[list[int]]:
    rows = zip(continuations.tokens, continuations.counts, strict=True)
    return [tokens[:count].tolist() for tokens, count in rows]


def test_an_answer_goes_on_as_its_own_prompt() -> None:
    text = make_text()
    asked = request([*TEXT, 5], SEEN)
    continuations = text.find([asked, request([1, 2, 3], rid="other")])
    assert continuations is not None
    assert tokens_of(continuations) == [TEXT[16:24], []]
    assert continuations.first.tolist() == [len(TEXT) + 17, 3]
    gains = continuations.gains(range(9))
    assert gains.shape == (2, 9)
    assert gains[0, 0] == 0
    assert (gains[0, 1:] > gains[0, :-1]).all()
    assert not gains[1].any()


def test_no_more_than_the_answer_may_have() -> None:
    asked = request([*TEXT, 5], SEEN)
    asked.sampling_params.max_new_tokens = 19
    assert found(make_text(), asked) == TEXT[16:18], "the last token is the target's own"


@pytest.fixture
def behind() -> Iterator[RememberedText]:
    """A thread looks, and the device is a step ahead."""
    text = make_text(overlaps=True)
    yield text
    text.close()


def looked(text: RememberedText, requests: list[Any]) -> Continuations:
    text.processed(requests)
    wait_until(lambda: text.find(requests) is not None)
    continuations = text.find(requests)
    assert continuations is not None
    return continuations


def test_text_that_a_step_behind_has_found_reaches_further(behind: RememberedText) -> None:
    asked, other = request([*TEXT, 5], SEEN), request([1, 2, 3], rid="other")
    assert behind.find([asked]) is None, "nobody has looked yet"
    assert tokens_of(looked(behind, [other, asked])) == [[], TEXT[16:33]]
    unknown = request([*TEXT, 5], SEEN)
    later = behind.find([asked, unknown])
    assert later is not None
    assert tokens_of(later) == [TEXT[16:33], []]
    assert later.first.tolist()[0] == len(TEXT) + 17
    assert not later.gains([0, 8])[1].any()


def test_a_new_request_is_never_taken_for_one_that_is_gone(behind: RememberedText) -> None:
    """Python gives objects the ids of others that are gone."""
    ids = set()
    for number in range(20):
        asked = request([*TEXT, 5], SEEN, rid=str(number), tenant=str(number))
        looked(behind, [asked])
        ids.add(id(asked))
        del asked
        assert behind.find([request([1, 2, 3], tenant="other")]) is None
    assert len(ids) > 1


def test_what_ends_the_thread_is_raised_where_the_text_is_asked_for(behind: RememberedText) -> None:
    broken = request([*TEXT, 5], SEEN)
    del broken.sampling_params
    behind.processed([broken])
    wait_until(lambda: behind._error is not None)
    with pytest.raises(AttributeError):
        behind.find([request([1])])


def test_two_tenants_with_the_same_text_never_draft_from_each_other() -> None:
    text = make_text()
    wrote(text, TEXT, tenant="a")
    assert found(text, request([9], SEEN, tenant="b")) == []
    assert found(text, request([9], SEEN, tenant="a")) == TEXT[16:24]
    text.forget(["a"])
    assert found(text, request([9], SEEN, tenant="a")) == []


@pytest.mark.parametrize(("unmarked", "policy"), [(True, {"capture": False}), (False, {"marked": False})])
def test_who_opts_out_or_has_lost_its_policy_leaves_nothing(unmarked: bool, policy: dict[str, Any]) -> None:
    text = make_text(captures_unmarked=unmarked)
    wrote(text, TEXT, **policy)
    assert found(text, request([9], SEEN)) == []
    assert found(text, request([9], SEEN, **policy)) == []
    assert found(text, request([*TEXT, 9], SEEN, **policy)) == TEXT[16:24], "its own text is its own"


def test_old_text_and_that_of_targets_long_gone_is_dropped() -> None:
    short_lived = make_text(ttl_s=1e-9)
    wrote(short_lived, TEXT)
    assert found(short_lived, request([9], SEEN)) == []
    text = make_text(ttl_s=3600)
    wrote(text, TEXT)
    assert found(text, request([9], SEEN)) == TEXT[16:24]
    for version in range(5):
        text.target_renewed(version)
    assert found(text, request([9], SEEN)) == []


def test_siblings_of_a_group_go_on_after_each_other() -> None:
    text = make_text()
    first = request([1, 2, 3], TEXT[:20], group_id="g")
    text.find([first])
    assert found(text, request([1, 2, 3], SEEN, group_id="g")) == TEXT[16:20]


def test_pictures_are_no_text() -> None:
    asked = request([*TEXT, 5], SEEN)
    vars(asked)["multimodal_inputs"] = object()
    assert found(make_text(), asked) == []


def test_what_has_come_true_is_known_once_the_host_knows_the_tokens(behind: RememberedText) -> None:
    asked = [request([*TEXT, 5], SEEN, rid=name) for name in ("right", "wrong", "none")]
    asked[2].origin_input_ids = [1]
    continuations = looked(behind, asked)
    for one, token in zip(asked, (TEXT[16], 1, TEXT[16]), strict=True):
        one.output_ids.append(token)
    assert continuations.agree(asked, [True] * 3) == [True, False, False]
    assert continuations.agree(asked, [False, True, True]) == [False] * 3


def test_the_tokens_that_are_kept_are_counted() -> None:
    text = make_text()
    wrote(text, TEXT)
    for _ in range(64):
        text.find([])
    assert text.num_tokens >= len(TEXT)
    assert text.report() == {"text_tokens": text.num_tokens, "text_evicted": 0}
