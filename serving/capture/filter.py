"""The operator's own filter of traces: a function that says of each text whether a trace of it may leave the process.

    def keep(text: str, tenant: str) -> bool: ...

`text` is what the trace holds of the prompt, and the answer, decoded without special tokens. The recorder's thread
calls the function: one that is slower than the traffic makes the recorder's queue grow to its bound. Serving waits for
it only while it holds Python's lock, which one search by a regular expression does to its end. A trace of which the
function says False is dropped, and so is one at which it fails; both are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from speculator.errors import ConfigError, type_and_place
from speculator.host import load_function
from speculator.trace import Trace

FILTER_REASONS = ("filtered", "filter_failed")
"""Why a trace is dropped: the function said False, or raised an error or said neither True nor False."""
_FORMER_FILTER = "SLIPSTREAM_DROP_PERSONAL_DATA"
log = structlog.get_logger(__name__)


class CaptureFilter:
    """Calls `keep` on the text that `decode` makes of a trace's token ids. Used by one thread."""

    def __init__(self, keep: Callable[[str, str], object], decode: Callable[[list[int]], str]) -> None:
        self._keep, self._decode = keep, decode

    @classmethod
    def load(cls, name: str | None, model_dir: Path) -> CaptureFilter | None:
        """The filter that `name`, MODULE:FUNCTION, imports, with the target's tokenizer; None without a name.

        Raises ConfigError, in one line, for a name that is malformed or cannot be imported, for something that cannot
        be called, for a folder without a readable tokenizer.json, and where the environment still sets the filter of
        earlier versions: to ignore that would let traces out.
        """
        if os.environ.get(_FORMER_FILTER, "0").strip().lower() not in ("", "0", "false", "no", "off"):
            raise ConfigError(
                f"{_FORMER_FILTER} has no effect any more: name a function in SLIPSTREAM_CAPTURE_FILTER, and unset it"
            )
        if not name:
            return None
        keep = load_function(name, "SLIPSTREAM_CAPTURE_FILTER")
        try:
            tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(
                f"{model_dir} has no readable tokenizer.json, which SLIPSTREAM_CAPTURE_FILTER needs: give another "
                "--model, or leave the filter out"
            ) from error
        return cls(keep, tokenizer.decode)

    def reason_to_drop(self, trace: Trace) -> str | None:
        """One of FILTER_REASONS, or None for a trace that is kept. Raises nothing."""
        try:
            is_kept = self._keep(self._decode(trace.token_ids.tolist()), trace.header.tenant)
        except BaseException as error:
            # Also SystemExit, and a panic in Rust, which is no Exception: either would end the recorder's thread.
            # Without its message, which may quote the text.
            log.error("the capture filter failed, its trace is dropped", error=type_and_place(error))
            return "filter_failed"
        if not isinstance(is_kept, bool):
            log.error("the capture filter answered with no bool, its trace is dropped", type=type(is_kept).__name__)
            return "filter_failed"
        return None if is_kept else "filtered"
