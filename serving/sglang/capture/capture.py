"""Capture on SGLang's scheduler thread: which requests are captured, and what is copied of a step for them.

Rows of captured requests are copied to the host, and the assembler, a thread of its own, makes spans and traces of
them. Logits are reduced to their top tokens where that costs the scheduler least: on a GPU before the copy, on a CPU by
the assembler, on another core. A request's span is an attribute of SGLang's own request object, so it is freed with the
request.

`ByteBudget` bounds how many bytes of traces a second are captured.
"""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from serving.capture.sampling import BranchSampler, CaptureSampler
from serving.sglang.capture.assembler import CopiedVerification, Prefill, TraceAssembler
from serving.sglang.capture.device_reads import LEAST_PROBABILITY, DraftLogprobRecorder, HostCopier, Packed, TextRows
from serving.sglang.capture.request import (
    CaptureState,
    RequestSpan,
    SpanRequest,
    has_metadata,
    is_constrained,
    is_health_check,
    parent_of,
    policy_of,
    received_ms,
    sampling_of,
)
from serving.sglang.capture.verification_rows import TopTokens
from serving.sglang.device import Device, DeviceEvent
from serving.sglang.settings import PluginSettings
from speculator.trace import quantised

_BURST_S = 2.0


class ByteBudget:
    """A token bucket of encoded bytes: requests are admitted while it is not overdrawn."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._balance, self._at_s = bytes_per_s * _BURST_S, clock()

    def admits(self) -> bool:
        if self._rate == 0:
            return True
        now_s = self._clock()
        self._balance = min(self._balance + (now_s - self._at_s) * self._rate, self._rate * _BURST_S)
        self._at_s = now_s
        return self._balance > 0

    def spend(self, num_bytes: int) -> None:
        self._balance -= num_bytes


_ATTRIBUTE = "_slipstream_ticket"
_MOST_LAUNCHED = 8
"""Launched verifications that may wait for their verdict. With overlap scheduling SGLang reports a verdict after the
next launch. If it skips one, later verifications get the wrong verdict; their positions contradict each other, and
their traces are dropped."""


@dataclass(eq=False)
class _Launched:
    """A verification that SGLang has launched, and what is kept of its captured requests until its verdict is known."""

    indices: tuple[int, ...]
    """Indices of the captured requests in the batch."""
    tickets: tuple[CaptureState, ...]
    num_nodes: int
    draft_version: int
    has_text: bool
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    """[B · N, w]"""
    by_node: Mapping[str, Tensor] = field(default_factory=dict)
    """[B · N, …] top tokens, or logits where they are reduced late."""
    by_tree: Packed | None = None
    """Of the whole batch: so small that copying all is cheaper than selecting."""
    nodes: Tensor | None = None
    """[B, A] of a tree: the accepted path, numbered over these requests."""
    made: DeviceEvent | None = None
    """Reached once the step's stream has computed all of it."""

    def tensors(self) -> list[Tensor]:
        found = [self.features, *self.by_node.values()]
        found += [] if self.by_tree is None else [self.by_tree.data]
        return found if self.nodes is None else [*found, self.nodes]


def _positions(counts: Sequence[int], width: int) -> list[int]:
    """Flat indices of the first `counts[i]` columns of each row i of a matrix of that width."""
    return [row * width + column for row, count in enumerate(counts) for column in range(count)]


