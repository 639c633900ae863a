"""Proposals of a round: for each request its suffix tree or the draft head's chain, as the planner decides.

Suffix trees are built from `RecentTexts`: answers of this engine, and of others in the same prompt groups. A request
verifies the tree or the chain, whichever is expected to have more tokens accepted. All are cut at one length: where one
more token of each would cost more time than it saves.

Shape letters: B batch, d hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serving.engine import GenerateRequest
from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupKey
from serving.local.draft import Pairs, PairSpan, ServingDraft
from serving.local.request import ActiveRequest
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from speculator.proposals.draft_tree import NO_PROPOSALS, DraftTree
from speculator.proposals.planner import ONE_STEP, DraftStep, HeadVerdict, Plan, RoundPlanner
from speculator.proposals.suffix_drafter import SuffixDrafter, SuffixProposal, SuffixRequest, TextSource

SuffixCacheTask = Callable[[SuffixDrafter], None]
"""A change to the kept text, to be run on the engine's thread."""


class RecentTexts:
    """Text that suffix drafts propose from. For the engine's thread. Without `drafter` no text is kept."""

    def __init__(self, drafter: SuffixDrafter | None, sharing: GroupSharing | None, metrics: EngineMetrics) -> None:
        self.drafter, self._sharing, self._metrics = drafter, sharing, metrics

    def begin(self, request: GenerateRequest) -> SuffixRequest | None:
        """The suffix drafts of a new request; None if no text is kept."""
        if self.drafter is None:
            return None
        policy = request.policy
        # Text of requests that opt out of capture is not proposed to others either.
        found = self.drafter.start(
            request.prompt_token_ids, tenant=policy.tenant, group_id=policy.group_id, shared=policy.capture
        )
        if self._sharing is not None and found.group is not None:
            found.publish = self._sharing.join(GroupKey(policy.tenant, policy.group_id), found.group, found.context)
        return found

    def index_received(self) -> None:
        """Index some of the text that has arrived from other engines."""
        if self._sharing is not None:
            self._sharing.index_received()

    def target_updated(self, version: int) -> None:
        if self.drafter is not None:
            self.drafter.target_updated()
        if self._sharing is not None:
            self._sharing.set_target_version(version)

    def change(self, task: SuffixCacheTask) -> None:
        if self.drafter is not None:
            task(self.drafter)
            self.count()

    def count(self) -> None:
        """Report how many tokens are kept."""
        if self.drafter is not None:
            self._metrics.suffix_tokens.set(self.drafter.num_tokens)


_MAX_PAIRS_A_PASS = 64
"""Most pairs that the draft reads in one pass, when it catches up after a long time at depth 0."""


@dataclass(frozen=True)
class Proposal:
    """The proposals of one request that are verified, and whether they are suffix drafts or the head's."""

    tree: DraftTree = NO_PROPOSALS
    is_suffix: bool = False
    sources: tuple[TextSource, ...] = ()
    """For each node of a suffix tree, whose text it is from."""


@dataclass(frozen=True)
class Probe:
    """A probe of the unused head: the one token that it would propose for one request; not verified."""

    row: int
    token: int
    probability: float
    is_worth_it: bool
    """Whether a round with the head would verify this token."""
    rounds_saved: float
    """Rounds that the token would save if the target emits it."""


@dataclass(frozen=True)
class Proposals:
    """Proposals of a round by request, and the head's cost: seconds, steps, pairs read; 0 if it did not run."""

    plan: Plan
    by_request: tuple[Proposal, ...]
    probe: Probe | None = None
    num_steps: int = 0
    num_pairs: int = 0
    seconds: float = 0.0

    @property
    def width(self) -> int:
        """Number of proposals of the request with the most."""
        return max(len(proposal.tree.tokens) for proposal in self.by_request)


@dataclass(frozen=True)
class VerifiedProposal:
    """Result of verifying one request's proposals."""

    generation: ActiveRequest
    proposal: Proposal
    from_head: bool
    """Whether the head drafted for it, possibly nothing worth verifying."""
    accepted_nodes: tuple[int, ...]
    num_committed: int
    rounds_saved: float
    """Rounds that the accepted tokens of the head saved."""

    @property
    def num_accepted(self) -> int:
        return len(self.accepted_nodes)

    @property
    def accepted_sources(self) -> list[TextSource]:
        """For each accepted node of a suffix tree, whose text it is from."""
        return [self.proposal.sources[node] for node in self.accepted_nodes] if self.proposal.sources else []


