"""Text output of the demo: figures while it runs, sentences after each chapter, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.demo.chapters import POISON, RESTART, SHIFT
from slipstream.demo.report import (
    Bounds,
    ChapterRun,
    DemoRun,
    accepted_by_source,
    bounds,
    chapter_figures,
    end_to_end,
    measured_speedup,
    poisoned_figures,
    round_tokens_per_s,
)

WINDOW_S = 60.0
"""Length of the window that the live display covers."""
_NAMES = {"head": "the head", "own": "own text", "group": "the prompt group's", "tenant": "the tenant's earlier text"}


def progress(run: DemoRun) -> dict[str, str]:
    """The figures so far, for the display of a running demo; empty before the first scrape."""
    if not run.samples:
        return {}
    sample = run.samples[-1]
    minute = run.between(sample.at_s - WINDOW_S, sample.at_s)
    return {
        "both over earlier text alone": _times(bounds(run.both_over_suffix(sample.at_s - WINDOW_S, sample.at_s))),
        "both over plain decoding": _times(bounds(run.both_over_plain(sample.at_s - WINDOW_S, sample.at_s))),
        "accepted tokens from": _shares(accepted_by_source(minute)) if minute else "–",
        "the server's end-to-end speedup": _times(end_to_end(sample)),
        "a client's speedup, so far": _times(bounds(run.client_speedup())),
        "measured speedup of decode rounds": _shown(measured_speedup(sample), ".2f", "×"),
        "acceptance length": _shown(minute.accept_length if minute else None, ".2f"),
        "tokens a second": _shown(round_tokens_per_s(minute), ".0f"),
        "draft version": f"{sample.total('slipstream_draft_version'):.0f}",
        "swaps": str(len(run.swaps_unix_s)),
        "traces captured": f"{sample.total('slipstream_traces_captured_total'):.0f}",
        "traces used": str(run.lag.acked) if run.lag else "–",
        "failed requests": str(run.traffic.stats.failed),
    }


def chapter_sentences(run: DemoRun, chapter: ChapterRun) -> list[str]:
    """Sentences about a chapter that has ended."""
    found = chapter_figures(run, chapter)
    rates = found["tokens_per_s_of_rounds"]
    lines = [
        f"Accepted tokens came from {_shares(found['accepted_by_source'])}.",
        f"Rounds made {_shown(rates['plain'], '.0f')} tokens a second plainly, {_shown(rates['suffix_only'], '.0f')} "
        f"with earlier text alone, {_shown(rates['both'], '.0f')} with both: "
        f"{_times(found['both_over_suffix'])} over earlier text alone.",
    ]
    if chapter.chapter is SHIFT:
        lines.append(_of_drift(found["drift"]))
    if chapter.chapter is RESTART:
        first_minute = _times(found["both_over_suffix_first_minute"])
        lines.append(f"In the first minute after the restart both were {first_minute} as fast as earlier text alone.")
    if chapter.chapter is POISON and (poisoned := poisoned_figures(run)) is not None:
        lines.append(_of_poisoned(poisoned))
    return lines


def _of_drift(drift: Mapping[str, float | None]) -> str:
    before, lowest, back_s = (drift[n] for n in ("accept_length_before", "accept_length_lowest", "recovered_after_s"))
    alarm_s = drift["alarm_after_s"]
    alarm = "No drift alarm rose" if alarm_s is None else f"The drift alarm rose {alarm_s:.0f} s after the shift"
    if before is None or lowest is None:
        return f"{alarm}; the accept length was not measured."
    if lowest >= before:
        return f"{alarm}; the accept length did not fall below {before:.2f}, that of the minute before."
    back = "was not back in this time" if back_s is None else f"was back {back_s:.0f} s after the shift"
    return f"{alarm}; the accept length fell from {before:.2f} to {lowest:.2f} and {back}."


def _of_poisoned(document: Mapping[str, Any]) -> str:
    version = document["version"]
    if not document["taken_back"]:
        return f"The poisoned draft, version {version}, was not judged in this time."
    return (
        f"The poisoned draft, version {version}, was taken back after at most {document['rounds']} rounds that asked "
        f"or probed it ({_shown(document['seconds'], '.0f')} s): {document['reason']}."
    )


def sentences(document: Mapping[str, Any]) -> str:
    """Summary of a run, about ten sentences with numbers."""
    ab, speed, client = document["ab"], document["speedup"], document["client_speedup"]
    length, traces = document["accept_length"], document["traces"]
    chapters = {chapter["name"]: chapter for chapter in document["chapters"]}
    lines = [
        f"In the last two minutes drafts from both sources made decode rounds {_times(ab['both_over_plain'])} as fast "
        f"as plain decoding.",
        f"There, the learned head beside earlier text was {_times(ab['both_over_suffix'])} as fast as earlier text "
        f"alone; over the whole run {_times(ab['both_over_suffix_whole_run'])}.",
        f"The head's share of accepted tokens by chapter: {_by_chapter(document['chapters'])}.",
        f"Accepted tokens of the whole run came from {_shares(document['accepted_by_source'])}; where the head was "
        f"asked or probed, it was right about {_shown(document['head']['hit_rate'], '.0%')} of the next tokens.",
        f"The server's end-to-end speedup, prompts included, is {_times(speed['end_to_end'])}; a client's clock saw "
        f"{_times(client)}, {_shown(client['tokens_per_s'], '.0f')} tokens a second against "
        f"{_shown(client['plain_tokens_per_s'], '.0f')}.",
        f"One verification committed {_shown(length['first_minute'], '.2f')} tokens in the first minute and "
        f"{_shown(length['last_two_minutes'], '.2f')} in the last two.",
    ]
    if "shift" in chapters:
        lines.append(
            f"When the topics changed, both made rounds {_times(chapters['shift']['both_over_suffix'])} as fast as "
            f"earlier text alone. {_of_drift(chapters['shift']['drift'])}"
        )
    if document["poisoned"] is not None:
        lines.append(_of_poisoned(document["poisoned"]))
    if "restart" in chapters:
        lines.append(
            f"After the restart of the engine, both were {_times(chapters['restart']['both_over_suffix'])} as fast as "
            f"earlier text alone, and {_times(chapters['restart']['both_over_suffix_first_minute'])} in the first "
            "minute."
        )
    lines += [
        f"{document['model']} answered {document['requests']} requests ({document['failed_requests']} failed) with "
        f"{document['completion_tokens']} tokens while its draft was replaced {document['swaps']} times.",
        f"Of {traces['captured']} traces {traces['trained']} were learned from or held out, "
        f"{traces['dropped']} dropped, {traces['dead_lettered']} refused, {traces['lost']} lost, "
        f"{traces['waiting']} still waiting.",
    ]
    if (came := document["times_each_prompt_came"]) > 1:
        lines.append(
            f"Each prompt came {came:.2f} times: a remembered answer makes the next one to the same prompt faster. "
            "Give more prompts with --prompts."
        )
    return "\n".join(lines)


def _by_chapter(chapters: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{chapter['name'].replace('_', ' ')} {_shown(chapter['head_share'], '.0%')}" for chapter in chapters
    )


def _shares(accepted: Mapping[str, int]) -> str:
    total = sum(accepted.values())
    if not total:
        return "nowhere: no proposal was accepted"
    return ", ".join(f"{_NAMES[source]} {count / total:.0%}" for source, count in accepted.items() if count)


def _times(found: Bounds) -> str:
    median, low, high = (found[name] for name in ("median", "low", "high"))
    if median is None:
        return "(not measured)"
    return f"{median:.2f} × ({'no interval' if low is None else f'95%: {low:.2f} … {high:.2f}'})"


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
