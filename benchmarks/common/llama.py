"""llama.cpp over the bundled model: its own quantised file, and the same weights in bfloat16.

`make llama-cpp` compiles it for this machine's CPU. The file in bfloat16 has the weights that `slipstream` serves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from slipstream.models import bundled_file

_ROOM = 2048
"""Tokens of a prompt and its answer."""

_OF_THE_FILE = ("general.architecture", "general.file_type", "general.quantization_version")
"""Fields about the file, not the model: the GGUF writer sets them itself."""

Generate = Callable[[Sequence[int], int], int]
"""(prompt, max tokens) → number of tokens in the greedy answer."""


def is_installed() -> bool:
    return find_spec("llama_cpp") is not None


def llama_ways(threads: int) -> dict[str, Generate]:
    """Greedy generators by name. Raises ConfigError without the package of the model."""
    original = bundled_file()
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "bfloat16.gguf"
        _widen(original, wide)
        # A file may be removed once it is mapped.
        return {"llama_cpp": _greedy(wide, threads), "llama_cpp_4_bits": _greedy(original, threads)}


def _greedy(path: Path, threads: int) -> Generate:
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=_ROOM, n_threads=threads, n_threads_batch=threads, verbose=False)
    ends = llama.token_eos()

    def generate(prompt: Sequence[int], limit: int) -> int:
        llama.reset()
        count = 0
        for token in llama.generate(list(prompt), temp=0.0):
            count += 1
            if token == ends or count == limit:
                break
        return count

    return generate


def _widen(source: Path, out: Path) -> None:
    """The same model with its matrices in bfloat16."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _OF_THE_FILE:
            continue
        kind, *of = field.types
        writer.add_key_value(name, field.contents(), kind, sub_type=of[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        numbers: np.ndarray[Any, Any] = dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.BF16 if numbers.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
