"""The trace codec: exact where it promises to be, small, and unmoved by any bytes."""

from __future__ import annotations

import dataclasses
import gc
import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator.errors import TraceError, UnknownSchemaError
from speculator.trace import MAX_TOP_K, SCHEMA_VERSION, Trace, check_trace, decode_trace, encode_trace, quantised
from tests.fixtures.traces import make_header, make_trace, with_branches, with_rounds

seeds = st.integers(0, 2**32 - 1)


def made(seed: int, *, keeps_rejected: bool, **about: Any) -> Trace:
    trace = make_trace(seed, **about)
    return with_branches(trace, seed) if keeps_rejected else trace


traces = st.builds(
    made,
    seeds,
    keeps_rejected=st.booleans(),
    T=st.integers(1, 20),
    d=st.integers(1, 9),
    K=st.integers(1, 5),
    R=st.integers(0, 5),
    P=st.integers(0, 4),
    labelled_from=st.integers(0, 21),
    feature_scale=st.sampled_from([0.0, 1e-6, 1.0, 3e3]),
    tenant=st.text(st.characters(exclude_categories=["Cs"])),
)


def assert_same_but_features(one: Trace, other: Trace) -> None:
    assert one.header == other.header
    for name in ("token_ids", "target_topk_ids", "target_topk_logprobs", "constrained"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    for field in dataclasses.fields(one.rounds):
        np.testing.assert_array_equal(
            getattr(one.rounds, field.name), getattr(other.rounds, field.name), field.name, strict=True
        )
    assert (one.branches is None) == (other.branches is None)
    if one.branches is not None:
        for name in ("round", "node", "topk_ids", "topk_logprobs"):
            np.testing.assert_array_equal(getattr(one.branches, name), getattr(other.branches, name), strict=True)


@given(traces)
@settings(max_examples=60, deadline=None)
def test_bfloat16_features_come_back_exactly(trace: Trace) -> None:
    decoded = decode_trace(encode_trace(trace, features="bfloat16"))
    assert_same_but_features(decoded, trace)
    assert torch.equal(decoded.aux_hidden, trace.aux_hidden)
    if decoded.branches is not None and trace.branches is not None:
        assert torch.equal(decoded.branches.hidden, trace.branches.hidden)


@given(traces)
@settings(max_examples=60, deadline=None)
def test_float8_features_come_back_within_their_precision(trace: Trace) -> None:
    decoded = decode_trace(encode_trace(trace))
    assert_same_but_features(decoded, trace)
    was, now = trace.aux_hidden.float(), decoded.aux_hidden.float()
    # Three mantissa bits, and a floor that follows from the row's largest value or from the smallest scale.
    step = (was.abs().amax(1, keepdim=True) / 448).clamp_min(2.0**-14) * 2.0**-9
    assert ((was - now).abs() <= was.abs() * 2.0**-4 * 1.1 + step).all()


def read_tensors(data: bytes) -> dict[str, bytes]:
    """Their order in the file is any."""
    tensors = safetensors.torch.load(data)
    return {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@given(traces)
@settings(max_examples=30, deadline=None)
def test_features_that_come_in_float8_travel_as_they_are(trace: Trace) -> None:
    small, scale = quantised(trace.aux_hidden)
    there = dataclasses.replace(trace, aux_hidden=small, aux_scale=scale)
    assert read_tensors(encode_trace(there)) == read_tensors(encode_trace(trace))
    if (rows := trace.branches) is not None:
        of_rows, their_scale = quantised(rows.hidden)
        there = dataclasses.replace(there, branches=dataclasses.replace(rows, hidden=of_rows, scale=their_scale))
        assert read_tensors(encode_trace(there)) == read_tensors(encode_trace(trace))
    kept = decode_trace(encode_trace(there, features="bfloat16")).aux_hidden
    assert torch.equal(kept, decode_trace(encode_trace(trace)).aux_hidden)


def test_float8_that_is_no_number_or_has_no_scale_is_refused() -> None:
    trace = make_trace()
    small, scale = quantised(trace.aux_hidden)
    for changes in (
        {"aux_scale": scale[:-1]},
        {"aux_scale": scale.float()},
        {"aux_scale": torch.full_like(scale, torch.nan)},
        {"aux_scale": torch.full_like(scale, torch.inf)},
        {"aux_hidden": torch.full_like(small.view(torch.uint8), 0xFF).view(torch.float8_e4m3fn)},
        {"aux_hidden": trace.aux_hidden},
        {"aux_scale": None},
    ):
        with pytest.raises(TraceError):
            encode_trace(dataclasses.replace(trace, **{"aux_hidden": small, "aux_scale": scale} | changes))


def test_a_row_of_zeros_stays_zero() -> None:
    trace = make_trace()
    trace.aux_hidden[3] = 0
    assert decode_trace(encode_trace(trace)).aux_hidden[3].eq(0).all()


def test_features_beyond_float8_are_refused_and_fit_into_bfloat16() -> None:
    trace = make_trace()
    trace.aux_hidden[3, 0] = 1e30
    with pytest.raises(TraceError, match="features='bfloat16'"):
        encode_trace(trace)
    assert torch.equal(decode_trace(encode_trace(trace, features="bfloat16")).aux_hidden, trace.aux_hidden)


def test_rows_without_a_distribution_do_not_travel() -> None:
    K = 64
    bare = len(encode_trace(make_trace(T=400, K=K, labelled_from=400)))
    full = len(encode_trace(make_trace(T=400, K=K, labelled_from=100)))
    assert full - bare == pytest.approx(300 * K * (4 + 2), abs=64)


def test_rows_behind_rejections_take_as_much_as_others_and_none_take_nothing() -> None:
    trace = make_trace(T=60, d=64, K=64, R=30, P=4, labelled_from=0)
    rows = with_branches(trace)
    assert rows.branches is not None
    of_each = 3 * 64 + 2 + 64 * (4 + 2) + 4 + 1
    more = len(encode_trace(rows)) - len(encode_trace(trace))
    assert more == pytest.approx(len(rows.branches) * of_each, abs=600)
    assert b"branch" not in encode_trace(trace)


def test_read_only_and_strided_arrays_encode() -> None:
    trace = make_trace(K=4)
    trace.token_ids.flags.writeable = False
    strided = dataclasses.replace(trace, target_topk_ids=np.asfortranarray(trace.target_topk_ids))
    assert_same_but_features(decode_trace(encode_trace(strided)), trace)


def test_an_8b_target_takes_two_fifths_of_its_bare_hidden_states() -> None:
    """A target of width 4,096, 64 likeliest tokens, a round of five proposals for every 2.5 tokens."""
    T, d = 512, 4096
    trace = make_trace(T=T, d=d, K=64, R=round(T / 2.5), P=5, labelled_from=0)
    assert len(encode_trace(trace)) / T <= 0.4 * (8 * d + 8)


# -- bytes that are no trace


def rewrite(data: bytes, *, header: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> bytes:
    """An encoded trace with other header fields, and tensors replaced, added or (None) removed."""
    length = struct.unpack("<Q", data[:8])[0]
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    metadata["header"] = json.dumps(json.loads(metadata["header"]) | (header or {}))
    merged = safetensors.torch.load(data) | tensors
    return safetensors.torch.save({name: t for name, t in merged.items() if t is not None}, metadata)


def test_an_unknown_schema_version_is_refused_by_name() -> None:
    data = rewrite(encode_trace(make_trace()), header={"schema_version": 99}, token_ids=None)
    with pytest.raises(UnknownSchemaError, match=f"99.*{SCHEMA_VERSION}"):
        decode_trace(data)
    with pytest.raises(UnknownSchemaError, match="99"):
        encode_trace(dataclasses.replace(make_trace(), header=make_header(schema_version=99)))


@pytest.mark.parametrize("version", [1, 2])
def test_traces_of_former_schemas_are_read_and_written_again(version: int) -> None:
    data = encode_trace(make_trace())
    length = struct.unpack("<Q", data[:8])[0]
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["header"]) | {"schema_version": version}
    if version == 1:
        del header["target_version"]
    metadata["header"] = json.dumps(header)
    old = decode_trace(safetensors.torch.save(safetensors.torch.load(data), metadata))
    assert (old.header.schema_version, old.header.target_version, old.branches) == (version, 0, None)
    assert decode_trace(encode_trace(old)).header == old.header
    assert decode_trace(encode_trace(make_trace(target_version=7))).header.target_version == 7


@pytest.mark.parametrize("version", [1, 2])
def test_a_former_schema_has_no_rows_behind_rejections(version: int) -> None:
    trace = with_branches(make_trace(P=4))
    with pytest.raises(TraceError, match="extra tensors: branch_hidden, branch_node, branch_round"):
        decode_trace(rewrite(encode_trace(trace), header={"schema_version": version}))
    with pytest.raises(TraceError, match=f"version {version} has no rows"):
        encode_trace(dataclasses.replace(trace, header=make_header(schema_version=version)))


@pytest.mark.parametrize(
    "header",
    [
        {"schema_version": "1"},
        {"created_ms": None},
        {"sampling": {"top_p": 7}},
        {"trace_id": ""},
        {"tenant": 3},
        {"target_version": -1},
        {"created_ms": 10**400},
        {"first_position": 10**400},
        {"num_prompt_tokens": 10**400},
        {"target_version": 10**400},
        {"sampling": {"top_k": 10**30}},
        {"sampling": {"temperature": 1e39}},
    ],
)
def test_a_wrong_header_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(TraceError):
        decode_trace(rewrite(encode_trace(make_trace()), header=header))


@pytest.mark.parametrize(
    "tensors",
    [
        {"extra": torch.zeros(1)},
        {"constrained": None},
        {"token_ids": torch.zeros(12, dtype=torch.int64)},
        {"aux_hidden": torch.zeros(12, 24)},
        {"aux_hidden": torch.zeros(12, 24, dtype=torch.bfloat16)},
        {"aux_hidden": torch.zeros(12, 2, 12).to(torch.float8_e4m3fn)},
        {"aux_scale": torch.full((12,), torch.nan, dtype=torch.float16)},
        {"aux_scale": torch.ones(11, dtype=torch.float16)},
        {"aux_scale": None},
        {"target_topk_ids": torch.zeros(13, 4, dtype=torch.int32)},
        {"target_topk_ids": torch.zeros(9, 3, dtype=torch.int32)},
        {"target_topk_ids": torch.zeros(9, dtype=torch.int32)},
        {"target_topk_logprobs": torch.full((9, 4), torch.nan, dtype=torch.float16)},
        {"position": torch.zeros(2, dtype=torch.int32)},
    ],
    ids=str,
)
def test_wrong_tensors_are_refused(tensors: dict[str, torch.Tensor | None]) -> None:
    with pytest.raises(TraceError):
        decode_trace(rewrite(encode_trace(make_trace()), **tensors))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"branch_colour": torch.zeros(1)}, "extra tensors: branch_colour"),
        ({"branch_node": None}, "missing or extra tensors: branch_node"),
        ({"branch_scale": None}, "branch_scale"),
        ({"branch_round": None}, "branch_hidden, branch_node, branch_scale, branch_topk_ids, branch_topk_logprobs"),
        ({"branch_round": torch.zeros(1, dtype=torch.int32)}, "branch_node has shape"),
        ({"branch_round": torch.tensor(0, dtype=torch.int32)}, "branch_topk_ids"),
        ({"branch_round": torch.zeros(0, dtype=torch.int32)}, "branch_round is empty"),
        ({"branch_topk_ids": torch.zeros(0, 1 << 40, dtype=torch.int32)}, "branch_topk_ids"),
        ({"branch_topk_ids": torch.zeros(1, 1, dtype=torch.int32)}, "branch_topk_ids has shape"),
        ({"branch_hidden": torch.zeros(1).to(torch.float8_e4m3fn)}, "branch_hidden has shape"),
        ({"branch_scale": torch.ones(1, dtype=torch.float16)}, "branch_scale has shape"),
    ],
    ids=str,
)
def test_wrong_tensors_behind_rejections_are_refused_by_name(
    tensors: dict[str, torch.Tensor | None], says: str
) -> None:
    with pytest.raises(TraceError, match=says):
        decode_trace(rewrite(encode_trace(with_branches(make_trace(P=4))), **tensors))


