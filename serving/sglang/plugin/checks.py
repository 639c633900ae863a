"""Checks that refuse to start a server, or to take a request, each with one line that says why and what to change."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from serving.sglang.plugin.grammars import GRAMMARS, check_grammars
from serving.sglang.settings import PREFIX, PluginSettings
from speculator.draft.checkpoint import check_fits, config_from_json, target_fingerprint
from speculator.draft.eagle3 import DraftConfig
from speculator.errors import ConfigError, DraftMismatchError, SlipstreamError
from speculator.target_folder import context_length, read_config
from speculator.trace import Verification
from speculator.tracing import is_enabled
from speculator.versions.store import DraftStore, Manifest

EXIT_CODE = 2
_TOP_K_END = 1 << 31
_MOST, _LEAST_PENALTY = 1e30, 1e-6
"""SGLang divides by temperatures down to 1e-6, in float32."""
_NOT_OF_CLIENTS = ("input_text", "input_ids", "mm_inputs", "positional_embed_overrides", "time_stats")
"""Fields of SGLang's messages that it makes itself; most are large."""
_TRUE = ("true", "1", "yes", "y")
"""How SGLang's variables say yes, in any case."""
_UNSET = {
    "SGLANG_RUST_SERVER": "starts an HTTP server without hooks",
    "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "skips the draft's reading without telling the plugin",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "leaves the temperature out of the logprobs of rollouts",
}
"""SGLang's variables that may not say yes, and why."""
VERSIONS = ("0.5.17", "0.5.22", "0.5.23")
"""Versions of SGLang that have everything that the plugin uses. On a CPU only the last one is tested."""
INSTALL = f"install sglang=={VERSIONS[-1]}"


def refuse(reason: str) -> NoReturn:
    """End the process. SGLang swallows exceptions of plugins, and a server that runs unhooked would look healthy."""
    print(f"slipstream: {' '.join(reason.split())}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_CODE)


def check_sampling(params: Mapping[str, Any], num_tokens: int) -> None:
    """Refuse a request's sampling parameters that are no numbers of SGLang's tensors, may make probabilities NaN, or
    take gigabytes.

    `num_tokens`: the size of the target's vocabulary. Raises ValueError.
    """
    stops = params.get("stop_token_ids") or ()
    if not all(0 <= int(token) < num_tokens for token in stops if token is not None):
        raise ValueError(f"stop_token_ids must lie in 0…{num_tokens - 1}")
    if params.get("min_new_tokens") and (any(params.get(name) for name in GRAMMARS) or len(stops) >= num_tokens):
        # Until then SGLang forbids what ends an answer, and a complete one may end only.
        raise ValueError("min_tokens may leave no token here: leave out min_tokens, or the grammar or stop_token_ids")
    if (params.get("top_k") or 0) >= _TOP_K_END:
        raise ValueError(f"top_k must be below {_TOP_K_END}")
    if (params.get("temperature") or 0) > _MOST:
        raise ValueError(f"temperature must be at most {_MOST:g}")
    if 0 < (params.get("repetition_penalty") or 0) < _LEAST_PENALTY:
        raise ValueError(f"repetition_penalty must be at least {_LEAST_PENALTY:g}")
    if not all(abs(bias) <= _MOST for bias in (params.get("logit_bias") or {}).values()):
        raise ValueError(f"logit_bias must lie between {-_MOST:g} and {_MOST:g}")
    check_grammars(params)


def check_sendable(message: Any) -> None:
    """Refuse what SGLang's scheduler, its other ranks or its detokenizer could not read, which would end the server.

    `message`: the struct that SGLang is about to send for a request. It declares types, but nothing checks them when
    it is made. Takes about 15 µs, however long the prompt is. Raises ValueError.
    """
    from sglang.srt.managers import io_struct

    left_out = {name: None for name in _NOT_OF_CLIENTS if hasattr(message, name)}
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(msgspec.structs.replace(message, **left_out)))
    except OverflowError:
        raise ValueError("whole numbers must fit into 64 bits") from None
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        raise ValueError(f"{_name_at(message, path)}: {reason}") from None


def _name_at(struct: Any, path: str) -> str:
    """The name behind a path such as `$[8][20]`: SGLang sends structs as arrays, some of them after a tag."""
    names = []
    for index in map(int, re.findall(r"\[(\d+)\]", path)):
        if not isinstance(struct, msgspec.Struct):
            break
        names.append(struct.__struct_fields__[index - (struct.__struct_config__.tag is not None)])
        struct = getattr(struct, names[-1])
    return ".".join(names)


