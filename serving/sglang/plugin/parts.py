"""Build the plugin's parts from SGLang's worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import structlog
import torch

from serving.group_cache.sync import GroupSharing
from serving.group_cache.texts import GroupTexts
from serving.metrics import GroupTextMetrics
from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.device import Device
from serving.sglang.plugin.checks import resolved
from serving.sglang.plugin.normed_residual import add_to_normed_features
from serving.sglang.proposals.remembered_text import RememberedText, ring_size, text_width
from serving.sglang.proposals.splice import CommittedTokens, TextSplice
from serving.sglang.settings import PluginSettings
from serving.sglang.swap import SglangDraft
from speculator.draft.checkpoint import config_from_json, expected_shapes
from speculator.errors import ConfigError
from speculator.redis.client import open_client
from speculator.versions.store import DraftStore, Manifest

log = structlog.get_logger(__name__)


def new_text(
    worker: Any, settings: PluginSettings, key: str, depths: list[int], device: Device, *, is_writer: bool
) -> tuple[RememberedText | None, TextSplice | None]:
    """What proposes earlier text, (None, None) where the server cannot verify it. Only rank 0 has a RememberedText."""
    if not settings.suffix_depth:
        if settings.share_groups:
            log.warning("slipstream: SLIPSTREAM_SHARE_GROUPS has no effect: SLIPSTREAM_SUFFIX_DEPTH is 0")
        return None, None
    if worker.adaptive_controller is None:
        log.warning("slipstream: no suffix drafts from earlier text: they need --speculative-adaptive")
        return None, None
    depth, overlaps = min(settings.suffix_depth, max(depths)), not resolved(worker.server_args).disable_overlap_schedule
    width = max(text_width(depth, overlaps=overlaps), *depths)
    text = None
    if is_writer:
        text = RememberedText(
            depth=depth,
            width=width,
            overlaps=overlaps,
            captures_unmarked=settings.capture_unmarked,
            ttl_s=3600 * settings.trace_ttl_hours,
            sharing=_new_sharing(worker, settings, key) if settings.share_groups else None,
        )
    num_slots = worker.req_to_token_pool.req_to_token.shape[0]
    committed = CommittedTokens(num_slots, ring_size(width), device_of(worker)) if overlaps else None
    return text, TextSplice(device, width=width, committed=committed)


def _new_sharing(worker: Any, settings: PluginSettings, key: str) -> GroupSharing:
    return GroupSharing(
        GroupTexts(open_client(settings.redis_url), key, ttl_s=3600 * settings.trace_ttl_hours),
        vocab_size=worker.target_worker.model_config.vocab_size,
        metrics=GroupTextMetrics(),
    )


def new_draft(worker: Any, store: DraftStore, manifest: Manifest, device: Device, *, alone: bool) -> SglangDraft:
    config = config_from_json(store.config(manifest.version))
    load = partial(
        store.load,
        expected_fingerprint=manifest.target_fingerprint,
        expected_d2t=store.load(manifest.version)["d2t"],
        expected_shapes=expected_shapes(config),
    )
    model = worker.draft_worker.draft_runner.model
    if config.norm_before_residual:
        add_to_normed_features(model)
    return SglangDraft(model, manifest.version, load, device=device, alone=alone)


def new_probe(worker: Any, depths: list[int]) -> DraftLogprobRecorder:
    num_slots = worker.req_to_token_pool.req_to_token.shape[0]
    return DraftLogprobRecorder(
        num_slots=num_slots,
        # Graphs are captured for batches that are padded beyond the number of requests.
        max_batch=2 * num_slots,
        max_proposals=max(*depths, worker.speculative_num_draft_tokens - 1),
        topk=worker.topk,
        device=device_of(worker),
    )


def depths_of(worker: Any) -> list[int]:
    """The depths that the server can choose, ascending. Raises ConfigError where 0 is not among them."""
    controller = worker.adaptive_controller
    depths = controller.candidate_steps if controller is not None else [worker.speculative_num_steps]
    if controller is not None and 0 not in depths:
        raise ConfigError("--speculative-adaptive-config has no candidate 0: add it, the baseline needs it")
    return sorted(set(depths))


def device_of(worker: Any) -> torch.device:
    device: torch.device = next(worker.target_worker.model_runner.model.parameters()).device
    return device


def tensor_parallel_group() -> Any:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()