def test_a_width_without_rows_costs_no_memory() -> None:
    empty = {"target_topk_ids": torch.int32, "target_topk_logprobs": torch.float16}
    wide = {name: torch.zeros(0, 1 << 40, dtype=dtype) for name, dtype in empty.items()}
    with pytest.raises(TraceError, match=str(MAX_TOP_K)):
        decode_trace(rewrite(encode_trace(make_trace()), **wide))


def test_unknown_features_are_refused() -> None:
    data = encode_trace(make_trace())
    with pytest.raises(TraceError, match="floatX"):
        decode_trace(data.replace(b'"float8"', b'"floatX"'))


def test_a_header_that_is_not_text_does_not_encode() -> None:
    with pytest.raises(TraceError, match="UTF-8 cannot encode"):
        encode_trace(make_trace(tenant="\ud800"))


def container(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        container(b"{}"),
        container(b'{"__metadata__":{}}'),
        container(b'{"__metadata__":{"header":"[]","features":"float8"}}'),
        container(b'{"__metadata__":{"header":"%s"}}' % (b"[" * 50_000)),
        container(b'{"a":' * 50_000),
        container(b'{"x":{"dtype":"F32","shape":[0,99999999999999999999],"data_offsets":[0,0]}}'),
        container(b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}') + b"ab",
    ],
    ids=range(9),
)
def test_no_bytes_do_harm(data: bytes) -> None:
    with pytest.raises(TraceError):
        decode_trace(data)


