"""Hop 3 inside SGLang: prefills and verifications of running requests become spans, and spans become traces.

On the scheduler's thread: pick rows, start copies to the host, queue. On a thread of its own, the assembler: wait for
the copies, grow the spans, build the trace when the request ends, hand it to the recorder. Logits are reduced to their
top tokens where that costs the scheduler least: on a GPU before the copy, on a CPU by the assembler, on another core.
It takes the verifications of a moment together: each time it wakes, the two threads ask each other for the interpreter.
A request's span hangs on SGLang's own request object, so whatever becomes of the request, nothing is left over.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving.sampler import CaptureSampler
from serving.sglang.asked import came_ms, is_constrained, is_marked, parent_of, policy_of, sampling_of
from serving.sglang.budget import ByteBudget
from serving.sglang.probe import DraftProbe
from serving.sglang.settings import PluginSettings
from serving.sglang.spans import InconsistentSpanError, Round, Rows, Span, SpanRequest
from serving.sglang.transfer import HostCopier, HostCopy
from serving.sglang.verdicts import TopTokens, committed, committed_nodes, in_order, joined, over_all_nodes
from speculator.errors import type_and_place
from speculator.spans import Parent, record
from speculator.trace import Trace

log = logging.getLogger(__name__)

_ATTRIBUTE = "_slipstream_ticket"
_GATHER_S, _GATHER_BYTES = 1.0, 16 << 20
"""How long verifications wait for more of their kind, and how much of them; the end of a request does not wait."""
_MOST_QUEUED_BYTES = 4 * _GATHER_BYTES
"""With more, the assembler is behind: logits are reduced before they are queued, whatever the device."""


@dataclass(eq=False)
class Ticket:
    """What hangs on a running request. Without a span it is not captured."""

    span: Span | None
    parent: Parent | None = None
    """What the assembling's span is put under."""
    dropped: str = ""
    """Why its trace will not be made; set by either thread, read by the assembler."""


@dataclass(frozen=True)
class _Prefill:
    copy: HostCopy
    rows: tuple[tuple[Ticket, int, int], ...]
    """(ticket, first position, rows) in the order of the copied rows."""


@dataclass(frozen=True)
class _Kind:
    """What verifications that are taken together have in common."""

    num_nodes: int
    draft_version: int
    is_tree: bool


@dataclass(frozen=True)
class _Verified:
    copy: HostCopy
    tickets: tuple[Ticket, ...]
    kind: _Kind


@dataclass(frozen=True)
class _End:
    ticket: Ticket
    tokens: list[int]


_Event = _Prefill | _Verified | _End
_Addition = tuple[Ticket, Rows, Sequence[Round]]


