"""Rows of the live dashboard: how fast decoding is, and what the target accepts."""

from __future__ import annotations

from deploy.grafana.panels import TIMES, TOKENS, TOKENS_A_SECOND, Panel, Query, Row
from serving.speedup import BASELINE

_UPPER, _LOWER = f"95% interval against {BASELINE}, upper end", f"95% interval against {BASELINE}, lower end"

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
            unit=TIMES,
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
            unit=TIMES,
            width=12,
            line_at=1,
            minimum=None,
            queries=(Query("slipstream_speedup_measured_group_ratio", "{{tenant}} / {{domain}} against {{baseline}}"),),
        ),
        Panel(
            title="Throughput",
            description="Tokens that decode rounds commit a second of wall time.",
            unit=TOKENS_A_SECOND,
            queries=(Query("slipstream:tokens_per_second:rate1m", "{{instance}}"),),
        ),
        Panel(
            title="Tokens a second of decode time",
            description=(
                "Drafting rounds, plain rounds (mode control), rounds that read a piece of a prompt in their pass, and "
                "what the local engine's planner expected of the rounds that it planned. All batch sizes together, so "
                "the quotient is not the measured speedup."
            ),
            unit=TOKENS_A_SECOND,
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
            unit=TOKENS,
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
            unit=TOKENS,
            minimum=1,
            queries=(Query("slipstream:accept_length_by_version:rate1m", "version {{version}}"),),
        ),
        Panel(
            title="Acceptance by position",
            description=(
                "Accepted over verified positions, by who proposed (the draft head, or suffixes of earlier text) and "
                "by position: how many proposals deep. Where several proposals stand beside each other, one of them "
                "is enough. Position 2 is only reached where 1 was accepted."
            ),
            unit="percentunit",
            queries=(Query("slipstream:acceptance_by_position:ratio_rate5m", "{{source}}, position {{position}}"),),
        ),
    ),
)