def decodes_or_refuses(data: bytes) -> None:
    try:
        trace = decode_trace(data)
    except TraceError:
        return
    check_trace(trace)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TraceError):
        decode_trace(data)


@given(seeds, st.sampled_from(["float8", "bfloat16"]), st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_decode_to_a_checked_trace_or_are_refused(seed: int, features: Any, data: st.DataObject) -> None:
    encoded = bytearray(encode_trace(with_branches(make_trace(seed, T=4, d=1, K=2, R=2, P=2)), features=features))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(encoded)))
        end = start + data.draw(st.integers(0, 8))
        encoded[start:end] = data.draw(st.one_of(st.binary(max_size=8), st.just(bytes(end - start))))
    decodes_or_refuses(bytes(encoded))


@given(seeds, st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_values_decode_to_a_checked_trace_or_are_refused(seed: int, data: st.DataObject) -> None:
    """Damage behind the container's header, where safetensors notices nothing."""
    encoded = bytearray(encode_trace(with_branches(make_trace(seed, T=4, d=1, K=2, R=2, P=2))))
    first = 8 + struct.unpack("<Q", encoded[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(first, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(encoded))


@given(seeds, st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_truncated_trace_is_refused(seed: int, length: int) -> None:
    encoded = encode_trace(make_trace(seed))
    with pytest.raises(TraceError):
        decode_trace(encoded[: min(length, len(encoded) - 1)])


# -- what makes a trace well-formed


def changed(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


GOOD = make_trace(1, P=4)


def bad(**arrays: Any) -> Trace:
    return dataclasses.replace(GOOD, **arrays)


def sampled(**params: float) -> Trace:
    return make_trace(sampling=msgspec.structs.replace(make_header().sampling, **params))


ROWS = with_branches(GOOD).branches
assert ROWS is not None
assert ROWS.round.tolist()[0] == ROWS.round.tolist()[1], "the case needs a rejected proposal behind another"


def bad_rows(**arrays: Any) -> Trace:
    assert ROWS is not None
    return bad(branches=dataclasses.replace(ROWS, **arrays))


def without_first() -> Trace:
    """A rejected proposal is kept, and the one before it is not."""
    assert ROWS is not None
    kept = {name: value[1:] for name, value in vars(ROWS).items() if value is not None}
    return bad(branches=dataclasses.replace(ROWS, **kept))


BAD: dict[str, Trace] = {
    "no tokens": bad(token_ids=np.zeros(0, np.int32)),
    "token_ids has a negative id": bad(token_ids=changed(GOOD.token_ids, 0, -1)),
    "token_ids is int64": bad(token_ids=GOOD.token_ids.astype(np.int64)),
    "aux_hidden is torch.float32": bad(aux_hidden=GOOD.aux_hidden.float()),
    "aux_hidden has shape": bad(aux_hidden=GOOD.aux_hidden[1:]),
    "aux_hidden is 23 wide": bad(aux_hidden=GOOD.aux_hidden[:, 1:]),
    "aux_hidden is not finite": bad(aux_hidden=GOOD.aux_hidden / 0),
    "target_topk_ids has shape": bad(target_topk_ids=GOOD.target_topk_ids[:, :0]),
    "target_topk_ids has an id": bad(target_topk_ids=changed(GOOD.target_topk_ids, 5, -2)),
    "above zero": bad(target_topk_logprobs=changed(GOOD.target_topk_logprobs, (5, 0), 0.5)),
    "not sorted": bad(target_topk_logprobs=GOOD.target_topk_logprobs[:, ::-1]),
    "where there is no token": bad(target_topk_ids=changed(GOOD.target_topk_ids, 5, -1)),
    "constrained is int8": bad(constrained=GOOD.constrained.view(np.int8)),
    "top_p": sampled(top_p=0.0),
    "top_k": sampled(top_k=-1),
    "temperature": sampled(temperature=float("nan")),
    "first_position": make_trace(first_position=-1),
    "num_prompt_tokens": make_trace(num_prompt_tokens=-1),
    "created_ms": make_trace(created_ms=-1),
    "ends before the prompt": make_trace(num_prompt_tokens=99),
    "beyond the last position": make_trace(R=0, first_position=2**31 - 5),
    "outside the span": with_rounds(GOOD, position=GOOD.rounds.position + np.int32(12)),
    "not in the order": with_rounds(GOOD, position=GOOD.rounds.position[::-1]),
    "draft_tokens has shape": with_rounds(GOOD, draft_tokens=GOOD.rounds.draft_tokens[0]),
    "draft_tokens has an id": with_rounds(GOOD, draft_tokens=changed(GOOD.rounds.draft_tokens, 0, -2)),
    "num_accepted does not fit": with_rounds(GOOD, num_accepted=np.full(3, 5, np.int8)),
    "num_accepted is int32": with_rounds(GOOD, num_accepted=np.zeros(3, np.int32)),
    "draft_version is negative": with_rounds(GOOD, draft_version=np.full(3, -1, np.int32)),
    "no valid draft_logprobs": with_rounds(GOOD, draft_logprobs=np.full((3, 4), np.nan, np.float16)),
    "does not precede it": with_rounds(GOOD, draft_parents=np.zeros((3, 4), np.int8)),
    "branch_round is int64": bad_rows(round=ROWS.round.astype(np.int64)),
    "branch_round is not a row": bad_rows(round=changed(ROWS.round, -1, 3)),
    "branch_node is no proposal": bad_rows(node=changed(ROWS.node, -1, 4)),
    "rejections are not in order": bad_rows(node=ROWS.node[::-1], round=ROWS.round[::-1]),
    "has no known parent": without_first(),
    "branch_hidden is not finite": bad_rows(hidden=ROWS.hidden / 0),
    "branch_hidden is not as wide": bad_rows(hidden=ROWS.hidden[:, :3]),
    "branch_topk_ids has another K": bad_rows(topk_ids=ROWS.topk_ids[:, :3], topk_logprobs=ROWS.topk_logprobs[:, :3]),
    "branch_topk_ids has a row without": bad_rows(
        topk_ids=changed(ROWS.topk_ids, 0, -1), topk_logprobs=changed(ROWS.topk_logprobs, 0, -np.inf)
    ),
    "branch_topk_logprobs is above": bad_rows(topk_logprobs=changed(ROWS.topk_logprobs, (0, 0), 0.5)),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_malformed_trace_is_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        check_trace(BAD[reason])
    with pytest.raises(TraceError, match=reason):
        encode_trace(BAD[reason])


def test_what_stands_in_padding_does_not_matter() -> None:
    trace = GOOD
    padding = trace.rounds.draft_tokens < 0
    assert padding.any()
    check_trace(with_rounds(trace, draft_logprobs=changed(trace.rounds.draft_logprobs, padding, np.nan)))


@pytest.mark.parametrize("features", ["float8", "bfloat16"])
@pytest.mark.parametrize("trace", [make_trace(T=9), make_trace(R=0), make_trace(P=0)], ids=["T9", "R0", "P0"])
def test_the_bytes_are_those_that_safetensors_writes(features: Any, trace: Trace) -> None:
    def parts(data: bytes) -> tuple[Any, bytes]:
        """The header, whose names come in any order, and the arrays."""
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]

    ours = encode_trace(trace, features=features)
    metadata = parts(ours)[0]["__metadata__"]
    assert parts(safetensors.torch.save(safetensors.torch.load(ours), metadata)) == parts(ours)


def test_answers_of_many_lengths_leave_nothing_behind() -> None:
    """Ctypes keeps a type for each size of an array that it has seen."""

    def num_types() -> int:
        gc.collect()
        return sum(issubclass(type(kept), type) for kept in gc.get_objects())

    encode_trace(make_trace(T=99))
    before = num_types()
    for length in range(100, 130):
        encode_trace(make_trace(T=length))
    assert num_types() == before