class Capture:
    """Captures the requests of one scheduler. `on_trace` must not block."""

    def __init__(
        self,
        settings: PluginSettings,
        *,
        engine_id: str,
        target_fingerprint: str,
        device: torch.device,
        probe: DraftProbe,
        budget: ByteBudget,
        on_trace: Callable[[Trace], object],
        sampler: CaptureSampler | None = None,
    ) -> None:
        self._settings = settings
        self._engine_id, self._fingerprint = engine_id, target_fingerprint
        self._copier, self._probe, self._budget, self._on_trace = HostCopier(device), probe, budget, on_trace
        self._sampler = sampler
        self._is_cpu = device.type == "cpu"
        self._scheduler_top, self._assembler_top = TopTokens(settings.capture_topk), TopTokens(settings.capture_topk)
        self._queue: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._lock = threading.Lock()
        self._held_bytes = 0  # queued copies and the rows of open spans
        self._queued_bytes = 0  # of them the copies
        self.target_version = 0
        """Set when a new target is announced: what was begun under another is not recorded."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """Requests whose trace was not made, by reason; what was never to be captured is not among them."""
        self._thread = threading.Thread(target=self._assemble, name="slipstream-assembler", daemon=True)
        self._thread.start()

    # -- on the scheduler's thread ----------------------------------------------------------------------------------

    def after_prefill(self, batch: Any, hidden: Tensor, logits: Tensor) -> None:
        """`hidden` [tokens, w] and the last position's `logits` [B, V] of a prefill that has just been launched."""
        rows, features, last = [], [], []
        offset = 0
        for index, (request, start, length) in enumerate(
            zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            ticket = self._ticket(request)
            if ticket.span is not None and not ticket.dropped:
                first = max(start, ticket.span.request.num_prompt_tokens - self._settings.context_window)
                kept = max(start + length - first, 0)
                if kept:
                    rows.append((ticket, first, kept))
                    features.append(hidden[offset + length - kept : offset + length])
                    last.append(index)
            offset += length
        if rows:
            own = {"features": torch.cat(features).to(torch.bfloat16)}
            is_whole = len(last) == len(logits)
            copy = self._copy({}, own, logits if is_whole else logits[last], is_own=not is_whole)
            self._put(_Prefill(copy, tuple(rows)))

    def before_verify(self, batch: Any) -> Mapping[str, Any]:
        """What only the input of a verification tells; give it to `after_verify`."""
        return {"input": batch.spec_info, "draft_token": batch.spec_info.draft_token, "seq_lens": batch.seq_lens}

    def after_verify(self, batch: Any, before: Mapping[str, Any], result: Any, draft_version: int) -> None:
        """A verification that has just been launched: N nodes a request, the last committed token first."""
        chosen = [
            (index, ticket)
            for index, request in enumerate(batch.reqs)
            if (ticket := getattr(request, _ATTRIBUTE, None)) is not None
            and ticket.span is not None
            and not ticket.dropped
        ]
        if not chosen:
            return
        verify, num_requests = before["input"], len(batch.reqs)
        num_nodes = verify.draft_token_num
        tensors = {
            "seq_lens": before["seq_lens"],
            "features": result.logits_output.hidden_states.view(num_requests, num_nodes, -1),
            "logits": result.logits_output.next_token_logits.view(num_requests, num_nodes, -1),
        }
        if num_nodes > 1:
            tensors |= {
                "accept_index": result.accept_index,
                "accept_lens": result.accept_lens,
                # Nodes are numbered over the whole batch.
                "first_node": torch.arange(num_requests, device=result.accept_index.device) * num_nodes,
                "draft_token": before["draft_token"].view(num_requests, num_nodes),
                "draft_logprobs": self._probe.logprobs(batch.req_pool_indices, num_nodes - 1),
                "next_token": verify.retrieve_next_token,
                "next_sibling": verify.retrieve_next_sibling,
            }
        is_own = len(chosen) < num_requests
        if is_own:
            wanted = torch.tensor([index for index, _ in chosen], device=tensors["seq_lens"].device)
            tensors = {name: tensor[wanted] for name, tensor in tensors.items()}
        tensors["features"] = tensors["features"].to(torch.bfloat16)
        logits = tensors.pop("logits")
        shared, own = ({}, tensors) if is_own else (tensors, {})
        if self._is_cpu and num_nodes > 1:
            # Here the verdict is known by now: only what was committed has to be copied and reduced.
            nodes = committed_nodes(tensors["accept_index"], tensors["first_node"], num_nodes)
            logits, own, is_own = logits.flatten(0, 1)[nodes], {**own, "nodes": nodes}, True
        copy = self._copy(shared, own, logits, is_own=is_own)
        tickets = tuple(ticket for _, ticket in chosen)
        self._put(_Verified(copy, tickets, _Kind(num_nodes, draft_version, is_tree=verify.topk > 1)))

    def _copy(
        self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], logits: Tensor, *, is_own: bool
    ) -> HostCopy:
        """Start the copies of a step. On a CPU, too, logits that are not our `own` are copied: who holds on to SGLang's
        has it pay for fresh memory in every step.
        """
        if not self._is_cpu or self._queued_bytes > _MOST_QUEUED_BYTES:
            return self._copier.start(shared, {**own, **self._scheduler_top(logits)})
        if is_own:
            return self._copier.start(shared, {**own, "logits": logits})
        return self._copier.start({**shared, "logits": logits}, own)

    def on_release(self, request: Any) -> None:
        """The request gives up its cache: it has ended, was aborted, or was retracted and will be prefilled again."""
        ticket = request.__dict__.pop(_ATTRIBUTE, None)
        if ticket is None or ticket.span is None:
            return
        finished = request.finished() and request.finished_reason.to_json().get("type") != "abort"
        if not finished:
            ticket.dropped = ticket.dropped or ("retracted" if not request.finished() else "aborted")
        tokens = [*request.origin_input_ids, *request.output_ids_through_stop] if finished else []
        self._queue.put(_End(ticket, tokens))
        self._urgent.set()

    def _ticket(self, request: Any) -> Ticket:
        ticket: Ticket | None = getattr(request, _ATTRIBUTE, None)
        if ticket is None:
            ticket = Ticket(self._open(request), parent_of(request.sampling_params.custom_params))
            setattr(request, _ATTRIBUTE, ticket)
        return ticket

    def _open(self, request: Any) -> Span | None:
        policy = policy_of(request.sampling_params.custom_params)
        unlike_target = request.lora_id is not None or request.multimodal_inputs is not None
        if not policy.capture or unlike_target or request.input_embeds is not None:
            return None
        if not self._settings.capture_unmarked and not is_marked(request.sampling_params.custom_params):
            self.dropped["unmarked"] += 1
            return None
        if self._sampler is not None and not self._sampler.follows():
            self.dropped[self._sampler.reason] += 1
            return None
        if not self._budget.admits():
            self.dropped["budget"] += 1
            return None
        if self._held_bytes > self._settings.buffer_bytes:
            self.dropped["buffer_full"] += 1
            return None
        return Span(
            SpanRequest(
                request_id=request.rid,
                num_prompt_tokens=len(request.origin_input_ids),
                sampling=sampling_of(request.sampling_params),
                policy=policy,
                constrained=is_constrained(request),
                created_ms=came_ms(request),
            ),
            target_version=self.target_version,
        )

    def _put(self, event: _Prefill | _Verified) -> None:
        with self._lock:
            self._held_bytes += event.copy.num_bytes
            self._queued_bytes += event.copy.num_bytes
            is_much = self._queued_bytes >= _GATHER_BYTES
        self._queue.put(event)
        if is_much:
            self._urgent.set()

    # -- on the assembler's thread ----------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Assemble what is queued and end."""
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(timeout_s)

    def _assemble(self) -> None:
        """Waits for events; ends at None. What fails costs its own spans, counted; the thread goes on."""
        if self._is_cpu:
            torch.set_num_threads(1)  # of this thread: SGLang's own computes beside it
        while self._take(self._gather()):
            pass

    def _gather(self) -> list[_Event | None]:
        """Waits for an event, and for more until a request ends, there is much, or the time is over."""
        gathered = [self._queue.get()]
        self._urgent.wait(_GATHER_S)
        self._urgent.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                gathered.append(self._queue.get_nowait())
        return gathered

    def _take(self, gathered: list[_Event | None]) -> bool:
        """False where an end is among them."""
        for kind, alike in itertools.groupby(gathered, _kind_of):
            if kind is not None:
                verified = [event for event in alike if isinstance(event, _Verified)]
                with self._failing([ticket for event in verified for ticket in event.tickets]):
                    self._take_verified(kind, verified)
                continue
            for event in alike:
                match event:
                    case _Prefill():
                        with self._failing([ticket for ticket, _, _ in event.rows]):
                            self._take_prefill(event)
                    case _End():
                        self._end(event)
        return None not in gathered

    @contextlib.contextmanager
    def _failing(self, tickets: Sequence[Ticket]) -> Iterator[None]:
        """What cannot be read ends the traces that it belongs to, and no others."""
        try:
            yield
        except Exception as error:
            for ticket in tickets:
                self._fail(ticket, error)

    def _take_prefill(self, event: _Prefill) -> None:
        host = self._arrived([event])
        ids, logprobs = in_order(host["topk_ids"], host["topk_logprobs"])
        additions: list[_Addition] = []
        offset = 0
        for index, (ticket, start, length) in enumerate(event.rows):
            rows = Rows(
                start=start,
                # A copy: a view would keep the whole batch's rows in memory as long as the slowest request.
                features=host["features"][offset : offset + length].clone(),
                topk_ids=ids[index : index + 1].copy(),
                topk_logprobs=logprobs[index : index + 1].copy(),
            )
            additions.append((ticket, rows, []))
            offset += length
        self._grow(additions)

    def _take_verified(self, kind: _Kind, events: Sequence[_Verified]) -> None:
        host = self._arrived(events)
        owners = [ticket for event in events for ticket in event.tickets]
        additions = committed(host, owners, draft_version=kind.draft_version, is_tree=kind.is_tree)
        self._grow(list(additions))

    def _arrived(self, events: Sequence[_Prefill | _Verified]) -> Mapping[str, Tensor]:
        """What was copied, as one, the logits reduced. What is kept of it counts as its spans'."""
        try:
            return joined([self._reduced(event.copy.wait()) for event in events])
        finally:
            num_bytes = sum(event.copy.num_bytes for event in events)
            with self._lock:
                self._held_bytes -= num_bytes
                self._queued_bytes -= num_bytes

    def _reduced(self, host: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the logits out of `host`, so that they are freed one step after the other."""
        logits, nodes = host.pop("logits", None), host.pop("nodes", None)
        if logits is not None:
            host = {**host, **self._assembler_top(logits)}
        return host if nodes is None else {**host, **over_all_nodes(host, nodes)}

    def _grow(self, additions: Sequence[_Addition]) -> None:
        grown = 0
        for ticket, rows, rounds in additions:
            if ticket.span is None or ticket.dropped:
                continue
            before = ticket.span.num_bytes
            try:
                for round_ in rounds:
                    ticket.span.add_round(round_)
                ticket.span.add_rows(rows)
            except Exception as error:
                self._fail(ticket, error)
            grown += ticket.span.num_bytes - before
        with self._lock:
            self._held_bytes += grown
            too_much = self._held_bytes > self._settings.buffer_bytes
        if too_much:
            # The newest pay: what runs now. New requests are not opened until there is room again.
            for ticket, _, _ in additions:
                ticket.dropped = ticket.dropped or "buffer_full"

    def _end(self, event: _End) -> None:
        ticket, span = event.ticket, event.ticket.span
        assert span is not None
        ticket.span = None
        with self._lock:
            self._held_bytes -= span.num_bytes
        if span.target_version != self.target_version:
            ticket.dropped = ticket.dropped or "target_moved"
        if ticket.dropped:
            self.dropped[ticket.dropped] += 1
            return
        started_s = time.perf_counter()
        try:
            trace = span.trace(event.tokens, engine_id=self._engine_id, target_fingerprint=self._fingerprint)
            if trace is None:
                self.dropped["nothing_computed"] += 1
            else:
                self._on_trace(trace)
                record(ticket.parent, "capture", time.perf_counter() - started_s, tokens=trace.num_tokens)
        except Exception as error:
            self._fail(ticket, error)
            self.dropped[ticket.dropped] += 1

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.dropped = "inconsistent" if isinstance(error, InconsistentSpanError) else "failed"
        log.error("a trace is dropped: %s", type_and_place(error))


def _kind_of(event: _Event | None) -> _Kind | None:
    return event.kind if isinstance(event, _Verified) else None
