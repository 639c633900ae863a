"""Groups shared between engines: what one publishes another may propose, its own tenant's and no other's."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from serving.engine import CapturePolicy
from serving.group_cache.sync import FollowedGroup, GroupSharing
from serving.group_cache.texts import GroupKey, GroupTextPiece, GroupTexts, encode_piece
from serving.metrics import GroupTextMetrics
from speculator.host import now_ms
from speculator.proposals.suffix_index import SuffixIndex
from speculator.redis.client import RedisKeys, connect
from speculator.redis.embedded import EmbeddedRedis
from tests.fixtures.toy import make_toy_model, random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import Harness, toy_engine

GROUP = GroupKey("anna", "g")
TEXT = [1, 2, 3, 4, 5, 6, 7, 8]


def followed(index: SuffixIndex, after: list[int]) -> list[int]:
    """What comes behind these tokens."""
    found: list[int] = []
    votes = index.votes(index.match(after).places)
    while votes:
        found.append(votes[0].token)
        votes = index.votes(votes[0].places)
    return found


@dataclass
class Peer:
    """One engine's part, without the engine."""

    sharing: GroupSharing
    registry: CollectorRegistry

    def tokens(self, outcome: str) -> float:
        return self.registry.get_sample_value("slipstream_group_text_tokens_total", {"outcome": outcome}) or 0

    def takes(self, index: SuffixIndex, after: list[int]) -> list[int]:
        """What the index has once something has come, behind these tokens."""
        self.sharing.index_received()
        return followed(index, after)

    def sees(self, index: SuffixIndex, tokens: list[int]) -> bool:
        return self.takes(index, tokens[:2]) == tokens[2:]


@contextlib.contextmanager
def peer_of(client: redis.Redis, **options: object) -> Iterator[Peer]:
    """Its clock stands, so that a group goes on being read while a test waits."""
    registry = CollectorRegistry()
    sharing = GroupSharing(
        GroupTexts(client, "m"),
        vocab_size=1000,
        metrics=GroupTextMetrics(),
        interval_s=0.01,
        **{"clock": lambda: 0.0, **options},  # type: ignore[arg-type]
    )
    registry.register(sharing.metrics)
    try:
        yield Peer(sharing, registry)
    finally:
        sharing.close(5)


@pytest.fixture
def one(redis_client: redis.Redis) -> Iterator[Peer]:
    with peer_of(redis_client) as peer:
        yield peer


@pytest.fixture
def other(redis_client: redis.Redis) -> Iterator[Peer]:
    with peer_of(redis_client) as peer:
        yield peer


def follow(peer: Peer, group: GroupKey = GROUP) -> SuffixIndex:
    """A sample begins there: the group is read while it commits."""
    index = SuffixIndex(1000)
    peer.sharing.join(group, index, [900])
    return index


def test_text_comes_as_it_is_committed_and_does_not_come_back(one: Peer, other: Peer) -> None:
    mine, theirs = SuffixIndex(1000), follow(other)
    publish = one.sharing.join(GROUP, mine, TEXT[:2])
    publish(TEXT[2:5])
    wait_until(lambda: other.sees(theirs, TEXT[:5]))
    publish(TEXT[5:])
    wait_until(lambda: other.sees(theirs, TEXT))
    assert len(mine) == 0
    wait_until(lambda: one.tokens("published") == len(TEXT))
    assert other.tokens("fetched") == len(TEXT)


def test_a_tenant_never_sees_another_ones_group_of_the_same_name(one: Peer, other: Peer) -> None:
    bo, anna = follow(other, GroupKey("bo", "g")), follow(other)
    one.sharing.join(GROUP, SuffixIndex(10), TEXT)
    wait_until(lambda: other.sees(anna, TEXT))
    assert len(bo) == 0


def test_an_index_that_was_dropped_is_filled_again_with_the_own_text_too(one: Peer) -> None:
    first = SuffixIndex(1000)
    one.sharing.join(GROUP, first, TEXT)
    wait_until(lambda: one.tokens("published"))
    again = follow(one)
    wait_until(lambda: one.sees(again, TEXT))
    assert len(first) == 0