def sglang_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def check_server(args: Any, settings: PluginSettings) -> str:
    """Check a server's arguments, `resolved`; returns the fingerprint of its target.

    Raises ConfigError or another SlipstreamError.
    """
    if args.speculative_algorithm != "EAGLE3":
        raise ConfigError(f"--speculative-algorithm is {args.speculative_algorithm}: Slipstream improves EAGLE3 drafts")
    for name in ("single", "acc"):
        threshold = getattr(args, f"speculative_accept_threshold_{name}")
        if threshold != 1.0:
            flag = f"--speculative-accept-threshold-{name}"
            raise ConfigError(f"{flag} is {threshold}: below 1.0 the text changes, leave it at 1.0")
    # SGLang turns --enable-dp-attention into --attn-dp-size, which 0.5.17 does not have.
    shares_attention = args.enable_dp_attention or getattr(args, "attn_dp_size", 1) != 1
    if args.pp_size != 1 or args.disaggregation_mode != "null" or shares_attention:
        raise ConfigError("pipeline parallelism, disaggregation and DP attention are not supported: turn them off")
    if args.dp_size != 1:
        raise ConfigError(f"--dp-size is {args.dp_size}: start one server for each, and put sglang-router in front")
    if args.enable_multi_layer_eagle:
        raise ConfigError(
            "--enable-multi-layer-eagle runs a worker without hooks: Slipstream improves drafts of one layer"
        )
    if args.tokenizer_worker_num != 1:
        number = args.tokenizer_worker_num
        raise ConfigError(f"--tokenizer-worker-num is {number}: workers run without hooks, leave it out")
    if args.use_ray or args.grpc_mode or args.smg_grpc_mode:
        raise ConfigError("--use-ray, --grpc-mode and --smg-grpc-mode run processes without hooks: leave them out")
    for name, reason in _UNSET.items():
        if os.environ.get(name, "").lower() in _TRUE:
            raise ConfigError(f"{name} {reason}: unset it")
    if args.enable_memory_saver:
        raise ConfigError("--enable-memory-saver releases weights that draft swaps write: leave it out")
    if (args.hicache_storage_backend is not None or args.enable_lmcache) and not separates_tenants_in_storage():
        raise ConfigError(
            f"SGLang {sglang_version()} shares between tenants what --hicache-storage-backend and --enable-lmcache "
            f"store: leave them out, or {INSTALL}"
        )
    if args.enable_flexkv:
        raise ConfigError(
            "--enable-flexkv shares what it stores between tenants, and between versions of the target: leave it out"
        )
    if settings.share_groups and settings.capture_filter:
        raise ConfigError(
            f"{PREFIX}SHARE_GROUPS sends answers to Redis as they come, but {PREFIX}CAPTURE_FILTER needs "
            "whole answers: unset one of them"
        )
    is_enabled()
    manifest = version_of(args, settings)
    _check_window(args, config_from_json(DraftStore(settings.store).config(manifest.version)))
    if args.speculative_use_rejection_sampling:
        config = config_from_json(DraftStore(settings.store).config(manifest.version))
        if config.draft_vocab_size != config.vocab_size:
            raise ConfigError(
                "rejection sampling needs a draft of the target's whole vocabulary, and version "
                f"{manifest.version} has {config.draft_vocab_size:,} of {config.vocab_size:,} tokens: make a store by "
                f"`slipstream drafts init --draft-vocab-size {config.vocab_size}`, or leave out "
                "--speculative-use-rejection-sampling and -block-verification"
            )
    return manifest.target_fingerprint


def _check_window(args: Any, draft: DraftConfig) -> None:
    """Raise DraftMismatchError for a draft whose window SGLang would refuse, since rope scaling makes the target's
    context longer.
    """
    context = args.context_length or context_length(read_config(Path(args.model_path)))
    # With this variable SGLang stretches the draft's window.
    if draft.max_position_embeddings < context and "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in os.environ:
        raise DraftMismatchError(
            f"the draft's window is {draft.max_position_embeddings} tokens, the server's context {context}: add "
            f"--context-length {draft.max_position_embeddings}, or start with a new --store"
        )


def separates_tenants_in_storage() -> bool:
    """Whether SGLang keeps tenants apart in storage outside the server, too; 0.5.17 does not."""
    from sglang.srt.mem_cache import utils

    return hasattr(utils, "storage_namespace_seed")


