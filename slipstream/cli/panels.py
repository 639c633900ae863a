"""Panels of `--help` for commands with many options: the most needed options first, then the others by topic."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

FIRST = {
    "serve": "model engine learn data_dir name host port api_key capture config",
    "sglang": "model name host port private_network capture redis_url store sglang_python config",
    "gateway": "model sglang pool engine_id host port api_key redis_url store config",
    "train": "model redis_url store state metrics_port threads trace_ttl_hours config",
    "demo": "minutes model port tenants clients prompts keep plot json_file redis_url",
}
"""Options of each command's first panel, in this order."""
_OTHERS = {
    "Traces": "capture_floor capture_filter trace_ttl_hours context_window branch_share stream_max_bytes "
    "capture_bytes_per_s",
    "Proposals": "depth suffix_depth share_groups",
    "Measuring": "control_share plain_share head_off_share",
    "A fresh draft": "draft_vocab_size vocab_from seed",
    "Clients": "root_path",
    "Redis and store": "redis_url store",
    "Engine": "dtype device slots context_length threads sglang_python engine_id start_timeout_s gpu trainer_gpu",
    "Traffic": "samples temperature max_tokens",
}
_PANELS = {name: panel for panel, names in _OTHERS.items() for name in names.split()}


class WithPanels(TyperCommand):
    """A command whose `--help` is sorted into panels; it must be in FIRST."""

    def __init__(self, name: str | None, *, params: list[Any], **more: Any) -> None:
        first = FIRST[name or ""].split()
        for option in params:
            if option.param_type_name == "option" and option.name not in first:
                option.rich_help_panel = _PANELS[option.name]
        places = {option: place for place, option in enumerate(first)}
        super().__init__(name, params=sorted(params, key=lambda each: places.get(each.name, len(first))), **more)
