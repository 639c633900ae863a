"""The text of prompt groups: its bytes, and its bounds in Redis."""

from __future__ import annotations

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from serving.group_cache.texts import (
    MAX_PIECE_TOKENS,
    GroupKey,
    GroupTextPiece,
    GroupTexts,
    ReadPosition,
    decode_pieces,
    encode_piece,
    is_head,
    new_head,
)
from speculator.errors import GroupTextError
from speculator.redis.client import RedisKeys
from tests.fixtures.waiting import wait_until

VOCAB = 1000
KEYS = RedisKeys(model_key="m")
ANNA, BO = GroupKey("anna", "g"), GroupKey("bo", "g")

pieces = st.builds(
    GroupTextPiece,
    source=st.integers(0, 2**64 - 1),
    text=st.integers(0, 2**32 - 1),
    start=st.integers(0, 2**32 - 1),
    target_version=st.integers(-(2**63), 2**63 - 1),
    at_ms=st.integers(0, 2**62),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_PIECE_TOKENS),
)


@given(st.lists(pieces, max_size=5), st.integers(0, 10_000))
def test_pieces_come_back_whole_up_to_wherever_the_bytes_end(written: list[GroupTextPiece], end: int) -> None:
    ends, data = [], b""
    for piece in written:
        data += encode_piece(piece)
        ends.append(len(data))
    end = min(end, len(data))
    whole = [one for one in ends if one <= end]
    assert list(decode_pieces(data[:end], vocab_size=VOCAB)) == list(zip(written, whole, strict=False))


@given(st.binary(max_size=400))
def test_bytes_of_somebody_else_are_refused_or_end_early(data: bytes) -> None:
    try:
        found = list(decode_pieces(data, vocab_size=VOCAB))
    except GroupTextError:
        return
    assert all(0 <= token < VOCAB for piece, _ in found for token in piece.tokens)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_the_model_does_not_have_is_refused(token: int) -> None:
    data = encode_piece(GroupTextPiece(1, 1, 0, 0, 0, [5, token]))
    with pytest.raises(GroupTextError):
        list(decode_pieces(data, vocab_size=VOCAB))


def test_heads_differ() -> None:
    assert is_head(new_head())
    assert new_head() != new_head()
    assert not is_head(b"")
    assert not is_head(b"SGT2" + b"12345678")


def read(texts: GroupTexts, group: GroupKey, place: ReadPosition | None = None) -> tuple[ReadPosition, bytes]:
    return texts.fetch({group: place or ReadPosition()})[group]


def test_a_reader_goes_on_where_it_stopped_and_finds_a_new_beginning(redis_client: redis.Redis) -> None:
    texts = GroupTexts(redis_client, "m")
    assert read(texts, ANNA) == (ReadPosition(), b"")
    texts.append({ANNA: b"one", BO: b"other"})
    place, data = read(texts, ANNA)
    assert data == b"one"
    texts.append({ANNA: b"two"})
    place = ReadPosition(place.head, place.offset + 3)
    assert read(texts, ANNA, place) == (place, b"two")
    texts.drop([ANNA])
    assert read(texts, ANNA, place) == (ReadPosition(), b"")
    texts.append({ANNA: b"three"})
    found, data = read(texts, ANNA, place)
    assert (found.offset, data) == (ReadPosition().offset, b"three")
    assert read(texts, BO)[1] == b"other"
    redis_client.set(KEYS.group_text(BO.member), b"something else that is no text")
    assert read(texts, BO) == (ReadPosition(), b"")


def test_names_with_colons_and_slashes_are_groups_of_their_own(redis_client: redis.Redis) -> None:
    texts = GroupTexts(redis_client, "m")
    groups = [GroupKey("a", "b:c"), GroupKey("a:b", "c"), GroupKey("a", "b%3Ac"), GroupKey("", "a:b:c"), ANNA]
    texts.append({group: str(row).encode() for row, group in enumerate(groups)})
    assert [read(texts, group)[1] for group in groups] == [str(row).encode() for row in range(len(groups))]
    assert texts.erase("a", dry_run=True) == texts.erase("a") == 2
    assert [bool(read(texts, group)[1]) for group in groups] == [False, True, False, True, True]
    assert not redis_client.exists(KEYS.group_text(groups[0].member))


def test_a_text_goes_a_fixed_time_after_its_first_token(redis_client: redis.Redis) -> None:
    texts = GroupTexts(redis_client, "m", ttl_s=0.3)
    texts.append({ANNA: b"a"})
    first = read(texts, ANNA)[0]
    writes = 0

    def has_begun_anew() -> bool:
        nonlocal writes
        writes += 1
        texts.append({ANNA: b"a"})
        return read(texts, ANNA)[0].head != first.head

    wait_until(has_begun_anew)
    assert writes > 2
    wait_until(lambda: not list(redis_client.scan_iter("slipstream:*")))


def test_a_group_and_all_of_them_have_bounds(redis_client: redis.Redis) -> None:
    texts = GroupTexts(redis_client, "m", group_bytes=100, max_bytes=300)
    assert texts.append({ANNA: b"x" * 60}) == 0
    assert texts.append({ANNA: b"x" * 60}) == 1
    assert read(texts, ANNA) == (ReadPosition(), b"")
    groups = [GroupKey("t", str(number)) for number in range(5)]
    gone = [texts.append({group: b"x"}) for group in groups]
    assert gone == [0, 0, 0, 1, 1]
    assert [bool(read(texts, group)[1]) for group in groups] == [False, False, True, True, True]
    assert len(list(redis_client.scan_iter(KEYS.group_text("*")))) == 3
