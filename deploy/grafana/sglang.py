"""The dashboard "SGLang engine": SGLang's own metrics (0.5.23 names them `sglang:…`) beside what the plugin reports."""

from __future__ import annotations

from deploy.grafana.panels import TIMES, TOKENS, Annotation, Dashboard, Panel, Query, Row
from serving.speedup import BASELINE


def _quantiles(histogram: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({histogram}_bucket[$__rate_interval]))"
    return tuple(
        Query(f"histogram_quantile({quantile}, {rate})", name)
        for quantile, name in ((0.5, "median"), (0.95, "95th percentile"), (0.99, "99th percentile"))
    )


LOAD = Row(
    title="Load",
    panels=(
        Panel(
            title="Generation throughput",
            description="Tokens a second: SGLang's own gauge, and the rate of its counter.",
            unit="suffix: tokens/s",
            queries=(
                Query("sum by (instance) (sglang:gen_throughput)", "gauge, {{instance}}"),
                Query("sum(rate(sglang:generation_tokens_total[$__rate_interval]))", "generated"),
                Query("sum(rate(sglang:prompt_tokens_total[$__rate_interval]))", "prompt"),
            ),
        ),
        Panel(
            title="Requests",
            description="Decoded now, waiting, and taken back for want of memory.",
            unit="suffix: requests",
            queries=(
                Query("sum(sglang:num_running_reqs)", "running"),
                Query("sum(sglang:num_queue_reqs)", "waiting"),
                Query("sum(sglang:num_retracted_reqs)", "retracted"),
            ),
        ),
        Panel(
            title="Cache",
            description="Share of the token pool in use, and share of prompt tokens that the prefix cache had. Cached "
            "positions are not in a trace.",
            unit="percentunit",
            queries=(
                Query("max by (instance) (sglang:token_usage)", "pool in use"),
                Query("max by (instance) (sglang:cache_hit_rate)", "prefix cache hits"),
            ),
        ),
        Panel(
            title="Time to first token",
            description="As SGLang measures it.",
            unit="s",
            queries=_quantiles("sglang:time_to_first_token_seconds"),
        ),
        Panel(
            title="Time between tokens",
            description="As SGLang measures it, of streamed answers. A swap that stalled decoding would show in the "
            "99th percentile.",
            unit="s",
            queries=_quantiles("sglang:inter_token_latency_seconds"),
        ),
        Panel(
            title="Whole requests",
            description="End-to-end latency as SGLang measures it.",
            unit="s",
            queries=_quantiles("sglang:e2e_request_latency_seconds"),
        ),
    ),
)

SPECULATION = Row(
    title="Speculation",
    panels=(
        Panel(
            title="Acceptance length, SGLang's and the plugin's",
            description=(
                "Tokens a verification, bonus included. SGLang's is that of its last batches; the plugin's is over "
                "one minute and leaves out control rounds."
            ),
            unit=TOKENS,
            minimum=1,
            queries=(
                Query("avg(sglang:spec_accept_length)", "SGLang"),
                Query('slipstream:accept_length:rate1m{job="gateway"}', "plugin"),
            ),
        ),
        Panel(
            title="Acceptance rate",
            description="Accepted over proposed tokens, as SGLang counts them.",
            unit="percentunit",
            queries=(Query("avg(sglang:spec_accept_rate)", "accepted"),),
        ),
        Panel(
            title="Depth",
            description="Draft steps that SGLang takes now, and the most that the plugin allows.",
            unit="none",
            queries=(
                Query("max(sglang:spec_num_steps)", "SGLang's steps"),
                Query("max(slipstream_depth)", "the plugin's depth"),
            ),
        ),
        Panel(
            title="Verifications",
            description="A second: SGLang's count when requests finish, the plugin's as it sees them.",
            unit="suffix: a second",
            queries=(
                Query("sum(rate(sglang:spec_verify_calls_total[$__rate_interval]))", "SGLang"),
                Query("sum(rate(slipstream_verifications_total[$__rate_interval]))", "plugin"),
            ),
        ),
        Panel(
            title="Measured speedup",
            description=f"Against {BASELINE}, the plugin's own plain steps, with the 95% interval.",
            unit=TIMES,
            line_at=1,
            minimum=None,
            queries=(
                Query("max by (baseline) (slipstream_speedup_measured_ratio)", "against {{baseline}}"),
                Query("max by (baseline) (slipstream_speedup_measured_ratio_lower)", "lower end, 95%"),
                Query("max by (baseline) (slipstream_speedup_measured_ratio_upper)", "upper end, 95%"),
            ),
        ),
        Panel(
            title="Time a token without drafting",
            description=f"The baseline {BASELINE} itself.",
            unit="s",
            queries=(Query("max by (instance) (slipstream_baseline_seconds_per_token)", "{{instance}}"),),
        ),
    ),
)

PLUGIN = Row(
    title="Plugin",
    panels=(
        Panel(
            title="Draft version",
            description="In service and on trial (0: none).",
            unit="none",
            kind="state-timeline",
            queries=(
                Query("max(slipstream_draft_version)", "in service"),
                Query("max(slipstream_watched_draft_version)", "on trial"),
            ),
        ),
        Panel(
            title="Decode time lost to the last swap",
            description="The copy of the draft's weights between two steps.",
            unit="s",
            queries=(Query("max by (instance) (slipstream_last_swap_stall_seconds)", "{{instance}}"),),
        ),
        Panel(
            title="CUDA graphs",
            description="1 while batches run from a captured graph. A swap must leave this as it is.",
            unit="none",
            queries=(Query("max by (instance) (sglang:is_cuda_graph)", "{{instance}}"),),
        ),
        Panel(
            title="Traces",
            description="A second: captured, written to the stream, and dropped by reason.",
            unit="suffix: traces/s",
            queries=(
                Query("sum(rate(slipstream_traces_captured_total[$__rate_interval]))", "captured"),
                Query("sum(rate(slipstream_traces_appended_total[$__rate_interval]))", "written to the stream"),
                Query("sum by (reason) (rate(slipstream_traces_dropped_total[$__rate_interval]))", "{{reason}}"),
            ),
        ),
        Panel(
            title="Bytes of traces",
            description="Written to the stream.",
            unit="Bps",
            queries=(Query("sum(rate(slipstream_trace_bytes_total[$__rate_interval]))", "written"),),
        ),
        Panel(
            title="State",
            description="1 is good: SGLang answers and the plugin reports.",
            unit="none",
            decimals=0,
            kind="stat",
            queries=(
                Query("min(slipstream_engine_up)", "engine up"),
                Query("min(slipstream_engine_report_fresh)", "plugin reports"),
            ),
        ),
    ),
)

SGLANG = Dashboard(
    uid="slipstream-sglang",
    title="SGLang engine",
    description="SGLang's own metrics beside the plugin's. Empty where the local engine serves.",
    rows=(LOAD, SPECULATION, PLUGIN),
    annotations=(
        Annotation(
            name="Draft swap",
            expr="sum by (instance) (changes(slipstream_draft_version[$__rate_interval]))",
            text="{{instance}}",
            color="blue",
        ),
    ),
)
