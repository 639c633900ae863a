"""The site is built as `make site` does; a link to nowhere, and a name that nothing has, end the build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from docs.names import unknown_names
from tests.docs.commands import ROOT

WRONG = {
    "[a page](how-to/nothing.md)": "how-to/nothing.md",
    "[a heading](other.md#nothing)": "nothing",
    "[code](../serving/nothing.py)": "../serving/nothing.py",
    "Ask with `--no-such-flag`.": "--no-such-flag",
    "Set SLIPSTREAM_NO_SUCH.": "SLIPSTREAM_NO_SUCH",
    "Set SLIPSTREAM_NO_SUCH_1.": "SLIPSTREAM_NO_SUCH_1",
    "Set SLIPSTREAM_NO_SUCH_TOO_*.": "SLIPSTREAM_NO_SUCH_TOO_*",
    "Watch slipstream_no_such_total.": "slipstream_no_such_total",
    "Watch slipstream_no_such_too_*.": "slipstream_no_such_too_*",
    "~~~sh\nslipstream serve --no-flag-in-tildes\n~~~": "--no-flag-in-tildes",
    "<code>--no-flag-in-html</code>": "--no-flag-in-html",
    "Set `TRAINER_PROCESES`.": "TRAINER_PROCESES",
    "```sh\nexport GATEWAY_KEYZ_FILE=keys\n```": "GATEWAY_KEYZ_FILE",
    "Watch slipstream_not_here: it rises.": "slipstream_not_here",
    "Watch `sglang:no_such_metric`.": "sglang:no_such_metric",
    "    program --no-flag-in-an-indented-block": "--no-flag-in-an-indented-block",
    "Ask `slipstream serve --port 1 --rm`.": "slipstream serve --rm",
    "```sh\nslipstream drafts list \\\n  --temperature 1\n```": "slipstream drafts list --temperature",
    "[a label][of-nothing]": "of-nothing",
    "[nothing itself][]": "nothing itself",
}


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-c", ROOT / "docs", source, out]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    start = (tmp_path / "index.html").read_text()
    assert "docs/index.html" in start
    pages = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")} <= pages


def test_what_leads_nowhere_ends_the_build_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for folder in ("tutorials", "how-to", "reference", "explanation"):
        (tmp_path / "docs" / folder).mkdir()
        (tmp_path / "docs" / folder / "page.md").write_text("# A page\n")
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n" + "\n\n".join(WRONG))
    (tmp_path / "docs" / "other.md").write_text("# Another\n")
    built = build(tmp_path, tmp_path / "out")
    assert built.returncode != 0
    assert [name for name in WRONG.values() if name not in built.stderr] == []


@pytest.mark.parametrize(
    "text",
    [
        "`--depth 4`, `--tp-size 2` and `--speculative-*`",
        "SLIPSTREAM_STORE and SLIPSTREAM_GATEWAY_INTERACTIVE_TTFT_P99_S",
        "SLIPSTREAM_TRAINER_* and `SLIPSTREAM_<flag>`",
        "`TRAINER_PROCESSES`, `OMP_WAIT_POLICY=PASSIVE`, `MAX_BODY_BYTES` and `MALLOC_TRIM_THRESHOLD_`",
        "slipstream_swaps_total: a counter",
        "slipstream_trainer_* and `slipstream:{MODEL}:traces`",
        "`sglang:num_queue_reqs`",
        "`slipstream serve --help`\n\n```sh\nslipstream sglang --model m \\\n  -- --tp-size 2 | grep --quiet x\n```",
        "[a label][of] and `a[0][1]`\n\n[of]: page.md",
    ],
)
def test_what_there_is_may_be_named(text: str) -> None:
    assert unknown_names(text) == []


def test_a_command_of_an_older_commit_may_name_what_is_gone() -> None:
    command = "Command: `python -m benchmarks.gone --no-such-flag` (at commit `d3da466`). Machine: any machine."
    assert unknown_names(command) == []
    assert unknown_names(f"{command}\n\nAsk with `--no-such-flag`.") == ["--no-such-flag"]