def test_work_between_two_steps_is_bounded(one: Peer, other: Peer) -> None:
    theirs = follow(other)
    one.sharing.join(GROUP, SuffixIndex(10), [1] * 5000)
    sizes = [0]

    def has_taken_all() -> bool:
        other.sharing.index_received()
        sizes.append(len(theirs))
        return sizes[-1] == 1000

    wait_until(has_taken_all)
    assert other.tokens("fetched") > 600
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 512


def test_a_group_that_never_ends_remembers_so_many_texts_and_no_more() -> None:
    index = SuffixIndex(1000)
    group = FollowedGroup(GROUP, weakref.ref(index), max_texts=3)

    def take(text: int, start: int, tokens: list[int]) -> int:
        return group.add_piece(
            GroupTextPiece(source=1, text=text, start=start, target_version=0, at_ms=now_ms(), tokens=tokens),
        )

    for text in range(10):
        take(text, 0, [text, 50])
        take(0, 2 + text, [51])
    assert [text for _, text in group.texts] == [8, 9, 0], "those that grew last"
    assert take(5, 2, [60, 61, 62]) == 3, "goes on, as a new text"
    assert followed(index, [60]) == [61, 62]
    assert len(group.texts) == 3


def test_a_group_that_ended_is_gone_everywhere(one: Peer, other: Peer, redis_client: redis.Redis) -> None:
    mine = SuffixIndex(10)
    publish = one.sharing.join(GROUP, mine, TEXT)
    wait_until(lambda: one.tokens("published"))
    one.sharing.drop(*GROUP)
    wait_until(lambda: not redis_client.exists(RedisKeys(model_key="m").group_text(GROUP.member)))
    publish([9])
    theirs = follow(other)
    wait_until(lambda: other.tokens("published"))
    other.sharing.index_received()
    assert (one.tokens("published"), len(theirs)) == (len(TEXT), 0)


def test_samples_that_come_late_do_not_bring_a_groups_text_back(redis_client: redis.Redis) -> None:
    other, key, now_s = GroupKey("anna", "other"), RedisKeys(model_key="m").group_text(GROUP.member), [0.0]
    with peer_of(redis_client, max_followed=1, clock=lambda: now_s[0]) as one:
        goes_on = one.sharing.join(GROUP, SuffixIndex(10), TEXT)
        of_other = one.sharing.join(other, SuffixIndex(10), TEXT)  # pushes it out
        wait_until(lambda: one.tokens("published") == 2 * len(TEXT))
        one.sharing.drop(*GROUP)
        goes_on([9])
        one.sharing.join(GROUP, SuffixIndex(10), TEXT)([9])
        for more in (1, 2):
            of_other([9])
            wait_until(lambda more=more: one.tokens("published") == 2 * len(TEXT) + more)
        assert not redis_client.exists(key)
        now_s[0] = 60.0
        one.sharing.join(GROUP, SuffixIndex(10), TEXT)
        wait_until(lambda: redis_client.exists(key))


def test_a_forgotten_tenants_text_is_neither_written_nor_taken(one: Peer, other: Peer) -> None:
    """Not even what is in Redis still: the erasing command removes that after everybody has forgotten."""
    mine = SuffixIndex(10)
    publish = one.sharing.join(GROUP, mine, TEXT)
    wait_until(lambda: one.tokens("published"))
    for peer in (one, other):
        peer.sharing.forget(["anna"])
    publish([9])
    theirs = follow(other)
    new = [11, 12, 13, 14]
    erased_ms = now_ms()
    wait_until(lambda: now_ms() > erased_ms)
    one.sharing.join(GROUP, SuffixIndex(10), new)
    wait_until(lambda: other.sees(theirs, new))
    assert len(theirs) == len(new)


