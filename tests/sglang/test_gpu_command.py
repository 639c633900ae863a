"""`make gpu` runs from end to end where there is no GPU, so that the first minutes on one go to what it shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_last_stage_on_a_cpu(tmp_path: Path) -> None:
    """The largest one: two servers, capture in all shares, swaps under load."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick", "--stage", "4"]
    command += ["--folder", str(tmp_path / "stages"), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["machine"]["device"] == "cpu"
    drafting = found["drafting"]
    assert set(drafting["ms_a_token"]) == {
        f"{name}_{batch}"
        for name in ("eagle_alone", "plugin", "plugin_half_captured", "plugin_captured")
        for batch in (1, 4)
    }
    assert drafting["report"]["accept_length"] == "2.0"
    assert len(drafting["swaps"]["stall_ms"]) == 2
    # A stage that has its figures is not run again.
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "stage 4" not in again.stdout
