"""A row of the live dashboard: traces, and what the trainer makes of them."""

from __future__ import annotations

from deploy.grafana.panels import TOKENS_A_SECOND, Panel, Query, Row

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
            unit=TOKENS_A_SECOND,
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
