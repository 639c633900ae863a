"""What README and documents say was measured has a results page, and each results page says how."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, ROOT

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = [page for page in sorted(RESULTS.glob("*.md")) if page.name != "README.md"]
_FIGURE = re.compile(
    r"\d[\d.,]* ?× |\d[\d.,]*(?: to \d[\d.,]*)? tokens a second|\d[\d.,]* (?:ms|µs|milliseconds)\b(?! a)|\d times as "
)
_PERCENTAGE = re.compile(r"\d[\d.,]*(?= ?%)")
SETTINGS = {
    "## Rows behind rejections": {"2"},
    "## Poisoned traffic": {"2", "60"},
    "## Proposals": {"2", "3"},
    "## The gate": {"2", "5", "95"},
    "## The watch": {"10"},
    "## The review": {"2", "10"},
    "## Watch these figures": {"1"},
    "### SlipstreamNoSpeedup": {"95"},
    "### SlipstreamTracesDropped": {"1"},
    "### SlipstreamLossBudgetSpent": {"1"},
    "## Run the trainer beside an engine": {"1"},
}
"""Percentages that a section says are set or required, not measured."""
_MACHINE = re.compile(r"EPYC|Xeon|AVX2|H100|CPU|any machine")


def without_results(text: str) -> list[str]:
    """First lines of a page's sections that have a measured figure and no link to a results page."""
    return [title for title, figures in _sections(text) if figures - SETTINGS.get(title, set())]


def _sections(text: str) -> list[tuple[str, set[str]]]:
    """Titles and figures of the sections without a link to a results page."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    sections = [each for each in re.split(r"(?m)^(?=#{1,4} )", text) if "benchmarks/results/" not in each]
    return [(each.partition("\n")[0], {*_FIGURE.findall(each), *_PERCENTAGE.findall(each)}) for each in sections]


def written(page: Path) -> str:
    return page.read_text().partition("<!-- What follows is written by `make docs`")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_claim_leads_to_its_measurement(page: Path) -> None:
    assert without_results(written(page)) == []


def test_no_exception_is_left_over() -> None:
    found = [section for page in PAGES for section in _sections(written(page))]
    named = {title: set().union(*(figures for each, figures in found if each == title)) for title in SETTINGS}
    assert named == SETTINGS


@pytest.mark.parametrize(
    "claim",
    [
        "It is 1.9 × as fast.",
        "A swap takes 1.8 ms.",
        "It decodes 158 tokens a second.",
        "It accepts 31% more.",
        "It is 2 to 4 % slower.",
    ],
)
def test_a_claim_without_a_page_is_found(claim: str) -> None:
    assert without_results(f"# Speed\n\n{claim}\n") == ["# Speed"]
    assert without_results(f"# Speed\n\n{claim} [How](../../benchmarks/results/demo.md)\n") == []


def test_a_setting_needs_no_page_where_it_is_listed() -> None:
    assert without_results("## The watch\n\nA version fails if it is 10% slower.\n") == []
    assert without_results("## The watch\n\nA version fails if it is 12% slower.\n") == ["## The watch"]


@pytest.mark.parametrize("page", [ROOT / "README.md", RESULTS / "demo.md"], ids=lambda page: page.name)
def test_the_demos_speedups_are_those_of_its_raw_figures(page: Path) -> None:
    raw = json.loads((RESULTS / "demo.json").read_text())
    ab = raw["ab"]
    for found in (
        ab["both_over_plain"],
        ab["both_over_suffix_whole_run"],
        raw["speedup"]["end_to_end"],
        raw["client_speedup"],
    ):
        assert f"| {found['median']:.2f} × | {found['low']:.2f} … {found['high']:.2f} |" in page.read_text()


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.name)
def test_a_results_page_says_how_and_is_listed(page: Path) -> None:
    text = page.read_text()
    assert re.search(r"\d{4}-\d{2}-\d{2}", text), "when?"
    assert re.search(r"`[^`]*(benchmarks\.|examples\.|make |slipstream|tests/)|[Bb]y hand", text), "by which command?"
    assert _MACHINE.search(text), "on which machine?"
    assert f"]({page.name})" in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize(
    ("pages", "most"),
    [([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], 30_000), (list(RESULTS.glob("*.md")), 8_000)],
    ids=["documents", "results"],
)
def test_pages_stay_short_together(pages: list[Path], most: int) -> None:
    """A word has a letter or a digit; generated tables count, too."""
    assert sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages) <= most