class Proposer:
    """Plans and makes the proposals of each round. For the engine's thread."""

    def __init__(self, draft: ServingDraft, reader: DraftReader, planner: RoundPlanner, *, suffix_depth: int) -> None:
        self._draft, self._reader, self._planner, self._suffix_depth = draft, reader, planner, suffix_depth

    def propose(self, generations: Sequence[ActiveRequest], *, head_depth: int) -> Proposals:
        """Make proposals for the requests in slots 0…B−1; `head_depth`: longest chain of the head."""
        suffixes = [self._suffix(generation) for generation in generations]
        reaches = [suffix.tree.reaches for suffix in suffixes]
        num_keys = sum(len(generation.tokens) for generation in generations)
        unread = [generation.num_pairs_unread for generation in generations]
        domains = [generation.request.policy.domain for generation in generations]
        plan = self._planner.plan(domains, num_keys, reaches, head_depth=head_depth, unread=unread)
        if plan.uses_head:
            # The suffix tree of a request without drafts is empty.
            without = [not generation.request.drafts for generation in generations]
            from_suffix = tuple(one or other for one, other in zip(plan.from_suffix, without, strict=True))
            plan = replace(plan, from_suffix=from_suffix)
            return self._with_head(plan, generations, suffixes, reaches, head_depth)
        cut = tuple(_cut(suffix, plan.num_proposals) for suffix in suffixes)
        return Proposals(plan, cut) if plan.probe is None else self._with_probe(plan, cut, plan.probe, generations)

    def observe(
        self,
        proposals: Proposals,
        verified: Sequence[VerifiedProposal],
        verify_s: float | None,
        *,
        probe_was_right: bool,
    ) -> None:
        """Feed a round's results to the planner: its time without drafting (None if a prompt chunk was read in it), the
        verification of each proposal, and whether the target emitted the probe's token.
        """
        self._planner.observe(
            proposals.plan,
            num_proposals=proposals.width,
            num_steps=proposals.num_steps,
            num_pairs=proposals.num_pairs,
            draft_s=proposals.seconds,
            verify_s=verify_s,
        )
        verdicts = [
            HeadVerdict(
                row.generation.request.policy.domain,
                row.proposal.tree.probabilities,
                row.num_accepted,
                rounds_saved=row.rounds_saved,
            )
            for row in verified
            if row.from_head
        ]
        if (probe := proposals.probe) is not None:
            domain = verified[probe.row].generation.request.policy.domain
            verdicts.append(
                HeadVerdict(domain, (probe.probability,), int(probe_was_right), probe.is_worth_it, probe.rounds_saved)
            )
        self._planner.observe_head(verdicts)

    def rounds_saved(self, generation: ActiveRequest, tokens: Sequence[int]) -> float:
        """Rounds that a request saves by getting its next `tokens` from the head; call before they are committed."""
        if generation.suffix is None:
            return float(len(tokens))
        return generation.suffix.rounds_saved(tokens, self._suffix_depth)

    def _suffix(self, generation: ActiveRequest) -> SuffixProposal:
        if generation.suffix is None or not generation.request.drafts:
            return SuffixProposal()
        # A round always adds one token of the target's own, so the answer's last token needs no proposal.
        return generation.suffix.propose(min(self._suffix_depth, generation.tokens_left - 1))

    def _with_probe(
        self, plan: Plan, suffixes: tuple[Proposal, ...], row: int, generations: Sequence[ActiveRequest]
    ) -> Proposals:
        started_s = time.perf_counter()
        generation = generations[row]
        pairs, num_pairs = self._reader.unread([generation], first_slot=row)
        # One step does not touch the keys of any slot.
        (((token,), (score,)),) = self._draft.propose(pairs, [1.0], [generation.source], ONE_STEP)
        probability = math.exp(score)
        # Scaled to the whole batch: a round with the head would decide for all requests together.
        reach = len(generations) * self._planner.head_probability(0, probability)
        is_worth_it = self._planner.is_worth_verifying(plan, 0, reach)
        probe = Probe(row, token, probability, is_worth_it, self.rounds_saved(generation, (token,)))
        return Proposals(plan, suffixes, probe, 1, num_pairs, time.perf_counter() - started_s)

    def _with_head(
        self,
        plan: Plan,
        generations: Sequence[ActiveRequest],
        suffixes: Sequence[SuffixProposal],
        reaches: Sequence[Sequence[float]],
        head_depth: int,
    ) -> Proposals:
        started_s = time.perf_counter()
        kept, num_steps, num_pairs = self._head_steps(plan, generations, reaches, head_depth)
        seconds = time.perf_counter() - started_s
        width = len(kept)
        # Beyond the head's chains, suffix trees alone go on as long as they pay.
        while (total := _total(reaches, plan.from_suffix, width)) > 0 and self._planner.is_worth_verifying(
            plan, width, 0.0, total
        ):
            width += 1
        by_request = [
            _cut(suffix, width)
            if is_suffix
            else Proposal(DraftTree.chain([ids[row] for ids, _ in kept], [math.exp(scores[row]) for _, scores in kept]))
            for row, (suffix, is_suffix) in enumerate(zip(suffixes, plan.from_suffix, strict=True))
        ]
        return Proposals(plan, tuple(by_request), None, num_steps, num_pairs, seconds)

    def _head_steps(
        self, plan: Plan, generations: Sequence[ActiveRequest], reaches: Sequence[Sequence[float]], head_depth: int
    ) -> tuple[list[DraftStep], int, int]:
        """(steps that are worth verifying, steps computed, pairs read)."""
        pairs, num_pairs = self._reader.unread(generations)
        reach_B = [0.0 if is_suffix else 1.0 for is_suffix in plan.from_suffix]
        of_suffixes = [_total(reaches, plan.from_suffix, step) for step in range(head_depth)]
        rule = self._planner.chain_rule(plan, of_suffixes)
        sources = [generation.source for generation in generations]
        steps = self._draft.propose(pairs, reach_B, sources, rule)
        kept: list[DraftStep] = []
        for step in steps:
            reach_B = rule.reached(len(kept), reach_B, step.logprobs)
            if not self._planner.is_worth_verifying(plan, len(kept), sum(reach_B), of_suffixes[len(kept)]):
                break
            kept.append(step)
        return kept, len(steps), num_pairs


