"""What SGLang says of an answer's verifications where it is asked to, and the answer without it.

With `return_spec_tokens_details` in the request, SGLang adds `sglext.spec_tokens_details` to a whole answer, and to a
stream an event of its own. The client did not ask for it, so neither reaches the client; which of its tokens were
guessed is nothing that an observer of the stream should learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

_ALSO_ASK = (
    b"return_spec_tokens_details",
    b"return_cached_tokens_details",
    b"return_routed_experts",
    b"return_input_ids_in_sglext",
    b"return_output_ids_in_sglext",
)

_FIELD = "sglext"
_MARK = b'"sglext"'
"""A string of the answer may say that, too: what has the mark is decoded to see."""
_NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Sample(msgspec.Struct):
    spec_accept_length: float = 0.0
    spec_verify_ct: int = 0


class _Extension(msgspec.Struct):
    spec_tokens_details: _Sample | list[_Sample] | None = None


class _Answer(msgspec.Struct):
    sglext: _Extension | None = None


@dataclass
class Verified:
    """Of one answer, all its samples together."""

    num_tokens: float = 0.0
    num_verifications: int = 0

    def take_from(self, content: bytes) -> bytes:
        """A whole answer without what it says of verifications."""
        if not self._note(content):
            return content
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        del fields[_FIELD]
        return msgspec.json.encode(fields)

    def take_from_events(self, block: bytes) -> bytes:
        """Whole events without the one that says it."""
        if _MARK not in block:
            return block
        events = [event + b"\n\n" for event in block.split(b"\n\n")[:-1]]
        return b"".join(event for event in events if not self._note(event.removeprefix(b"data: ").strip()))

    def _note(self, content: bytes) -> bool:
        if _MARK not in content:
            return False
        try:
            said = msgspec.json.decode(content, type=_Answer).sglext
        except _NOT_OURS:
            return False
        if said is None:
            return False
        details = said.spec_tokens_details
        samples: Sequence[_Sample] = details if isinstance(details, list) else [details] if details else []
        for sample in samples:
            self.num_tokens += sample.spec_accept_length * sample.spec_verify_ct
            self.num_verifications += sample.spec_verify_ct
        return True


def may_measure(raw: bytes) -> bool:
    """Whether the body of a request has none of the fields with which a client wants `sglext` for itself: then it gets
    all of it, and nothing is measured. Text that names such a field is as good as one.
    """
    return not any(name in raw for name in _ALSO_ASK)