def test_text_of_old_targets_ages_out(one: Peer, redis_client: redis.Redis) -> None:
    for version in (5, 6):
        one.sharing.set_target_version(version)
        one.sharing.join(GROUP, SuffixIndex(10), [10 * version + digit for digit in range(5)])
        before = one.tokens("published")
        wait_until(lambda before=before: one.tokens("published") > before)
    with peer_of(redis_client, target_version=7, keep_versions=1) as newest:
        index = follow(newest)
        wait_until(lambda: newest.sees(index, [60, 61, 62, 63, 64]))
        assert len(index) == 5


def test_text_that_is_none_of_ours_is_not_read_on(one: Peer, redis_client: redis.Redis) -> None:
    texts = GroupTexts(redis_client, "m")
    good = GroupTextPiece(1, 1, 0, 0, now_ms(), TEXT)
    texts.append(
        {GROUP: encode_piece(good) + encode_piece(GroupTextPiece(1, 1, 0, 0, now_ms(), [5000])) + encode_piece(good)}
    )
    index = follow(one)
    wait_until(lambda: one.registry.get_sample_value("slipstream_group_texts_unreadable_total") == 1)
    wait_until(lambda: one.sees(index, TEXT))
    texts.drop([GROUP])
    texts.append({GROUP: encode_piece(GroupTextPiece(1, 2, 0, 0, now_ms(), [21, 22, 23]))})
    index = follow(one)
    wait_until(lambda: one.sees(index, [21, 22, 23]))


def test_redis_may_go_and_come_back(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with connect(server.url) as client, peer_of(client, max_queued_tokens=100) as one, peer_of(client) as other:
        theirs = follow(other)
        publish = one.sharing.join(GROUP, SuffixIndex(10), TEXT[:4])
        wait_until(lambda: other.sees(theirs, TEXT[:4]))
        server.stop()
        publish(TEXT[4:])
        publish([20] * 200)
        assert one.tokens("buffer_full") == 200
        server = EmbeddedRedis(tmp_path)
        wait_until(lambda: other.sees(theirs, TEXT))
        # What follows the lost tokens is a text of its own.
        publish([30, 31, 32])
        wait_until(lambda: other.takes(theirs, [30, 31]) == [32])
        assert theirs.match([TEXT[-1], 30]).length == 1
        server.stop()
        publish([40])
    assert one.tokens("closed") == 1


# -- with engines -----------------------------------------------------------------------------------------------------


def test_a_second_engine_proposes_what_the_first_has_answered(redis_client: redis.Redis, tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "toy")

    def engine(peer: Peer) -> contextlib.AbstractContextManager[Harness]:
        draft = random_draft(model, seed=9)
        return toy_engine(model, draft=draft, dtype="float64", sharing=peer.sharing)

    def ask(harness: Harness, tenant: str, *, max_tokens: int = 60, capture: bool = True) -> tuple[int, str]:
        policy = CapturePolicy(tenant=tenant, group_id="g", capture=capture)
        (answer,) = harness.ask(harness.request("what is 2 and 2?", policy=policy, max_tokens=max_tokens))
        return len(answer.chunks), answer.text

    with (
        peer_of(redis_client) as one,
        peer_of(redis_client) as other,
        engine(one) as first,
        engine(other) as second,
    ):
        ask(first, "silent", capture=False)
        alone, text = ask(first, "anna")
        wait_until(lambda: one.tokens("published") >= 60)
        assert one.tokens("published") < 100, "who opts out leaves nothing"

        def has_fetched() -> bool:
            ask(second, "anna", max_tokens=2)
            return other.tokens("fetched") >= 60

        wait_until(has_fetched)
        rounds, same = ask(second, "anna")
        assert same == text
        assert rounds < alone / 2
        strangers, same = ask(second, "bo")
        assert same == text
        assert strangers > 0.75 * alone
        assert other.tokens("fetched") >= 60
        first.engine.drop_group_text("anna", "g")
        wait_until(lambda: not redis_client.exists(RedisKeys(model_key="m").group_text(GROUP.member)))
