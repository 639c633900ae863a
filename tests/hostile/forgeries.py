"""What a file of a draft version may hold in place of a draft: by file, a name and the bytes, tensors or fields."""

from __future__ import annotations

import json
import struct
from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def damaged(raw: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "one byte": raw[:1],
        "header alone": raw[:8],
        "half": raw[: len(raw) // 2],
        "last byte missing": raw[:-1],
        "one byte more": raw + b"\0",
        "twice": raw + raw,
        "zeros": bytes(len(raw)),
        "zip": b"PK\x03\x04" + raw,
        "pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "length of the header: all": b"\xff" * 8 + raw[8:],
        "length of the header: a terabyte": struct.pack("<Q", 1 << 40) + raw[8:],
        "length of the header: 100 MB": struct.pack("<Q", 100_000_000) + raw[8:],
        "length of the header: 0": bytes(8) + raw[8:],
        "length of the header: one less": struct.pack("<Q", struct.unpack("<Q", raw[:8])[0] - 1) + raw[8:],
    }


def header_of(fields: Any) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


def lies(state: dict[str, Tensor]) -> dict[str, bytes]:
    raw = safetensors.torch.save(state)
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def lying(**entries: Any) -> bytes:
        return header_of(header | entries) + data

    norm = header["norm.weight"]
    nothing = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return {
        "a type that there is not": lying(**{"norm.weight": norm | {"dtype": "BF17"}}),
        "another type of the same size": lying(**{"norm.weight": norm | {"dtype": "F16"}}),
        "a negative size": lying(**{"norm.weight": norm | {"shape": [-8]}}),
        "a huge size": lying(**{"norm.weight": norm | {"shape": [1 << 62, 4]}}),
        "a size that overflows": lying(**{"norm.weight": norm | {"shape": [1 << 33, 1 << 33]}}),
        "a size of nothing": lying(**{"norm.weight": norm | {"shape": [0, 1 << 60]}}),
        "offsets beyond the end": lying(**{"norm.weight": norm | {"data_offsets": [len(data), 2 * len(data)]}}),
        "offsets in reverse": lying(**{"norm.weight": norm | {"data_offsets": norm["data_offsets"][::-1]}}),
        "overlapping tensors": lying(**{"norm.weight": header["fc.weight"] | {"shape": norm["shape"]}}),
        "a tensor that is a list": lying(**{"norm.weight": []}),
        "deep header": header_of(b'{"a":' * 50_000),
        "many empty tensors": header_of({f"t{number}": nothing for number in range(50_000)}),
        "metadata of numbers": lying(__metadata__={"format": 7}),
        "header of a list": header_of([]),
    }


def forged(state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    fc, norm, d2t = (state[name] for name in ("fc.weight", "norm.weight", "d2t"))
    spoilt = fc.clone()
    spoilt[0, 0] = torch.nan
    endless = fc.clone()
    endless[-1, -1] = torch.inf
    return {
        "not a number": {"fc.weight": spoilt},
        "infinite": {"fc.weight": endless},
        "missing": {"norm.weight": None},
        "no d2t": {"d2t": None},
        "extra": {"extra.weight": torch.zeros(3)},
        "embed_tokens": {"embed_tokens.weight": torch.zeros(4, 4, dtype=torch.bfloat16)},
        "model.embed_tokens": {"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.bfloat16)},
        "transposed": {"fc.weight": fc.T},
        "one row less": {"fc.weight": fc[1:]},
        "scalar": {"norm.weight": norm[0]},
        "empty": {"norm.weight": norm[:0]},
        "float32": {"norm.weight": norm.float()},
        "float64": {"norm.weight": norm.double()},
        "integers": {"norm.weight": norm.to(torch.int16)},
        "complex": {"norm.weight": norm.to(torch.complex64)},
        "d2t in int32": {"d2t": d2t.int()},
        "d2t of another vocabulary": {"d2t": d2t + 1},
        "d2t beyond the vocabulary": {"d2t": d2t + (1 << 40)},
        "d2t below the vocabulary": {"d2t": d2t - (1 << 40)},
    }


def odd_documents() -> dict[str, bytes]:
    return {
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "string": b'"x"',
        "no fields": b"{}",
        "cut off": b'{"version": 1',
        "deep": b"[" * 100_000,
        "bytes": b"\xff\xfe\x00",
        "byte order mark": b"\xef\xbb\xbf{}",
        "not a number": b"NaN",
    }


def odd_configs() -> dict[str, dict[str, Any]]:
    return {
        "another architecture": {"architectures": ["LlamaForCausalLM"]},
        "architectures of null": {"architectures": None},
        "code": {"auto_map": {"AutoModel": "evil--Model"}, "architectures": ["Evil"]},
        "sizes as text": {"hidden_size": "8"},
        "sizes of null": {"hidden_size": None},
        "no heads": {"num_attention_heads": 0, "head_dim": None},
        "negative heads": {"num_attention_heads": -4},
        "negative size": {"hidden_size": -8},
        "huge size": {"hidden_size": 1 << 62},
        "huge vocabulary": {"vocab_size": 1 << 62, "draft_vocab_size": 1 << 62},
        "infinite vocabulary": {"draft_vocab_size": float("inf")},
        "fractions": {"intermediate_size": 12.5},
        "lists": {"vocab_size": [20]},
        "truth": {"num_key_value_heads": True},
        "rope of text": {"rope_theta": "fast"},
        "rope parameters of text": {"rope_parameters": "x"},
    }


def odd_manifests() -> dict[str, dict[str, Any]]:
    return {
        "another version": {"version": 7},
        "version as text": {"version": "1"},
        "another target": {"target_fingerprint": "b" * 64},
        "another hash": {"weights_sha256": "0" * 64},
        "no hash": {"weights_sha256": None},
        "hash of a list": {"config_sha256": []},
        "info of null": {"info": None},
    }