def verification_of(args: Any) -> Verification:
    """How the server decides about proposals of sampled requests; `args` are `resolved`."""
    if not args.speculative_use_rejection_sampling:
        return "target_only"
    # 0.5.17 has no such option.
    return "block" if getattr(args, "speculative_use_block_verification", False) else "rejection"


def check_draft_options(args: Any, settings: PluginSettings) -> None:
    """Refuse options of the target that SGLang applies to the draft as well, which breaks it; `args` are `resolved`.

    Raises ConfigError.
    """
    if args.speculative_draft_model_quantization is not None:
        raise ConfigError(
            f"the draft would be quantized ({args.speculative_draft_model_quantization}), but the store's weights "
            "are not: add --speculative-draft-model-quantization unquant"
        )
    if args.load_format not in ("auto", "safetensors"):
        if args.speculative_draft_load_format is None:
            raise ConfigError(
                f"--load-format {args.load_format} would be the draft's, too: "
                "add --speculative-draft-load-format safetensors"
            )
        if args.speculative_draft_load_format != args.load_format and _is_given(args.model_loader_extra_config):
            raise ConfigError(
                f"--model-loader-extra-config is meant for --load-format {args.load_format}, and the draft's loader "
                "reads it, too: leave it out"
            )
    if args.decrypted_draft_config_file:
        raise ConfigError("--decrypted-draft-config-file hides the config.json of the store's draft: leave it out")
    if _is_given(args.json_model_override_args):
        raise ConfigError(
            "--json-model-override-args changes the draft, too, and the trainer does not see it: change config.json in "
            "the folder of --model-path instead"
        )
    if args.quantization_param_path is not None and args.kv_cache_dtype == "fp8_e4m3":
        raise ConfigError(
            "--quantization-param-path is read for the draft, too, which has no such scales: leave it out"
        )
    if args.model_checksum is not None:
        raise ConfigError("--model-checksum is compared with the draft's files, too: leave it out")
    if args.model_impl not in ("auto", "sglang"):
        raise ConfigError(f"--model-impl {args.model_impl} has no EAGLE3 drafts: leave it out")
    # 0.5.17 has no such option.
    if settings.capture and getattr(args, "enable_watermark", False):
        raise ConfigError(
            f"--enable-watermark forces tokens, and the draft would learn that: leave it out, or set {PREFIX}CAPTURE=0"
        )


def _is_given(json_text: str | None) -> bool:
    return (json_text or "{}").replace(" ", "") != "{}"


def resolved(args: Any) -> Any:
    """A server's arguments with the values that SGLang has filled in so far."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(args)


def resolve(args: Any, values: dict[str, Any]) -> None:
    """Override a server's arguments before it reads them."""
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        # SGLang before 0.5.22 has no overrides: it sets the attributes themselves.
        for name, value in values.items():
            setattr(args, name, value)
    else:
        declare_resolution(args, "slipstream", **values)


def version_of(args: Any, settings: PluginSettings) -> Manifest:
    """The stored version that is the server's draft; raises for another folder, or a draft that does not fit."""
    folder = Path(args.speculative_draft_model_path).resolve()
    store = DraftStore(settings.store)
    versions = (settings.store / "versions").resolve()
    if folder.parent != versions or not folder.name.isdigit():
        raise ConfigError(
            f"--speculative-draft-model-path is no version of the draft store {settings.store}: give it a folder of "
            f"{versions}, or set {PREFIX}STORE; `slipstream drafts init --store` writes a first version"
        )
    manifest = store.manifest(int(folder.name))
    fingerprint = settings.target_fingerprint or target_fingerprint(Path(args.model_path))
    if manifest.target_fingerprint != fingerprint:
        raise ConfigError(
            f"draft version {manifest.version} was made for target {manifest.target_fingerprint[:12]}, "
            f"--model-path is {fingerprint[:12]}: give it a draft of this target"
        )
    check_fits(config_from_json(store.config(manifest.version)), Path(args.model_path))
    return manifest


def refusing(check: Any, *arguments: Any) -> Any:
    """Run a check; an error ends the process with one line."""
    try:
        return check(*arguments)
    except (SlipstreamError, OSError) as error:
        refuse(str(error))
    except Exception as error:
        # Something in SGLang that a hook relies on is missing or has changed.
        traceback.print_exc()
        refuse(f"cannot hook SGLang {sglang_version()} ({error!r}): {INSTALL}")
