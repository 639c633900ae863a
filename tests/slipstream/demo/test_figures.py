"""Windows over scrapes, and the demo's figures from them, on a run that is small enough to check by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.metrics import EngineMetrics
from slipstream.demo.demo import DemoRun
from slipstream.demo.report import figures, sentences
from slipstream.demo.scrape import History, Sample
from slipstream.demo.topics import built_in_prompts, endless
from slipstream.demo.traffic import Stretch, Traffic
from speculator.redis.stream_accounting import StreamLag


def _run() -> DemoRun:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    history = History()

    def scrape(at_s: float) -> None:
        history.samples.append(Sample.parse(at_s, generate_latest(registry).decode()))

    def rounds(count: int, *, accepted: int, seconds: float) -> None:
        for _ in range(count):
            one = {
                "proposed": (3,),
                "depths": (2,),
                "accepted": (accepted,),
                "from_head": (True,),
                "expected": (accepted + 1, seconds),
            }
            one |= {"committed": accepted + 1, "look": None}
            metrics.observe_round(batch=1, drafted=True, read_prompt=False, seconds=seconds, **one)
        none = {"proposed": (0,), "depths": (0,), "accepted": (0,), "from_head": (False,), "expected": (0.0, 0.0)}
        none |= {"committed": 1, "look": None}
        metrics.observe_round(batch=1, drafted=False, read_prompt=False, seconds=0.02, **none)
        # Its token counts, what it took is in no ratio.
        metrics.observe_round(batch=1, drafted=False, read_prompt=True, seconds=9, **none)

    scrape(0)
    rounds(10, accepted=0, seconds=0.03)
    scrape(60)
    rounds(10, accepted=1, seconds=0.025)
    scrape(180)
    rounds(20, accepted=2, seconds=0.03)
    scrape(300)
    traffic, plain = _traffic(), _traffic()
    traffic.stats.requests, traffic.stats.completion_tokens = 12, 99
    traffic.stats.gaps += [(1000.0 + second, 0.01 if second != 200 else 0.05) for second in range(300)]
    lag = StreamLag(
        pending=1, undelivered=2, length=12, bytes=1, appended=12, acked=8, lost=1, dead_lettered=3, erased=0, expired=0
    )
    return DemoRun(
        history, traffic, plain, 1000.0, [1199.5, 1400.0], lag=lag, final=history.samples[-1], duration_s=300.0
    )


def _traffic() -> Traffic:
    return Traffic("http://none", "toy", endless(built_in_prompts(), 0), max_tokens=1, temperature=0)


def _ab_run(*, slower_without: float, asked: bool, looks: int = 0) -> DemoRun:
    """Twenty scrapes of an A/B whose rounds with remembered text alone take so many times as long."""
    run, registry = _run(), CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.looks.labels("accepted").inc(looks)
    run.history = History()
    rng = random.Random(0)
    for at_s in range(21):
        run.history.samples.append(Sample.parse(at_s, generate_latest(registry).decode()))
        for number in range(40):
            with_head, seconds = number % 4 > 0, rng.uniform(0.9, 1.1) * (0.02 + 0.01 * (number % 2))
            seconds *= 1 if with_head else slower_without
            metrics.observe_head_ab(
                batch=1 + number % 2, with_head=with_head, seconds=seconds, committed=2, asked=asked and with_head
            )
    run.final = run.history.samples[-1]
    return run


def _clients(run: DemoRun, *, live: Sequence[float], plain: Sequence[float]) -> None:
    """Tokens a second in stretches of ten seconds: plain and live in turns, and plain at the end."""
    for traffic, rates in ((run.traffic, live), (run.plain, plain)):
        traffic.stats.stretches = [
            Stretch(1000 + 20 * number, 1010 + 20 * number, 10 * rate) for number, rate in enumerate(rates)
        ]


def test_what_the_head_added_is_the_ab_of_the_whole_run_at_equal_batch_sizes() -> None:
    document = figures(_ab_run(slower_without=1.2, asked=True), model="toy", minutes=5)
    added = document["head_added"]
    assert added["estimate"] == pytest.approx(1.2, abs=0.02)
    assert 1.15 < added["low"] < 1.2 < added["high"] < 1.25
    assert (added["asked_rounds"], added["both_rounds"], added["suffix_only_rounds"]) == (600, 600, 200)
    first, second, *_ = sentences(document).splitlines()
    assert first.startswith(f"Beside remembered text, the learned head added {added['estimate']:.2f} × (95%: ")
    assert "asked the head in 600 of 600 rounds" in second


def test_a_head_that_is_never_asked_adds_nothing() -> None:
    at_rest = figures(_ab_run(slower_without=1.02, asked=False), model="toy", minutes=5)
    assert at_rest["head_added"] | {"estimate": 1.0, "low": 1.0, "high": 1.0} == at_rest["head_added"]
    probed = figures(_ab_run(slower_without=0.99, asked=False, looks=7), model="toy", minutes=5)
    assert 0.97 < probed["head_added"]["estimate"] < 1.0, "what the probes took is in it"
    for document in (at_rest, probed):
        first, second, *_ = sentences(document).splitlines()
        assert first.startswith("The learned head added nothing, 1.00 ×")
        assert "asked the head in 0 of 600 rounds" in second


def test_a_clients_speedup_is_its_tokens_a_second_over_those_of_the_plain_server() -> None:
    run = _ab_run(slower_without=1.0, asked=True)
    _clients(run, live=[150, 140, 150, 160, 150, 150], plain=[100, 98, 102, 100, 100, 101, 99])
    run.num_clients = 2
    document = figures(run, model="toy", minutes=5)
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
    run = _ab_run(slower_without=1.0, asked=True)
    run.history.samples = run.history.samples[:1]
    document = figures(run, model="toy", minutes=5)
    assert document["head_added"]["estimate"] is None
    assert document["client_speedup"]["estimate"] is None
    assert "not measured" in sentences(document)


def test_time_in_which_the_plain_server_was_asked_is_no_live_time() -> None:
    run = _run()
    run.pauses = [(1060.0, 1070.0), (1130.0, 1140.0)]
    assert [run.at_s(at) for at in (1060.0, 1065.0, 1071.0, 1150.0)] == [60.0, 60.0, 61.0, 130.0]


def test_prompts_that_came_again_are_told() -> None:
    run = _run()
    run.num_prompts = 12
    assert "Each prompt came" not in sentences(figures(run, model="toy", minutes=5))
    run.num_prompts = 6
    assert "Each prompt came 2.00 times" in sentences(figures(run, model="toy", minutes=5))


def test_figures_are_those_of_their_windows() -> None:
    document = figures(_run(), model="toy", minutes=5)
    assert document["accept_length"] == {"first_minute": 1.0, "last_two_minutes": 3.0}
    # 60 tokens at 20 ms plainly against 20 rounds of 30 ms.
    assert document["speedup"]["measured_last_two_minutes"] == pytest.approx(60 * 0.02 / (20 * 0.03))
    assert document["speedup"]["baseline_rounds"] == 1
    assert document["tokens_per_s"]["last_two_minutes"] == pytest.approx(62 / 120, abs=1e-4)
    assert document["inter_token_ms"]["p50"] == 10
    assert document["inter_token_ms"]["max_at_swap"] == 50
    assert document["swaps"] == 1, "the second swap came after the traffic"
    assert document["traces"]["trained"] == 5
    assert document["traces"]["waiting"] == 3
    assert "1.00 tokens in the first minute" in sentences(document)
