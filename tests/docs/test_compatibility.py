"""docs/reference/compatibility.md names what the plugin refuses and what it was tried in."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from serving.sglang.plugin import checks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "compatibility.md").read_text()


def test_every_option_of_a_refusal_is_on_the_page() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]+[a-z]", inspect.getsource(checks)))
    advised = {
        "--speculative-accept-threshold",
        "--model-path",
        "--speculative-draft-model-path",
        "--store",
        "--context-length",
    }
    assert len(flags) > 15
    assert {flag for flag in flags - advised if f"{flag}`" not in PAGE and f"{flag} " not in PAGE} == set()


def test_the_versions_are_those_that_are_supported() -> None:
    first, *_ = zip(*re.findall(r"^\| (0\.5\.\d+) \| (2\.[\d.]+) \|", PAGE, re.M), strict=True)
    assert sorted(first) == sorted(checks.VERSIONS)
