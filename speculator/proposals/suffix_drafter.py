"""Suffix drafts: proposals from recent text, for requests that repeat what was written before.

SuffixDecoding (arXiv 2411.04975) matches the end of a request with its own prompt and answer and with recent answers
and proposes what followed there. Here a request looks into three places, and proposes first of all from the longest
match in the one whose next token is the likeliest to be accepted:

* its own prompt and answer so far (code that is edited, lists that go on as they began);
* recent answers to the same prompt, running ones included (groups of rollouts; DAS, arXiv 2511.13841, and Seer, arXiv
  2511.14617, keep such a window for each problem);
* recent answers to the same tenant. A tenant's text lies in an object of its own, and a request holds that one object:
  there is no path to another tenant's.

Where the text may go on in several ways, the proposal is a tree (speculator/proposals/suffix_tree.py).

Why not `arctic_inference.suffix_decoding`: it is published as source only, and to install it takes a C++ compiler,
CMake and a copy of PyTorch; it drops whole requests, not tokens; and its probabilities are plain frequencies: on the
answers of benchmarks/results/suffix.md it needs more proposals for the same acceptance.

The engine's loop thread is the only user. Verification decides every token, so nothing here can change an answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from speculator.proposals.calibration import Calibration
from speculator.proposals.suffix_index import NEW_TEXT, SuffixIndex
from speculator.proposals.suffix_tree import Source, SuffixProposal, TreeGrower

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Windows are in tokens, of about 65 bytes in real text and at most 185.

    Besides the running requests' own text at most max_tenants · (tenant_window + max_groups · group_window) are kept:
    2.6 million with these defaults, or 170 MB of real text. Dropped windows live on while a request still uses them.
    """

    alpha: float = 4.0
    """Depth of a tree per token of match."""
    width: int = 3
    """Most proposals beside each other behind the same tokens, by one match; with 1 trees are chains, of one match."""
    min_reach: float = 0.05
    """A tree ends before a proposal that is reached and accepted with less than this probability. Whoever pays more
    than about 3% of a round for a proposal cuts it further: their probabilities say where."""
    max_match: int = 16
    max_places: int = 16
    request_window: int = 32_768
    group_window: int = 8_192
    tenant_window: int = 32_768
    max_groups: int = 16
    """A tenant's groups; the one that was used least recently is dropped."""
    max_tenants: int = 16
    max_target_age: int = 4
    """Changes of the target after which a tenant's windows go: text of a policy that moves ages by steps."""


class Recent(OrderedDict[str, T]):
    """At most `size` things, each made when it is first asked for; the least recently asked for is dropped."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        super().__init__()
        self._size, self._make = size, make

    def of(self, name: str) -> T:
        if name not in self:
            self[name] = self._make()
        self.move_to_end(name)
        while len(self) > self._size:
            self.popitem(last=False)
        return self[name]


class Tenant:
    """Everything that one tenant's requests may propose from, and what became of such proposals."""

    def __init__(self, config: SuffixConfig) -> None:
        self.answers = _index(config, config.tenant_window)
        self.groups = Recent(config.max_groups, lambda: _index(config, config.group_window))
        """Answers to one prompt each, by the group's name."""
        self.calibration = Calibration()
        self.born_s = time.monotonic()
        self.target_age = 0
        """Changes of the target since the first text."""


class SuffixDrafter:
    """The recent text of every tenant that an engine serves."""

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self._config = config or SuffixConfig()
        self._tenants = Recent(self._config.max_tenants, lambda: Tenant(self._config))

    def start(self, prompt: Sequence[int], *, tenant: str, group_id: str = "", shared: bool = True) -> SuffixRequest:
        """A request whose answer is to follow `prompt`; indexing takes about a microsecond a token.

        With `shared` false the request proposes from its own text alone and leaves nothing behind.
        """
        home = self._tenants.of(tenant) if shared else Tenant(self._config)
        return SuffixRequest(self._config, prompt, home, home.groups.of(group_id) if shared and group_id else None)

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a group that has ended."""
        if tenant in self._tenants:
            self._tenants[tenant].groups.pop(group_id, None)

    @property
    def num_tokens(self) -> int:
        """In all windows that are kept; those of running requests' own text come on top."""
        return sum(
            len(tenant.answers) + sum(len(group) for group in tenant.groups.values())
            for tenant in self._tenants.values()
        )

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; what runs keeps what it reads until it ends."""
        for tenant in tenants:
            self._tenants.pop(tenant, None)

    def expire(self, ttl_s: float) -> None:
        """Drop a tenant's windows, whole, when the first text in them may be so old."""
        self.forget([name for name, tenant in self._tenants.items() if time.monotonic() - tenant.born_s > ttl_s])

    def target_moved(self) -> None:
        """Drop a tenant's windows, whole, when the first text in them is of a target that is too far away."""
        for tenant in self._tenants.values():
            tenant.target_age += 1
        max_age = self._config.max_target_age
        self.forget([name for name, tenant in self._tenants.items() if tenant.target_age > max_age])


class SuffixRequest:
    """One running answer: its own text, and the texts of its tenant and group that it reads and extends."""

    def __init__(self, config: SuffixConfig, prompt: Sequence[int], tenant: Tenant, group: SuffixIndex | None) -> None:
        self._config = config
        self._indexes = {Source.OWN: _index(config, config.request_window)}
        if group is not None:
            self._indexes[Source.GROUP] = group
        self._indexes[Source.TENANT] = tenant.answers
        # Shared texts begin with the prompt's last tokens: so the beginnings of answers are found too.
        self._context = list(prompt[-config.max_match :])
        before = {Source.OWN: prompt[-config.request_window :]}
        self._texts = {
            source: index.append(NEW_TEXT, before.get(source, self._context)) for source, index in self._indexes.items()
        }
        self.publish: Callable[[Sequence[int]], None] | None = None
        """Told what is committed."""
        self._newest = SuffixProposal()
        self._grower = TreeGrower(
            self._indexes, tenant.calibration, alpha=config.alpha, width=config.width, min_reach=config.min_reach
        )

    @property
    def group(self) -> SuffixIndex | None:
        """Recent answers to the same prompt."""
        return self._indexes.get(Source.GROUP)

    @property
    def context(self) -> Sequence[int]:
        """The last tokens."""
        return self._context

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, proposed or not: they also say how good the newest tree was.

        So a source is judged while it is not used, and used again when it has become better.
        """
        self._grower.judge(self._newest, tokens)
        self._newest = SuffixProposal()
        for source, index in self._indexes.items():
            self._texts[source] = index.append(self._texts[source], tokens)
        self._context = [*self._context, *tokens][-self._config.max_match :]
        if self.publish is not None:
            self.publish(tokens)

    def propose(self, max_tokens: int) -> SuffixProposal:
        """At most `max_tokens` proposals."""
        self._newest = self._grower.grow(self._context, max_tokens)
        return self._newest

    def rounds_saved(self, tokens: Sequence[int], max_tokens: int) -> float:
        """How many rounds with these trees alone, of at most `max_tokens`, it saves to be given the next `tokens` by
        another: after each of them a round would have committed one more and what its tree promises.
        """
        saved, context = 0.0, self._context
        for token in tokens:
            context = [*context, token][-self._config.max_match :]
            saved += 1 / (1 + sum(self._grower.grow(context, max_tokens).tree.reaches))
        return saved


def _index(config: SuffixConfig, window: int) -> SuffixIndex:
    return SuffixIndex(window, max_match=config.max_match, max_places=config.max_places)
