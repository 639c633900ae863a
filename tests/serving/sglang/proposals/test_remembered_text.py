"""Whose text a request goes on after, and what is left of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupKey, GroupTextPiece, GroupTexts, ReadPosition, decode_pieces, encode_piece
from serving.metrics import GroupTextMetrics
from serving.sglang.plugin.part_guard import PartGuard
from serving.sglang.proposals.remembered_text import Continuations, RememberedText
from speculator.host import now_ms
from speculator.redis.client import open_client
from speculator.redis.embedded import EmbeddedRedis
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


def test_a_health_check_leaves_no_text() -> None:
    """SGLang asks itself, for a token."""
    text = make_text()
    wrote(text, TEXT, rid="HEALTH_CHECK_1b2c", marked=False)
    assert found(text, request([9], SEEN, marked=False)) == []
    wrote(text, TEXT, marked=False)
    assert found(text, request([9], SEEN, marked=False)) == TEXT[16:24]


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


def test_text_that_cannot_be_looked_for_any_more_is_gone_and_nothing_is_queued(behind: RememberedText) -> None:
    newest = request([*TEXT, 5], SEEN)
    looked(behind, [newest])
    broken = request([1])
    del broken.sampling_params
    behind.processed([broken])
    wait_until(lambda: behind._error is not None)
    guard = PartGuard("text", off=behind.stop)
    assert guard(behind.find, [newest]) is None
    assert guard.is_off
    freed = weakref.ref(newest)
    del newest
    gc.collect()
    assert freed() is None
    for number in range(3):
        behind.drop("t", f"g{number}")
    behind.target_updated(2)
    behind.forget(["t"])
    assert not behind._drafter._tenants
    assert behind.report()["text_tokens"] == 0


def test_a_lookup_under_way_when_text_is_stopped_is_the_last() -> None:
    text, asked = make_text(overlaps=True), request([*TEXT, 5], SEEN)
    assert text._thread is not None
    with text._looking:
        text.processed([asked])
        wait_until(lambda: text._jobs.empty())
        stopping = threading.Thread(target=text.stop)
        stopping.start()
    stopping.join(10)
    text._thread.join(10)
    assert (text._thread.is_alive(), text._found, text._error) == (False, None, None)
    assert not text._drafter._tenants


def test_an_order_to_erase_takes_effect_where_nothing_is_looked_up() -> None:
    text = make_text(ttl_s=3600)
    wrote(text, TEXT, tenant="a", group_id="g")
    wrote(text, TEXT, tenant="b", group_id="g")
    text.drop("a", "g")
    assert not text._drafter._tenants["a"].groups
    text.forget(["a"])
    assert list(text._drafter._tenants) == ["b"]
    assert not text._drafter._of_slot, "requests that have ended"
    text.expire()
    assert list(text._drafter._tenants) == ["b"]
    text._ttl_s = 1e-9
    text.expire()
    assert not text._drafter._tenants


def test_two_tenants_with_the_same_text_never_draft_from_each_other() -> None:
    text = make_text()
    wrote(text, TEXT, tenant="a")
    assert found(text, request([9], SEEN, tenant="b")) == []
    assert found(text, request([9], SEEN, tenant="a")) == TEXT[16:24]
    text.forget(["a"])
    assert found(text, request([9], SEEN, tenant="a")) == []


def test_the_text_of_a_group_that_has_ended_goes_and_no_other() -> None:
    text = make_text()
    for group_id in ("g", "h"):
        wrote(text, TEXT, group_id=group_id, tenant=group_id)
    text.drop("g", "h")
    text.drop("nobody", "g")
    text.drop("h", "h")
    # What a tenant has written stays its own.
    assert found(text, request([9], SEEN, tenant="h")) == TEXT[16:24]
    assert [list(text._drafter._tenants[tenant].groups) for tenant in ("g", "h")] == [["g"], []]


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
        text.target_updated(version)
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


# -- groups that engines share ----------------------------------------------------------------------------------------

PROMPT = [1, 2, 3]
"""Of what `wrote` writes; it is published, too, as far as a match reaches back."""
LATER = list(range(200, 260))


@contextlib.contextmanager
def engine(texts: GroupTexts, *, most: int = 1000, **changes: Any) -> Iterator[RememberedText]:
    """Its clock stands, so that a group goes on being read while a test waits."""
    sharing = GroupSharing(
        texts,
        vocab_size=1000,
        metrics=GroupTextMetrics(),
        max_queued_tokens=most,
        interval_s=0.01,
        clock=lambda: 0.0,
    )
    text = make_text(sharing=sharing, **changes)
    try:
        yield text
    finally:
        text.close()


@pytest.fixture
def texts(redis_client: redis.Redis) -> GroupTexts:
    return GroupTexts(redis_client, "m")


@pytest.fixture
def one(texts: GroupTexts) -> Iterator[RememberedText]:
    with engine(texts, captures_unmarked=False) as text:
        yield text


@pytest.fixture
def other(texts: GroupTexts) -> Iterator[RememberedText]:
    with engine(texts) as text:
        yield text


def count(text: RememberedText, outcome: str) -> int:
    assert text.sharing is not None
    return text.sharing.metrics.tokens[outcome]


def published(texts: GroupTexts, tenant: str = "t") -> list[int]:
    """Of group g."""
    group = GroupKey(tenant, "g")
    place, _ = texts.fetch({group: ReadPosition()})[group]
    _, data = texts.fetch({group: place})[group]
    return [token for piece, _ in decode_pieces(data, vocab_size=1000) for token in piece.tokens]


def test_a_sibling_on_another_engine_is_continued_and_nobody_elses_group(
    one: RememberedText, other: RememberedText, texts: GroupTexts
) -> None:
    sibling, strangers = request([9], SEEN, group_id="g"), request([9], SEEN, group_id="g", tenant="u")
    another = request([9], SEEN, group_id="h")
    for asked in (strangers, another, sibling):
        assert found(other, asked) == []
    wrote(one, TEXT, group_id="g")
    wait_until(lambda: found(other, sibling) == TEXT[16:24])
    assert found(other, strangers) == found(other, another) == []
    wait_until(lambda: count(one, "published") == len(PROMPT + TEXT))
    assert count(other, "fetched") == len(PROMPT + TEXT)
    assert published(texts, "u") == [9, *SEEN]


def test_the_thread_that_looks_takes_and_publishes_as_well(texts: GroupTexts) -> None:
    with engine(texts, overlaps=True) as one, engine(texts, overlaps=True) as other:
        asked, sibling = request([*TEXT, 5], SEEN, group_id="g"), request([9], [SEEN[0]], group_id="g")
        looked(one, [asked])
        sibling.output_ids += SEEN[1:]

        def goes_on() -> bool:
            other.processed([sibling])
            continuations = other.find([sibling])
            return continuations is not None and tokens_of(continuations) == [LATER[:17]]

        asked.output_ids += LATER[:20]
        looked(one, [asked])
        wait_until(goes_on)


@pytest.mark.parametrize("policy", [{"capture": False}, {"marked": False}])
def test_nothing_of_who_opts_out_is_published_or_fetched_for_it(
    one: RememberedText, other: RememberedText, texts: GroupTexts, policy: dict[str, Any]
) -> None:
    wrote(one, TEXT, group_id="g", **policy)
    wrote(one, LATER, group_id="g")
    wait_until(lambda: count(one, "published") == len(PROMPT + LATER))
    assert published(texts) == PROMPT + LATER
    private = request([9], LATER[:16], group_id="g", **policy)
    assert found(other, private) == []
    wait_until(lambda: found(other, request([9], LATER[:16], group_id="g")) == LATER[16:24])
    assert found(other, private) == []


def test_bytes_of_somebody_else_are_counted_and_not_read_on(one: RememberedText, texts: GroupTexts) -> None:
    def piece(text: int, tokens: Sequence[int]) -> bytes:
        return encode_piece(GroupTextPiece(1, text, 0, 0, now_ms(), list(tokens)))

    texts.append({GroupKey("t", "g"): piece(1, TEXT) + piece(2, [5000]) + piece(3, LATER)})
    sibling = request([9], SEEN, group_id="g")
    wait_until(lambda: found(one, sibling) == TEXT[16:24])
    assert one.sharing is not None
    assert one.sharing.metrics.unreadable == 1
    assert found(one, request([9], LATER[:16], group_id="g")) == []
    assert count(one, "fetched") == len(TEXT)


def test_text_of_an_erased_tenant_does_not_come_back(one: RememberedText, other: RememberedText) -> None:
    """Not even what is in Redis still: the erasing command removes that after everybody has forgotten."""
    wrote(one, TEXT, group_id="g")
    wait_until(lambda: found(other, request([9], SEEN, group_id="g")) == TEXT[16:24])
    for text in (one, other):
        text.forget(["t"])
    erased_ms = now_ms()
    wait_until(lambda: now_ms() > erased_ms)
    wrote(one, LATER, group_id="g")
    wait_until(lambda: found(other, request([9], LATER[:16], group_id="g")) == LATER[16:24])
    assert found(other, request([9], SEEN, group_id="g")) == []


def test_text_of_targets_long_gone_is_not_taken(one: RememberedText, other: RememberedText) -> None:
    wrote(one, TEXT, group_id="g")
    wait_until(lambda: count(one, "published") == len(PROMPT + TEXT))
    for text in (one, other):
        text.target_updated(5)
    wrote(one, LATER, group_id="g")
    wait_until(lambda: found(other, request([9], LATER[:16], group_id="g")) == LATER[16:24])
    assert found(other, request([9], SEEN, group_id="g")) == []


def test_without_redis_engines_go_on_alone_and_share_once_it_is_there(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.url
    server.stop()
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(open_client(url)) for _ in range(2)]
        one, other = (opened.enter_context(engine(GroupTexts(client, "m"), most=100)) for client in clients)
        wrote(one, TEXT, group_id="g")
        wrote(one, LATER, group_id="g")
        assert count(one, "buffer_full") == len(LATER)
        assert found(one, request([9], SEEN, group_id="g")) == TEXT[16:24]
        sibling = request([9], SEEN, group_id="g")
        assert found(other, sibling) == []
        server = EmbeddedRedis(tmp_path)
        wait_until(lambda: found(other, sibling) == TEXT[16:24])
        server.stop()
        wrote(one, LATER, group_id="g")
        assert found(one, request([9], LATER[:16], group_id="g")) == LATER[16:24]
