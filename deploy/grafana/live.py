"""The dashboard "Slipstream: live speedup"."""

from __future__ import annotations

from deploy.grafana.panels import Annotation, Dashboard, Panel, Query, Row
from serving.speedup import BASELINE

_UPPER, _LOWER = f"95% interval against {BASELINE}, upper end", f"95% interval against {BASELINE}, lower end"
_TIMES = "suffix: ×"
_LENGTH = "suffix: tokens"
_A_SECOND = "suffix: tokens/s"

SUMMARY = Row(
    title="Now",
    panels=(
        Panel(
            title="Measured speedup",
            description=(
                f"Time a token without drafting over time a token with it, baseline {BASELINE}: plain rounds of the "
                "same engine at the same batch sizes in the last two minutes."
            ),
            unit=_TIMES,
            decimals=2,
            kind="stat",
            width=6,
            height=5,
            queries=(Query("max by (instance, baseline) (slipstream_speedup_measured_ratio)", "against {{baseline}}"),),
        ),
        Panel(
            title="Acceptance length now",
            description="Tokens that a verification commits, bonus included, over five minutes. It is not the speedup.",
            unit=_LENGTH,
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

SPEED = Row(
    title="Speed",
    panels=(
        Panel(
            title="Speedup, measured and estimated",
            description=(
                f"Measured: against {BASELINE}, with its 95% interval (a jackknife over stretches of time, known after "
                "half a minute). Estimated: a forecast of the cost model that its label names, drawn beside it and "
                "never mixed with it."
            ),
            unit=_TIMES,
            width=12,
            line_at=1,
            minimum=None,
            band=(_LOWER, _UPPER),
            queries=(
                Query("max by (instance, baseline) (slipstream_speedup_measured_ratio)", "against {{baseline}}"),
                Query("max by (baseline) (slipstream_speedup_measured_ratio_lower)", _LOWER),
                Query("max by (baseline) (slipstream_speedup_measured_ratio_upper)", _UPPER),
                Query("max by (instance, model) (slipstream_speedup_estimated_ratio)", "estimated from {{model}}"),
            ),
        ),
        Panel(
            title="Measured speedup by tenant and domain",
            description=(
                f"Requests of one tenant and domain against everybody's baseline {BASELINE}; groups with 500 tokens in "
                "the last two minutes. Local engine."
            ),
            unit=_TIMES,
            width=12,
            line_at=1,
            minimum=None,
            queries=(Query("slipstream_speedup_measured_group_ratio", "{{tenant}} / {{domain}} against {{baseline}}"),),
        ),
        Panel(
            title="Throughput",
            description="Tokens that decode rounds commit a second of wall time.",
            unit=_A_SECOND,
            queries=(Query("slipstream:tokens_per_second:rate1m", "{{instance}}"),),
        ),
        Panel(
            title="Tokens a second of decode time",
            description=(
                "Drafting rounds, plain rounds (mode control), and what the local engine's planner expected of the "
                "rounds that it planned. All batch sizes together, so the quotient is not the measured speedup."
            ),
            unit=_A_SECOND,
            queries=(
                Query("slipstream:round_tokens_per_second:rate5m", "{{mode}} rounds"),
                Query("slipstream:expected_tokens_per_second:rate5m", "expected of planned rounds"),
            ),
        ),
        Panel(
            title="Time to first token",
            description="From a request's headers to the engine's first token.",
            unit="s",
            queries=(
                Query(
                    "histogram_quantile(0.5, sum by (le) "
                    "(rate(slipstream_gateway_time_to_first_token_seconds_bucket[$__rate_interval])))",
                    "median",
                ),
                Query(
                    "histogram_quantile(0.95, sum by (le) "
                    "(rate(slipstream_gateway_time_to_first_token_seconds_bucket[$__rate_interval])))",
                    "95th percentile",
                ),
            ),
        ),
        Panel(
            title="Requests in the engine",
            description="What is decoded now, and what waits for a place.",
            unit="suffix: requests",
            queries=(
                Query("sum by (instance) (slipstream_requests_running)", "running"),
                Query("sum by (instance) (slipstream_requests_waiting)", "waiting"),
            ),
        ),
        Panel(
            title="Requests by outcome",
            description="Answers a second by HTTP status; 499 is a client that left.",
            unit="reqps",
            queries=(
                Query(
                    'sum by (status) (rate(slipstream_gateway_requests_total{route=~"/v1/.+"}[$__rate_interval]))',
                    "{{status}}",
                ),
            ),
        ),
    ),
)

ACCEPTANCE = Row(
    title="Acceptance",
    panels=(
        Panel(
            title="Acceptance length",
            description="Tokens that a verification commits, bonus included, over a minute, five minutes, an hour.",
            unit=_LENGTH,
            minimum=1,
            queries=(
                Query("slipstream:accept_length:rate1m", "1 minute"),
                Query("slipstream:accept_length:rate5m", "5 minutes"),
                Query("slipstream:accept_length:rate1h", "1 hour"),
            ),
        ),
        Panel(
            title="Acceptance length by version",
            description=(
                "Over one minute, under the version in service; for a minute after a swap, rounds of the version "
                "before are in it."
            ),
            unit=_LENGTH,
            minimum=1,
            queries=(Query("slipstream:accept_length_by_version:rate1m", "version {{version}}"),),
        ),
        Panel(
            title="Acceptance by position",
            description=(
                "Accepted over verified proposals, by who proposed (the draft head, or a suffix of earlier text) and "
                "by position in the chain. Position 2 is only reached where 1 was accepted."
            ),
            unit="percentunit",
            queries=(Query("slipstream:acceptance_by_position:ratio_rate5m", "{{source}}, position {{position}}"),),
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

LEARNING = Row(
    title="Traces and training",
    panels=(
        Panel(
            title="Traces",
            description=(
                "A second: finished traces, those written to the stream, those dropped (all reasons), and what the "
                "trainer did with those that it read."
            ),
            unit="suffix: traces/s",
            queries=(
                Query("sum(rate(slipstream_traces_captured_total[$__rate_interval]))", "captured"),
                Query("sum(rate(slipstream_traces_appended_total[$__rate_interval]))", "written to the stream"),
                Query("sum(rate(slipstream_traces_dropped_total[$__rate_interval]))", "dropped"),
                Query("sum by (outcome) (rate(slipstream_trainer_traces_total[$__rate_interval]))", "{{outcome}}"),
            ),
        ),
        Panel(
            title="Stream",
            description=(
                "Entries that wait for the trainer, those that the cap in bytes has taken unread (lost) and those "
                "that could not be used; as of the trainer's last checkpoint."
            ),
            unit="suffix: entries",
            queries=(
                Query('max by (state) (slipstream_trainer_stream_entries{state!="acked"})', "{{state}}"),
                Query("sum(slipstream_traces_pending)", "in the engines' buffers"),
            ),
        ),
        Panel(
            title="Age of traces at the trainer",
            description="From a trace's birth to its arrival, median and 95th percentile.",
            unit="s",
            queries=(
                Query("slipstream:trace_age_seconds:p50_rate5m", "median"),
                Query(
                    "histogram_quantile(0.95, sum by (le) (rate(slipstream_trainer_trace_age_seconds_bucket[5m])))",
                    "95th percentile",
                ),
            ),
        ),
        Panel(
            title="Training",
            description="Completion tokens a second: those that arrive, and those in steps, repetitions included.",
            unit=_A_SECOND,
            queries=(
                Query("sum(rate(slipstream_trainer_new_tokens_total[$__rate_interval]))", "new"),
                Query("max(rate(slipstream_trainer_learnt_tokens_total[$__rate_interval]))", "learnt from"),
            ),
        ),
        Panel(
            title="Steps and pressure",
            description="Optimiser steps a second, and how much more training is worth its compute (0 to 1).",
            unit="none",
            queries=(
                Query("max by (outcome) (rate(slipstream_trainer_steps_total[$__rate_interval]))", "{{outcome}} /s"),
                Query("max(slipstream_trainer_pressure_ratio)", "pressure"),
            ),
        ),
        Panel(
            title="Loss of the last step",
            description="In nats, on the traces of that step.",
            unit="suffix: nats",
            minimum=None,
            queries=(Query("max(slipstream_trainer_loss_nats)", "loss"),),
        ),
        Panel(
            title="Drift by domain",
            description=(
                "Share of answer tokens that the draft proposed: the average of the last 128 requests against the "
                "long one, by domain; `all` is the whole traffic."
            ),
            unit="percentunit",
            width=12,
            queries=(Query("avg by (domain, window) (slipstream_trainer_acceptance_ratio)", "{{domain}}, {{window}}"),),
        ),
        Panel(
            title="Drift alarms",
            description=(
                "1 while a domain's short average is below the long one by more than its margin, and that margin (1 "
                "until enough requests were seen to know it)."
            ),
            unit="none",
            width=6,
            queries=(
                Query("max by (domain) (slipstream_trainer_drift_alarm)", "alarm, {{domain}}"),
                Query("min by (domain) (slipstream_trainer_drift_margin_ratio)", "margin, {{domain}}"),
            ),
        ),
        Panel(
            title="Replay by domain",
            description="Memory of the traces that the trainer keeps.",
            unit="bytes",
            width=6,
            queries=(Query("sum by (domain) (slipstream_trainer_replay_domain_bytes)", "{{domain}}"),),
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
