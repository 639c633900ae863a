"""The dashboard "Slipstream: live speedup"."""

from __future__ import annotations

from deploy.grafana.live_decoding import ACCEPTANCE, SPEED
from deploy.grafana.live_training import LEARNING
from deploy.grafana.panels import TIMES, TOKENS, Annotation, Dashboard, Panel, Query, Row
from serving.speedup import BASELINE

SUMMARY = Row(
    title="Now",
    panels=(
        Panel(
            title="Measured speedup",
            description=(
                f"Time a token without drafting over time a token with it, baseline {BASELINE}: plain rounds of the "
                "same engine at the same batch sizes in the last two minutes."
            ),
            unit=TIMES,
            decimals=2,
            kind="stat",
            width=6,
            height=5,
            queries=(Query("max by (instance, baseline) (slipstream_speedup_measured_ratio)", "against {{baseline}}"),),
        ),
        Panel(
            title="Acceptance length now",
            description="Tokens that a verification commits, bonus included, over five minutes. It is not the speedup.",
            unit=TOKENS,
            decimals=2,
            kind="stat",
            width=6,
            height=5,
            queries=(Query("slipstream:accept_length:rate5m", "{{instance}}"),),
        ),
        Panel(
            title="Draft version",
            description="In service, and the last one that the trainer published.",
            unit="none",
            decimals=0,
            kind="stat",
            width=6,
            height=5,
            queries=(
                Query("max by (instance) (slipstream_draft_version)", "in service"),
                Query("max(slipstream_trainer_published_version)", "published"),
            ),
        ),
        Panel(
            title="State",
            description="1 is good for the engine and for training; 1 under paused means that nothing is published.",
            unit="none",
            decimals=0,
            kind="stat",
            width=6,
            height=5,
            queries=(
                Query("min(slipstream_engine_up)", "engine up"),
                Query("min(slipstream_trainer_healthy)", "training healthy"),
                Query("max(slipstream_trainer_publishing_paused)", "publishing paused"),
            ),
        ),
    ),
)

VERSIONS = Row(
    title="Versions",
    panels=(
        Panel(
            title="Version timeline",
            description=(
                "Published by the trainer, in service, and on trial (0: none). Swaps and rollbacks are marked on "
                "every panel."
            ),
            unit="none",
            kind="state-timeline",
            width=16,
            queries=(
                Query("max(slipstream_trainer_published_version)", "published"),
                Query("max by (instance) (slipstream_draft_version)", "in service"),
                Query("max by (instance) (slipstream_watched_draft_version)", "on trial"),
            ),
        ),
        Panel(
            title="Decode time lost to a swap",
            description=(
                "The copy of the draft's weights between two steps: mean of all swaps, with SGLang the last one."
            ),
            unit="s",
            queries=(
                Query(
                    "slipstream_swap_stall_seconds_sum / (slipstream_swap_stall_seconds_count > 0) "
                    "or slipstream_last_swap_stall_seconds",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            title="Swaps and how trials ended",
            description="In five minutes: versions installed, or refused, and verdicts on live traffic.",
            unit="none",
            bars=True,
            queries=(
                Query("sum by (outcome) (increase(slipstream_swaps_total[5m]))", "swap {{outcome}}"),
                Query("sum by (outcome) (increase(slipstream_draft_verdicts_total[5m]))", "trial {{outcome}}"),
            ),
        ),
        Panel(
            title="Gate decisions",
            description="Candidates in five minutes by what the gate decided on traces that no draft has learnt from.",
            unit="none",
            bars=True,
            queries=(Query("sum by (outcome) (increase(slipstream_trainer_gate_decisions_total[5m]))", "{{outcome}}"),),
        ),
        Panel(
            title="Candidate against incumbent at the last decision",
            description="Relative change of the acceptance length on held-out and on golden traces, with its bounds.",
            unit="percentunit",
            minimum=None,
            line_at=0,
            queries=(Query("slipstream_trainer_gate_change_ratio", "{{set}}, {{bound}}"),),
        ),
    ),
)

COST = Row(
    title="What it costs",
    panels=(
        Panel(
            title="Capture: shares",
            description=(
                "Decode time that goes into assembling finished traces (local engine), traces dropped, and traces for "
                "each answered request."
            ),
            unit="percentunit",
            queries=(
                Query("slipstream:capture_time:ratio_rate5m", "of decode time"),
                Query("slipstream:traces_dropped:ratio_rate5m", "of traces dropped"),
                Query("slipstream:traces_captured_per_answer:ratio_rate5m", "traces an answer"),
            ),
        ),
        Panel(
            title="Capture: bytes",
            description="Bytes of a recorded token, and payload in the stream.",
            unit="bytes",
            queries=(
                Query("slipstream:trace_bytes_per_token:rate5m", "a token"),
                Query("max(slipstream_trainer_stream_bytes)", "in the stream"),
            ),
        ),
        Panel(
            title="Processor time",
            description="Processor seconds a second of gateway (with the local engine in it) and trainer.",
            unit="suffix: cores",
            queries=(Query('sum by (job) (rate(process_cpu_seconds_total{job=~"gateway|trainer"}[1m]))', "{{job}}"),),
        ),
    ),
)

LIVE = Dashboard(
    uid="slipstream-live",
    title="Slipstream: live speedup",
    description="Is drafting worth it, does it get better, and what does it cost.",
    rows=(SUMMARY, SPEED, ACCEPTANCE, VERSIONS, LEARNING, COST),
    annotations=(
        Annotation(
            name="Draft swap",
            expr="sum by (instance) (changes(slipstream_draft_version[$__rate_interval]))",
            text="{{instance}}",
            color="blue",
        ),
        Annotation(
            name="Rollback",
            expr='increase(slipstream_draft_verdicts_total{outcome="rolled_back"}[$__rate_interval])',
            text="{{instance}} went back to the version before",
            color="red",
        ),
        Annotation(
            name="Drift alarm",
            expr="sum by (domain) (increase(slipstream_trainer_drift_alarms_total[$__rate_interval]))",
            text="{{domain}}",
            color="orange",
        ),
    ),
)
