"""docs/reference/http-api.md has every code of an error; its routes are generated, which another test compares."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT

_NOT_SEEN = {"not_declared"}
"""Of a route that the table of access lacks: a mistake of ours."""


def test_every_error_code_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    files = (ROOT / "serving" / "gateway").rglob("*.py")
    raised = {code for file in files for code in re.findall(r"\bcode=\"(\w+)\"", file.read_text())}
    assert len(raised) > 30
    assert not raised - _NOT_SEEN - set(re.findall(r"`(\w+)`", page))