class StepCapture:
    """Captures the requests of one scheduler."""

    def __init__(
        self,
        settings: PluginSettings,
        assembler: TraceAssembler,
        *,
        device: Device,
        probe: DraftLogprobRecorder,
        budget: ByteBudget,
        sampler: CaptureSampler | None = None,
    ) -> None:
        self._settings, self.assembler, self._probe = settings, assembler, probe
        self._budget, self._sampler = budget, sampler
        self._branches = BranchSampler(
            settings.branch_share, over_budget=lambda num_rows: assembler.branch_rows.update(budget=num_rows)
        )
        self._device, self._copier = device, HostCopier(device)
        self.top_tokens = TopTokens(settings.capture_topk, device)
        self._quantises = not device.is_host and settings.capture_features == "float8"
        """Whether this thread converts features to float8; on a CPU the recorder does it, on its own thread."""
        self._launched: collections.deque[_Launched] = collections.deque()
        """The oldest in front."""
        self.reduces_late = device.is_host
        """Whether the assembler reduces logits: on a CPU it has another core for that."""
        self._open_tickets = weakref.WeakSet[CaptureState]()
        """Tickets of running requests. Weak: a request may vanish without being released."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Requests that could have been captured but were not, by reason."""

    def read_prefill(self, batch: Any, hidden: Tensor, logits: Tensor) -> None:
        """Capture the rows of a prefill that was just launched.

        `hidden` is [tokens, w]; `logits` [B, V] are those of the last positions. Call it before SGLang samples, which
        turns the logits into probabilities, in place.
        """
        rows, features, chosen = [], [], []
        offset = 0
        for index, (request, start, length) in enumerate(
            zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            ticket = self._ticket(request)
            if (span := ticket.growing) is not None:
                first = max(start, span.request.num_prompt_tokens - self._settings.context_window)
                kept = max(start + length - first, 0)
                if kept:
                    rows.append((ticket, first, kept))
                    features.append(hidden[offset + length - kept : offset + length])
                    chosen.append(index)
            offset += length
        if rows:
            own = self._of_features(torch.cat(features))
            picked = logits if len(chosen) == len(logits) else logits[self._device.index(tuple(chosen))]
            if not self.reduces_late or self.assembler.is_behind:
                own |= self.top_tokens(picked)
            else:
                # Cloned, since SGLang's sampling overwrites its logits.
                own["logits"] = picked.clone() if picked is logits else picked
            self.assembler.hand_over(Prefill(self._copier.start(own), tuple(rows)))

    def before_verify(self, batch: Any) -> Mapping[str, Any]:
        """Read the fields of a verification's input that `after_verify` needs."""
        return {"input": batch.spec_info, "draft_token": batch.spec_info.draft_token, "seq_lens": batch.seq_lens}

    def after_verify(
        self,
        batch: Any,
        before: Mapping[str, Any],
        result: Any,
        accept_index: Tensor,
        draft_version: int,
        text: TextRows | None = None,
    ) -> None:
        """Keep the rows of a verification that was just launched: N nodes a request, the last committed token first.

        `accept_index` [B, A] are the nodes along the accepted path, numbered over the batch, −1 behind it. The host
        learns later how many were accepted (`verified`); until then everything stays on the device. `text` says which
        proposals were earlier text.
        """
        tickets = {}
        for index, request in enumerate(batch.reqs):
            ticket: CaptureState | None = getattr(request, _ATTRIBUTE, None)
            # `CaptureState.growing` inlined, which saves a call for each request and step.
            if ticket is None or (span := ticket.span) is None:
                continue
            if not (ticket.dropped or span.is_cut):
                tickets[index] = ticket
        self._launched.append(self._staged(tickets, batch, before, result, accept_index, draft_version, text))
        if len(self._launched) > _MOST_LAUNCHED:
            self._launched.popleft()

    def verified(self, accepted: Sequence[int]) -> None:
        """Copy the rows of the oldest launched verification, given the number of accepted proposals of each request.

        The committed rows are copied, and of a share of the chains the rejected ones.
        """
        if not self._launched:
            return
        launched = self._launched.popleft()
        if launched.by_tree is None or launched.made is None:
            return
        with self._device.side_stream():
            # SGLang launches a step on one stream and reports its verdict on another.
            self._device.wait_event(launched.made)
            self._device.record_stream(launched.tensors())
            self._hand_over(launched, launched.by_tree, [1 + accepted[index] for index in launched.indices])

    def _hand_over(self, launched: _Launched, by_tree: Packed, counts: Sequence[int]) -> None:
        sizes = self._sizes(launched, counts)
        front = self._device.upload(_positions(sizes, launched.num_nodes))
        # SGLang has moved the features of a tree's accepted path to the front; its logits stay where the nodes are.
        walked = front
        if launched.nodes is not None:
            walked = launched.nodes.flatten()[self._device.upload(_positions(counts, launched.nodes.shape[1]))]
        by_node = {name: tensor.index_select(0, walked) for name, tensor in launched.by_node.items()}
        if "logits" in by_node and self.assembler.is_behind:
            by_node = self.top_tokens(by_node["logits"])
        rows = {**self._of_features(launched.features.index_select(0, front)), **by_node}
        self.assembler.hand_over(
            CopiedVerification(
                self._copier.start({**rows, "by_tree": by_tree.data}),
                by_tree.places,
                launched.indices,
                launched.tickets,
                tuple(counts),
                sizes,
                launched.num_nodes,
                launched.draft_version,
                is_tree=launched.nodes is not None,
                has_text=launched.has_text,
            )
        )

    def _sizes(self, launched: _Launched, counts: Sequence[int]) -> tuple[int, ...]:
        """How many nodes of each request keep their rows: the committed ones, or all of a chain that is drawn.

        A tree's rejected features are overwritten by those of its accepted path.
        """
        sizes = list(counts)
        if launched.nodes is None:
            for index in self._branches.drawn(counts, [launched.num_nodes - count for count in counts]):
                span = launched.tickets[index].growing
                # A rejection may come from the grammar, not from the target.
                if span is not None and not span.request.constrained:
                    sizes[index] = launched.num_nodes
        return tuple(sizes)

    def on_release(self, request: Any) -> None:
        """Handle a request that releases its KV cache: it has ended, was aborted, or was retracted and will be
        prefilled again.
        """
        ticket = request.__dict__.pop(_ATTRIBUTE, None)
        if ticket is None or ticket.span is None:
            return
        finished = request.finished() and request.finished_reason.to_json().get("type") != "abort"
        if not finished:
            ticket.dropped = ticket.dropped or ("retracted" if not request.finished() else "aborted")
        tokens = [*request.origin_input_ids, *request.output_ids_through_stop] if finished else []
        self._open_tickets.discard(ticket)
        self.assembler.end(ticket, tokens)

    def stop(self) -> None:
        """Drop and free the spans of all running requests, after an error. Nothing may be captured afterwards."""
        for ticket in list(self._open_tickets):
            ticket.dropped = ticket.dropped or "failed"
            self.assembler.end(ticket, [])
        self._open_tickets.clear()
        self._launched.clear()

    def _staged(
        self,
        tickets: Mapping[int, CaptureState],
        batch: Any,
        before: Mapping[str, Any],
        result: Any,
        accept_index: Tensor,
        draft_version: int,
        text: TextRows | None,
    ) -> _Launched:
        """Copy what is kept of a verification: a graph overwrites its outputs at the next replay."""
        num_requests, num_nodes = len(batch.reqs), before["input"].draft_token_num
        launched = _Launched(tuple(tickets), tuple(tickets.values()), num_nodes, draft_version, text is not None)
        if not tickets:
            return launched
        by_tree = {"seq_lens": before["seq_lens"]}
        if num_nodes > 1:
            by_tree |= {
                "draft_token": before["draft_token"].view(num_requests, num_nodes),
                "draft_logprobs": self._draft_logprobs(before, batch.req_pool_indices),
            }
            if text is not None:
                by_tree["draft_logprobs"] = torch.where(text.is_text_at, text.logprobs, by_tree["draft_logprobs"])
                by_tree |= {"is_text": text.is_text, "num_proposals": text.num_proposals()}
        if before["input"].topk > 1:
            asked = before["input"]
            by_tree |= {"next_token": asked.retrieve_next_token, "next_sibling": asked.retrieve_next_sibling}
            # SGLang numbers nodes over the whole batch.
            by_tree["path"] = accept_index - num_nodes * torch.arange(num_requests, device=accept_index.device)[:, None]
        features = result.logits_output.hidden_states.view(num_requests, num_nodes, -1)
        logits = result.logits_output.next_token_logits.view(num_requests, num_nodes, -1)
        if len(tickets) < num_requests:
            chosen = self._device.index(tuple(tickets))
            features, logits = features.index_select(0, chosen), logits.index_select(0, chosen)
        elif not self._device.is_host:
            features = features.clone()
        launched.by_tree, launched.features = Packed.of(by_tree), features.flatten(0, 1)
        by_node = logits.flatten(0, 1)
        launched.by_node = {"logits": by_node} if self.reduces_late else self.top_tokens(by_node)
        if "path" in by_tree:
            own_B1 = torch.arange(len(tickets), device=accept_index.device)[:, None]
            launched.nodes = by_tree["path"][self._device.index(tuple(tickets))] + num_nodes * own_B1
        launched.made = self._device.record_event()
        return launched

    def _draft_logprobs(self, before: Mapping[str, Any], req_pool_indices: Tensor) -> Tensor:
        """[B, P] float32 of the proposals, under the distribution that they come from."""
        asked = before["input"]
        if asked.draft_probs is None:
            return self._probe.logprobs(req_pool_indices, asked.draft_token_num - 1)
        drawn_BP = before["draft_token"].view(-1, asked.draft_token_num)[:, 1:]
        probs_BP: Tensor = asked.draft_probs.gather(2, drawn_BP[..., None])[..., 0]
        return probs_BP.clamp_min(LEAST_PROBABILITY).log()

    def _of_features(self, features: Tensor) -> dict[str, Tensor]:
        """Features as they are copied and kept: on a GPU already float8 as in traces, at half the bytes."""
        features = features.to(torch.bfloat16)
        if not self._quantises:
            return {"features": features}
        small, scale = quantised(features)
        # As bytes: PyTorch supports few operations on float8.
        return {"features": small.view(torch.uint8), "scale": scale}

    def _ticket(self, request: Any) -> CaptureState:
        ticket: CaptureState | None = getattr(request, _ATTRIBUTE, None)
        if ticket is None:
            ticket = CaptureState(self.open_span(request), parent_of(request.sampling_params.custom_params))
            setattr(request, _ATTRIBUTE, ticket)
            if ticket.span is not None:
                self._open_tickets.add(ticket)
        return ticket

    def open_span(self, request: Any) -> RequestSpan | None:
        """A new span for the rows of a request; None where it is not captured."""
        policy = policy_of(request.sampling_params.custom_params)
        unlike_target = request.lora_id is not None or request.multimodal_inputs is not None
        unlike_target |= request.input_embeds is not None
        if not policy.capture or unlike_target or is_health_check(request):
            return None
        reason = self._refusal(request)
        if reason is not None:
            self.refused[reason] += 1
            return None
        return RequestSpan(
            SpanRequest(
                request_id=request.rid,
                num_prompt_tokens=len(request.origin_input_ids),
                sampling=sampling_of(request.sampling_params),
                policy=policy,
                constrained=is_constrained(request),
                created_ms=received_ms(request),
            ),
            target_version=self.assembler.target_version,
        )

    def _refusal(self, request: Any) -> str | None:
        """Why a request is not captured that could be; None where it is."""
        if not self._settings.capture_unmarked and not has_metadata(request.sampling_params.custom_params):
            return "unmarked"
        if self._sampler is not None and not self._sampler.follows():
            return self._sampler.reason
        if not self._budget.admits():
            return "budget"
        return None if self.assembler.has_room else "buffer_full"