def _total(reaches: Sequence[Sequence[float]], chosen: Sequence[bool], step: int) -> float:
    """Expected accepted proposals at position `step` (from 0), summed over the chosen suffix trees."""
    return sum(reach[step] for reach, is_chosen in zip(reaches, chosen, strict=True) if is_chosen and step < len(reach))


def _cut(suffix: SuffixProposal, num_nodes: int) -> Proposal:
    tree = suffix.tree.first(num_nodes)
    order = tree.depth_first()
    return Proposal(tree.reordered(order), is_suffix=True, sources=tuple(suffix.chosen[n].kind.source for n in order))


class DraftReader:
    """Keeps the target's features, which draft and capture read, and lets the draft read pairs."""

    def __init__(self, target: Target, draft: ServingDraft) -> None:
        self._draft = draft
        slots, length = target.cache.num_slots, target.cache.length
        width = 3 * target.embed.shape[1]
        self._features = torch.zeros(slots, length, width, dtype=target.embed.dtype, device=target.device)

    def keep(self, slot: int, start: int, aux_Tw: Tensor) -> None:
        """Store features [T, 3d] of positions from `start` on."""
        self._features[slot, start : start + len(aux_Tw)] = aux_Tw

    def features(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of the features [end − start, 3d] of positions start … end − 1, in the bfloat16 of traces."""
        return self._features[slot, start:end].to("cpu", torch.bfloat16, copy=True)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._draft.cache.move(source, destination, length)
        self._features[destination, :length] = self._features[source, :length]

    def read(self, slot: int, generation: ActiveRequest, num_pairs: int) -> None:
        """Let the draft read up to `num_pairs` unread pairs of one request."""
        if generation.num_pairs_unread:
            self._draft.read(self._taken([generation], slot, num_pairs))

    def unread(self, generations: Sequence[ActiveRequest], *, first_slot: int = 0) -> tuple[Pairs, int]:
        """(pairs for the draft's next call, how many were unread). If they are too many for one pass, reads the earlier
        ones here.
        """
        num_pairs = sum(generation.num_pairs_unread for generation in generations)
        for slot, generation in enumerate(generations, first_slot):
            while generation.num_pairs_unread > _MAX_PAIRS_A_PASS:
                self.read(slot, generation, _MAX_PAIRS_A_PASS)
        return self._taken(generations, first_slot, _MAX_PAIRS_A_PASS), num_pairs

    def _taken(self, generations: Sequence[ActiveRequest], first_slot: int, num_pairs: int) -> Pairs:
        """Take up to `num_pairs` pairs of each request, at least one, and mark them as read."""
        tokens: list[int] = []
        spans: list[PairSpan] = []
        for slot, generation in enumerate(generations, first_slot):
            start = generation.num_pairs_read
            ids = generation.tokens[start + 1 : start + 1 + num_pairs]
            tokens += ids
            spans.append(PairSpan(slot, start, len(ids)))
            generation.num_pairs_read += len(ids)
        return Pairs(tokens, spans, self._features)
