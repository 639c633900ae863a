"""The draft in training: where its weights come from, and one step after another.

**Weights** descend from a version of the store. `resume` loads them from the trainer's checkpoint, or from that version
where there is no checkpoint. Where engines or the review rolled that version back, training goes on from the last good
one: `restart_from`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import structlog
import torch
from torch import Tensor

from speculator.draft.checkpoint import read_target_tensor
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import ConfigError, DraftMismatchError, StoreError
from speculator.versions.lineage import TenantCounts, counts_of, ensure_lineage, load_draft
from speculator.versions.store import DraftStore
from trainer.checkpoint import Progress, load_checkpoint
from trainer.config import ENV_PREFIX, TrainerConfig, shared_checksum
from trainer.drift import LearningCurve
from trainer.learning.batch import cut, pack
from trainer.learning.optimizer_step import Guard, Learner, StepReport
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.replay.buffer import ReplayBuffer
from trainer.replay.reservoirs import Stored, without_stale

log = structlog.get_logger()


class Training:
    """The learner and its counters. The same on every rank, except for batches and suspected traces."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        store: DraftStore,
        replay: ReplayBuffer,
        metrics: TrainerMetrics,
        *,
        target_fingerprint: str,
        device: torch.device,
        rng: random.Random,
    ) -> None:
        """Begins with the newest version that may be served, or stores a fresh draft as the first version; not in an
        empty store where a checkpoint descends from a version.

        Raises ConfigError, StoreError, DraftFileError or DraftMismatchError.
        """
        self._config, self._ranks, self._store, self._replay = config, ranks, store, replay
        self._metrics, self._fingerprint, self._rng = metrics, target_fingerprint, rng
        self.version = ranks.run_on_leader(self._ensure_lineage)
        """The version that the weights descend from: the last published one, or the one that `restart_from` loaded."""
        # The draft goes where its embedding is.
        self._embed_Vd = read_target_tensor(config.model_dir, "model.embed_tokens.weight").to(device)
        self.learner = self._new_learner()
        self.tenants = self._tenants_of_version()
        """Tokens learnt from, by tenant, since this rank started; on rank 0 also all from before."""
        self.guard = Guard()
        self.curve = LearningCurve()
        self.learnt_tokens = 0
        self.tokens_since_news = 0
        self._suspects: list[Stored] = []

    def resume(self) -> Progress:
        """Load the last checkpoint, where there is one. Its version may be barred meanwhile.

        Raises ConfigError where the ranks have different settings or checkpoints, and DraftMismatchError.
        """
        if not self._ranks.all_equal(shared_checksum(self._config)):
            raise ConfigError(
                f"the ranks' settings differ: start all of them with the same {ENV_PREFIX}* variables and options"
            )
        saved = load_checkpoint(self._config.state_dir)
        num_steps = -1 if saved is None else int(saved[0]["num_steps"])
        if not self._ranks.all_equal(num_steps):
            raise ConfigError(
                f"the ranks found different checkpoints in {self._config.state_dir}: set {ENV_PREFIX}STATE_DIR or "
                "--state to a folder that all machines share"
            )
        if saved is None:
            return Progress(
                target_fingerprint=self._fingerprint, learnt_tokens=0, new_tokens=0, num_traces=0, used_trace_ids=[]
            )
        state, progress = saved
        if not self._is_of_this_draft(state, progress):
            raise DraftMismatchError(
                f"the checkpoint in {self._config.state_dir} belongs to another target or draft than "
                f"{self._config.store_dir}: remove it, or set {ENV_PREFIX}STATE_DIR to another folder"
            )
        self.learnt_tokens, self.tokens_since_news = progress.learnt_tokens, progress.tokens_since_news
        self.curve = LearningCurve(progress.curve)
        # Not where the store was emptied: it counts its versions anew.
        if self._ranks.run_on_leader(lambda: self._store.lifecycle.state(progress.version) is not None):
            self.version = progress.version
        self.learner.load_state(state)
        self.tenants = self._tenants_of(progress)
        log.info("trainer resumed", num_steps=self.learner.num_steps, num_traces=progress.num_traces)
        return progress

    def _is_of_this_draft(self, state: Mapping[str, Tensor], progress: Progress) -> bool:
        """Whether a checkpoint has the target, the architecture and the vocabulary of the draft in training."""
        draft = self.learner.draft
        return (
            progress.target_fingerprint == self._fingerprint
            and progress.draft in (None, draft.config)
            and {name: tensor.shape for name, tensor in state.items() if name.startswith("weight.")}
            == {f"weight.{name}": weight.shape for name, weight in draft.named_parameters()}
            and torch.equal(state["d2t"], draft.d2t.cpu())
        )

    def restart_from(self, version: int) -> None:
        """Go on from a version's weights, with a fresh optimiser and the same replay."""
        log.error(
            "training restarts from another version: its own was barred", descended_from=self.version, back_to=version
        )
        self.version = version
        self.learner = self._new_learner()
        self.tenants = self._tenants_of_version()
        self._suspects.clear()
        self._metrics.started_over.inc()

    def step(self, batch: list[Stored]) -> StepReport:
        """One optimiser step on the batches of all ranks; any of them may be empty."""
        report = self._learn(batch)
        if not _harmless(report):
            self._find_culprits(batch, report)
        return report

    def load_draft(self, version: int) -> Eagle3Draft:
        """A stored version beside the one in training. Raises StoreError or DraftError."""
        return load_draft(self._store, version, embed=self._embed_Vd, target_fingerprint=self._fingerprint)

    def ensure_finite(self) -> None:
        """Restore the last good weights where these are not finite; call before each checkpoint."""
        if self._ranks.any(not self.learner.is_finite):
            self._restore_weights()

    def _learn(self, batch: list[Stored]) -> StepReport:
        max_lag, examples = self._config.max_draft_lag, [stored.example for stored in batch]
        fresh = [without_stale(one, published=self.version, max_lag=max_lag, rng=self._rng) for one in examples]
        windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in fresh]
        report = self.learner.step(pack(windows, max_context=self._config.max_context) if windows else None)
        self.tokens_since_news += report.num_bases
        if report.num_labels:
            self.guard.observe(finite=report.applied)
        if report.applied:
            self.learnt_tokens += report.num_bases
            for stored, window in zip(batch, windows, strict=True):
                self.tenants.add(stored.provenance.tenant, window.num_bases)
            self.curve.observe(report.accept_length, report.loss)
            self._discard(self._suspects)
        return report

    def _find_culprits(self, batch: list[Stored], report: StepReport) -> None:
        """Find the traces that made a batch's loss or gradient not finite, by learning from them one by one.

        A bad trace that stayed would spoil every batch that it is drawn into; to discard the whole batch would lose
        good traces. Ranks whose own batch was finite take these steps without a batch.
        """
        accused = batch if report.is_culprit else []
        tried = accused if len(accused) > 1 else []
        culprits = [] if tried else list(accused)
        for turn in range(self._ranks.max(len(tried))):
            alone = tried[turn : turn + 1]
            if self._learn(alone).is_culprit:
                culprits += alone
        if report.is_culprit:
            log.warning("step skipped, not finite", trace_ids=[stored.trace_id for stored in culprits])
        self._suspects += culprits
        num_culprits, num_drawn = self._ranks.sum([len(culprits), len(batch)])
        if self.guard.blames_traces or num_culprits < num_drawn:
            self._discard(self._suspects)
        elif self.guard.must_restore or self._ranks.any(not self.learner.is_finite):
            self._restore_weights()

    def _discard(self, suspects: list[Stored]) -> None:
        self._replay.discard(suspects)
        suspects.clear()

    def _restore_weights(self) -> None:
        """Load the weights of the last checkpoint, or without one those of the version that they descend from."""
        history, self.learner = self.learner.history, self._new_learner()
        saved = load_checkpoint(self._config.state_dir)
        if saved is not None:
            self.learner.load_state(saved[0])
            # The target may have moved since.
            self.learner.history = min(self.learner.history, history)
        self.tenants = self._tenants_of_version() if saved is None else self._tenants_of(saved[1])
        self.guard.restored()
        self._suspects.clear()
        self._metrics.restored.inc()
        log.error("the last good weights were taken back", num_steps=self.learner.num_steps)

    def _tenants_of_version(self) -> TenantCounts:
        return counts_of(self._store.manifest(self.version).info) if self._ranks.is_leader else TenantCounts()

    def _tenants_of(self, progress: Progress) -> TenantCounts:
        if not self._ranks.is_leader:
            return TenantCounts()
        return progress.tenants or TenantCounts(complete=not progress.learnt_tokens)

    def _new_learner(self) -> Learner:
        return Learner(self.load_draft(self.version), self._config, self._ranks)

    def _ensure_lineage(self) -> int:
        newest, config = self._store.latest(), self._config
        # A fresh draft there would move engines to versions that have these numbers in the store that they have.
        if newest is None and (saved := load_checkpoint(config.state_dir)) is not None and saved[1].version:
            raise StoreError(
                f"{config.store_dir} holds no draft versions, and the checkpoint in {config.state_dir} descends from "
                f"version {saved[1].version} of it: mount it, begin it with `slipstream drafts init --store`, or empty "
                "--state"
            )
        return ensure_lineage(
            self._store,
            config.model_dir,
            self._fingerprint,
            draft_vocab_size=config.draft_vocab_size,
            # The seed also sets the order of learning, so an existing draft need not have been made with it.
            seed=config.seed if newest is None else None,
        )


def _harmless(report: StepReport) -> bool:
    """A step without any label changes nothing, and nothing is wrong."""
    return report.applied or not report.num_labels
