"""The demo's figures, on runs that are small enough to check by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.metrics import EngineMetrics
from slipstream.demo.report import DemoRun, figures, progress, sentences
from slipstream.demo.servers import Scrape
from slipstream.demo.topics import built_in_prompts, endless
from slipstream.demo.traffic import Stretch, Traffic
from speculator.redis.stream_accounting import StreamLag

SETTINGS = {"model": "toy", "minutes": 5}
SPEEDUP = 'slipstream_speedup_measured_ratio{baseline="depth0_same_batch"}'


def _run(samples: list[Scrape], *, num_prompts: int = 12, duration_s: float = 300.0) -> DemoRun:
    traffic, plain = (
        Traffic("http://none", "toy", endless(built_in_prompts(), 0), max_tokens=1, temperature=0) for _ in range(2)
    )
    traffic.stats.requests, traffic.stats.completion_tokens = 12, 99
    traffic.stats.gaps += [(1000.0 + second, 0.01 if second != 200 else 0.05) for second in range(300)]
    lag = StreamLag(
        pending=1, undelivered=2, length=12, bytes=1, appended=12, acked=8, lost=1, dead_lettered=3, erased=0, expired=0
    )
    return DemoRun(
        traffic=traffic,
        plain=plain,
        num_clients=2,
        num_prompts=num_prompts,
        samples=samples,
        started_unix_s=1000.0,
        swaps_unix_s=[1199.5, 1400.0],
        lag=lag,
        duration_s=duration_s,
    )


def _counted() -> list[Scrape]:
    """Scrapes after a minute of rounds that accept nothing, and after two and four minutes with more accepted."""
    registry = CollectorRegistry()
    metrics, samples = EngineMetrics(registry), [Scrape(0.0, {})]
    for at_s, count, accepted in ((60.0, 10, 0), (180.0, 10, 1), (300.0, 20, 2)):
        for drafted in (*[True] * count, False):
            metrics.observe_round(
                batch=1,
                drafted=drafted,
                read_prompt=False,
                seconds=0.03,
                committed=accepted + 1 if drafted else 1,
                proposed=(3,),
                depths=(2,),
                accepted=(accepted,),
                from_head=(True,),
                expected=(1.0, 0.03),
                look=None,
            )
        samples.append(Scrape.parse(at_s, f"{generate_latest(registry).decode()}\n{SPEEDUP} {1 + accepted / 2}\n"))
    return samples


def _ab(*, slower_without: float, asked: bool, looks: int = 0) -> list[Scrape]:
    """Scrapes of an A/B whose rounds with remembered text alone take so many times as long."""
    registry = CollectorRegistry()
    metrics, rng, samples = EngineMetrics(registry), random.Random(0), []
    metrics.looks.labels("accepted").inc(looks)
    for at_s in range(21):
        samples.append(Scrape.parse(at_s, generate_latest(registry).decode()))
        for number in range(40):
            with_head, seconds = number % 4 > 0, rng.uniform(0.9, 1.1) * (0.02 + 0.01 * (number % 2))
            seconds *= 1 if with_head else slower_without
            metrics.observe_head_ab(
                batch=1 + number % 2, with_head=with_head, seconds=seconds, committed=2, asked=asked and with_head
            )
    return samples


def _head(samples: list[Scrape]) -> tuple[dict[str, Any], list[str]]:
    document = figures(_run(samples), SETTINGS)
    return document["head_added"], sentences(document).splitlines()


def _stretches(rates: Sequence[float]) -> list[Stretch]:
    """Of ten seconds, each with so many tokens a second."""
    return [Stretch(1000 + 20 * number, 1010 + 20 * number, 10 * rate) for number, rate in enumerate(rates)]


def test_what_the_head_added_is_the_ab_of_the_whole_run_at_equal_batch_sizes() -> None:
    added, (first, second, *_) = _head(_ab(slower_without=1.2, asked=True))
    assert added["estimate"] == pytest.approx(1.2, abs=0.02)
    assert 1.15 < added["low"] < 1.2 < added["high"] < 1.25
    assert (added["asked_rounds"], added["both_rounds"], added["suffix_only_rounds"]) == (600, 600, 200)
    assert first.startswith(f"Beside remembered text, the learned head added {added['estimate']:.2f} × (95%: ")
    assert "asked the head in 600 of 600 rounds" in second


@pytest.mark.parametrize(("slower_without", "looks", "low", "high"), [(1.02, 0, 1.0, 1.0), (0.99, 7, 0.97, 0.9999)])
def test_a_head_that_is_never_asked_adds_nothing_but_what_its_probes_take(
    slower_without: float, looks: int, low: float, high: float
) -> None:
    added, (first, second, *_) = _head(_ab(slower_without=slower_without, asked=False, looks=looks))
    assert low <= added["estimate"] <= high
    assert first.startswith("The learned head added nothing, 1.00 ×")
    assert "asked the head in 0 of 600 rounds" in second


def test_a_clients_speedup_is_its_tokens_a_second_over_those_of_the_plain_server() -> None:
    run = _run(_counted())
    run.traffic.stats.stretches = _stretches([150, 140, 150, 160, 150, 150])
    run.plain.stats.stretches = _stretches([100, 98, 102, 100, 100, 101, 99])
    document = figures(run, SETTINGS)
    client = document["client_speedup"]
    assert client["estimate"] == pytest.approx(1.5, abs=0.01)
    assert 1.4 < client["low"] < client["estimate"] < client["high"] < 1.6
    assert (client["tokens_per_s"], client["tokens_per_s_per_client"]) == (150, 75)
    assert client["plain_tokens_per_s"] == 100
    assert (client["plain_tokens_per_s_at_start"], client["plain_tokens_per_s_at_end"]) == (100, 99)
    assert (client["seconds"], client["plain_seconds"], client["plain_stretches"]) == (60, 70, 7)
    text = sentences(document)
    assert f"A client's clock, against plain decoding: {client['estimate']:.2f} × (95%: " in text
    assert "150 tokens a second, 75 for each client" in text
    order = [text.index(part) for part in ("the learned head added", "A client's clock", "measured speedup")]
    assert order == sorted(order)


def test_a_run_that_is_too_short_gives_no_figures_and_no_traceback() -> None:
    document = figures(_run(_ab(slower_without=1.0, asked=True)[:1]), SETTINGS)
    assert document["head_added"]["estimate"] is None
    assert document["client_speedup"]["estimate"] is None
    assert "not measured" in sentences(document)


def test_time_in_which_the_plain_server_was_asked_is_no_live_time() -> None:
    run = _run([])
    run.pauses = [(1060.0, 1070.0), (1130.0, 1140.0)]
    assert [run.at_s(at) for at in (1060.0, 1065.0, 1071.0, 1150.0)] == [60.0, 60.0, 61.0, 130.0]


@pytest.mark.parametrize(("num_prompts", "is_told"), [(12, False), (6, True)])
def test_prompts_that_came_again_are_told(num_prompts: int, is_told: bool) -> None:
    document = figures(_run(_counted(), num_prompts=num_prompts), SETTINGS)
    assert ("Each prompt came 2.00 times" in sentences(document)) == is_told


def test_figures_are_those_of_their_windows() -> None:
    run = _run(_counted())
    document = figures(run, SETTINGS)
    assert document["accept_length"] == {"first_minute": 1.0, "last_two_minutes": 3.0}
    assert document["speedup"]["measured_last_two_minutes"] == 2.0, "what the server reports at the end"
    assert (document["speedup"]["baseline_rounds"], document["speedup"]["speculative_rounds"]) == (1, 20)
    assert document["tokens_per_s"]["last_two_minutes"] == pytest.approx(61 / 120, abs=1e-4)
    assert document["inter_token_ms"]["p50"] == 10
    assert document["inter_token_ms"]["max_at_swap"] == 50
    assert document["swaps"] == 1, "the second swap came after the traffic"
    assert document["traces"]["trained"] == 5
    assert document["traces"]["waiting"] == 3
    assert "1.00 tokens in the first minute" in sentences(document)
    shown = progress(run)
    assert (shown["acceptance length"], shown["measured speedup of decode rounds"]) == ("3.00", "2.00×")
