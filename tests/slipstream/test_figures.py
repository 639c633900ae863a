"""Windows over scrapes, and the demo's figures from them, on a run that is small enough to check by hand."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.metrics import EngineMetrics
from slipstream.demo import DemoRun
from slipstream.report import figures, sentences
from slipstream.scrape import History, Sample
from slipstream.topics import built_in_prompts, endless
from slipstream.traffic import Traffic
from speculator.ledger import StreamLag


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
    traffic = Traffic("http://none", "toy", endless(built_in_prompts(), 0), max_tokens=1, temperature=0)
    traffic.stats.requests, traffic.stats.completion_tokens = 12, 99
    traffic.stats.gaps += [(1000.0 + second, 0.01 if second != 200 else 0.05) for second in range(300)]
    lag = StreamLag(
        pending=1, undelivered=2, length=12, bytes=1, appended=12, acked=8, lost=1, dead_lettered=3, erased=0, expired=0
    )
    return DemoRun(history, traffic, 1000.0, [1199.5, 1400.0], lag, history.samples[-1], 300.0)


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
