"""The demo's figures, on runs that are small enough to check by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.metrics import EngineMetrics
from serving.speedup import HEAD_AB_ARMS, SpeedupMeter
from slipstream.demo.chapters import CHAPTERS, POISON, RESTART, SHIFT, PoisonedDraft, drift_alarms
from slipstream.demo.report import ChapterRun, DemoRun, figures
from slipstream.demo.servers import Scrape
from slipstream.demo.summary import chapter_sentences, progress, sentences
from slipstream.demo.topics import built_in_prompts, cycle_prompts
from slipstream.demo.traffic import Stretch, Traffic
from speculator.redis.stream_accounting import StreamLag
from tests.fixtures.rounds import count_round

SETTINGS = {"model": "toy", "minutes": 5}
SPEEDUP = 'slipstream_speedup_measured_ratio{baseline="depth0_same_batch"}'


def _run(samples: list[Scrape], *, num_prompts: int = 12, duration_s: float = 300.0) -> DemoRun:
    traffic, plain = (
        Traffic("http://none", "toy", cycle_prompts(built_in_prompts(), 0), max_tokens=1, temperature=0)
        for _ in range(2)
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


def _count(metrics: EngineMetrics, *, drafted: bool, accepted: int, seconds: float) -> None:
    accepted = accepted if drafted else 0
    count_round(metrics, SpeedupMeter(), depth=2 if drafted else 0, seconds=seconds, accepted=accepted)
    for text in ("own", "tenant", "tenant") if accepted else ():
        metrics.accepted_text.labels(text).inc()


def _counted() -> list[Scrape]:
    """Scrapes after a minute of rounds that accept nothing, and after two and four minutes with more accepted."""
    registry = CollectorRegistry()
    metrics, samples = EngineMetrics(registry), [Scrape(0.0, {})]
    for at_s, count, accepted in ((60.0, 10, 0), (180.0, 10, 1), (300.0, 20, 2)):
        for drafted in (*[True] * count, False):
            _count(metrics, drafted=drafted, accepted=accepted, seconds=0.03)
        samples.append(Scrape.parse(at_s, f"{generate_latest(registry).decode()}\n{SPEEDUP} {1 + accepted / 2}\n"))
    return samples


def _ab(*, slower_without: float, asked: bool, probes: int = 0) -> list[Scrape]:
    """Scrapes of an A/B whose rounds with remembered text alone take so many times as long."""
    registry = CollectorRegistry()
    metrics, rng, samples = EngineMetrics(registry), random.Random(0), []
    metrics.probes.labels("accepted").inc(probes)
    for at_s in range(21):
        samples.append(Scrape.parse(at_s, generate_latest(registry).decode()))
        for number in range(40):
            with_head, seconds = number % 4 > 0, rng.uniform(0.9, 1.1) * (0.02 + 0.01 * (number % 2))
            seconds *= 1 if with_head else slower_without
            arm, batch = HEAD_AB_ARMS[with_head], str(1 + number % 2)
            for counter, count in (
                (metrics.head_ab_rounds, 1),
                (metrics.head_ab_seconds, seconds),
                (metrics.head_ab_tokens, 2),
            ):
                counter.labels(arm, batch).inc(count)
            metrics.head_ab_asked.inc(asked and with_head)
    return samples


def _ab_of(samples: list[Scrape]) -> tuple[dict[str, Any], str]:
    document = figures(_run(samples, duration_s=samples[-1].at_s), SETTINGS)
    return document["ab"], sentences(document)


def _stretches(rates: Sequence[float]) -> list[Stretch]:
    """Of ten seconds, each with so many tokens a second."""
    return [Stretch(1000 + 20 * number, 1010 + 20 * number, 10 * rate) for number, rate in enumerate(rates)]


def test_both_over_suffix_is_the_ab_of_the_rounds_at_equal_batch_sizes() -> None:
    ab, text = _ab_of(_ab(slower_without=1.2, asked=True))
    both = ab["both_over_suffix"]
    assert both["median"] == pytest.approx(1.2, abs=0.02)
    assert 1.15 < both["low"] < 1.2 < both["high"] < 1.25
    assert ab["both_over_suffix_whole_run"] == both, "the run is shorter than two minutes"
    assert (ab["asked_rounds"], ab["both_rounds"], ab["suffix_only_rounds"]) == (600, 600, 200)
    assert f"the learned head beside earlier text was {both['median']:.2f} × (95%: " in text


def test_both_over_plain_is_that_of_rounds_without_drafts_in_the_same_time() -> None:
    registry = CollectorRegistry()
    metrics, rng, samples = EngineMetrics(registry), random.Random(0), []
    for at_s in range(60):
        samples.append(Scrape.parse(at_s, generate_latest(registry).decode()))
        for number in range(20):
            _count(metrics, drafted=number % 4 > 0, accepted=1, seconds=0.03 * rng.uniform(0.9, 1.1))
    both = _ab_of(samples)[0]["both_over_plain"]
    assert both["median"] == pytest.approx(2.0, abs=0.05)
    assert both["low"] < 2.0 < both["high"]


def test_a_chapter_tells_where_its_tokens_came_from_and_what_became_of_the_poisoned_draft() -> None:
    run = _run(_counted())
    run.chapters = [
        ChapterRun(chapter, start_s, end_s)
        for chapter, start_s, end_s in zip(CHAPTERS, (0, 60, 120, 180, 240), (60, 120, 180, 240, 300), strict=True)
    ]
    run.poisoned = PoisonedDraft(version=9, parent=8)
    poisoned = next(chapter for chapter in run.chapters if chapter.chapter is POISON)
    assert "was not judged in this time" in chapter_sentences(run, poisoned)[-1]
    run.verdict = ("accepts less than the incumbent", {"draft_rounds": 31, "rounds": 400, "seconds": 7.4})
    assert "back after at most 31 rounds" in chapter_sentences(run, poisoned)[-1]
    run.published_at, run.judged_by = run.samples[1], run.samples[2]
    document = figures(run, SETTINGS)
    assert [chapter["name"] for chapter in document["chapters"]] == [chapter.name for chapter in CHAPTERS]
    second = document["chapters"][2]
    assert second["accepted_by_source"] == {"head": 10, "own": 10, "group": 0, "tenant": 20}
    assert second["head_share"] == 0.25
    assert document["accepted_by_source"] == {"head": 50, "own": 30, "group": 0, "tenant": 60}
    assert (document["poisoned"]["rounds"], document["poisoned"]["taken_back"]) == (31, True)
    text = sentences(document)
    assert "back after at most 31 rounds" in text
    assert "shift 25%" in text
    run.verdict = ("accepts less on the same traces", {"seconds": 1.0})
    assert figures(run, SETTINGS)["poisoned"]["rounds"] == 10, (
        "the trainer was first: as often as it was asked till then"
    )


def _shifted(lengths: Sequence[int], *, alarms_s: Sequence[float] = ()) -> tuple[dict[str, Any], list[str], str]:
    """Figures and sentences of a shift at 60 s: every ten seconds verifications commit so many tokens each."""
    verified = [[10.0 * sum(lengths[:count]), 10.0 * count] for count in range(len(lengths) + 1)]
    names = ("slipstream_verified_tokens_total", "slipstream_verifications_total")
    samples = [
        Scrape(10.0 * number, dict(zip(((n, ()) for n in names), at, strict=True)))
        for number, at in enumerate(verified)
    ]
    run = _run(samples, duration_s=samples[-1].at_s)
    run.chapters = [ChapterRun(SHIFT, 60.0, samples[-1].at_s)]
    run.drift_alarms_unix_s = [1000.0 + at_s for at_s in alarms_s]
    document = figures(run, SETTINGS)
    return document["chapters"][0]["drift"], chapter_sentences(run, run.chapters[0]), sentences(document)


def test_the_shift_tells_when_the_alarm_rose_and_when_the_accept_length_was_back() -> None:
    drift, told, summary = _shifted([3] * 6 + [1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3], alarms_s=[50.0, 97.0, 99.0])
    assert drift == {
        "alarm_after_s": pytest.approx(37.0),
        "accept_length_before": 3.0,
        "accept_length_lowest": 1.0,
        "recovered_after_s": pytest.approx(70.0),
    }
    sentence = (
        "The drift alarm rose 37 s after the shift; the accept length fell from 3.00 to 1.00 and was back 70 s after"
    )
    assert sentence in told[-1]
    assert sentence in summary


def test_a_shift_without_alarm_or_recovery_says_so() -> None:
    drift, told, _ = _shifted([3] * 6 + [1] * 12)
    assert (drift["alarm_after_s"], drift["recovered_after_s"]) == (None, None)
    assert told[-1] == "No drift alarm rose; the accept length fell from 3.00 to 1.00 and was not back in this time."
    drift, told, _ = _shifted([3] * 18)
    assert drift["recovered_after_s"] == 0.0
    assert told[-1] == "No drift alarm rose; the accept length did not fall below 3.00, that of the minute before."
    assert _shifted([3] * 6)[1][-1] == "No drift alarm rose; the accept length was not measured."


def test_drift_alarms_are_those_about_all_traffic_in_the_trainers_log(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "a warning of a library\n"
        '{"domain": "code", "event": "acceptance fell", "timestamp": "2026-12-01T02:34:00.500000Z"}\n'
        '{"domain": "all", "event": "acceptance fell", "timestamp": "2026-12-01T02:34:10.500000Z"}\n'
    )
    assert drift_alarms(log) == [1796092450.5]


def test_the_restart_tells_what_both_made_of_its_first_minute() -> None:
    slow, fast = _ab(slower_without=1.5, asked=True), _ab(slower_without=1.1, asked=True)
    # The first minute, then as long again: three seconds between scrapes.
    samples = [Scrape(3.0 * one.at_s, one.values) for one in slow]
    samples += [Scrape(60.0 + 3.0 * one.at_s, one.continued_from(slow[-1]).values) for one in fast[1:]]
    run = _run(samples, duration_s=120.0)
    run.chapters = [ChapterRun(RESTART, 0.0, 120.0)]
    document = figures(run, SETTINGS)
    restart = document["chapters"][0]
    first = restart["both_over_suffix_first_minute"]
    assert first["median"] == pytest.approx(1.5, abs=0.03)
    assert 1.2 < restart["both_over_suffix"]["median"] < 1.4
    assert (
        f"In the first minute after the restart both were {first['median']:.2f} ×"
        in chapter_sentences(run, run.chapters[0])[-1]
    )
    assert f"and {first['median']:.2f} × (95%: " in sentences(document)


def test_the_counters_of_a_restarted_engine_go_on() -> None:
    before = Scrape(60.0, {("a_total", ()): 7.0, ("b_total", ()): 2.0, ("version", ()): 3.0})
    after = Scrape(70.0, {("a_total", ()): 1.0, ("version", ()): 2.0}).continued_from(before)
    assert after.values == {("a_total", ()): 8.0, ("b_total", ()): 2.0, ("version", ()): 2.0}
    assert after.at_s == 70.0


def test_a_clients_speedup_is_its_tokens_a_second_over_those_of_the_plain_server() -> None:
    run = _run(_counted())
    run.traffic.stats.stretches = _stretches([150, 140, 150, 160, 150, 150])
    run.plain.stats.stretches = _stretches([100, 98, 102, 100, 100, 101, 99])
    document = figures(run, SETTINGS)
    client = document["client_speedup"]
    assert client["median"] == pytest.approx(1.5, abs=0.01)
    assert 1.4 < client["low"] < client["median"] < client["high"] < 1.6
    assert (client["tokens_per_s"], client["tokens_per_s_per_client"]) == (150, 75)
    assert client["plain_tokens_per_s"] == 100
    assert (client["plain_tokens_per_s_at_start"], client["plain_tokens_per_s_at_end"]) == (100, 99)
    assert (client["seconds"], client["plain_seconds"], client["plain_stretches"]) == (60, 70, 7)
    text = sentences(document)
    assert f"a client's clock saw {client['median']:.2f} × (95%: " in text
    assert "150 tokens a second against 100" in text


def test_a_run_that_is_too_short_gives_no_figures_and_no_traceback() -> None:
    document = figures(_run(_ab(slower_without=1.0, asked=True)[:1]), SETTINGS)
    assert document["ab"]["both_over_suffix"]["median"] is None
    assert document["client_speedup"]["median"] is None
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
    assert "committed 1.00 tokens in the first minute" in sentences(document)
    shown = progress(run)
    assert (shown["acceptance length"], shown["measured speedup of decode rounds"]) == ("3.00", "2.00×")
