"""The loss that the tutorial writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.docs.commands import ROOT
from trainer.learning.labels import Labels
from trainer.learning.losses.mix import LossMix


def test_the_tutorials_loss_is_less_where_the_draft_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorials/own-loss.md").read_text(), re.DOTALL)
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    both = torch.ones(2, dtype=torch.bool)
    labels = Labels(
        draft_ids=torch.tensor([[2, 0], [2, 0]]),
        probs=torch.tensor([[0.75, 0.25], [0.75, 0.25]]),
        tail=torch.zeros(2),
        temperature=torch.ones(2),
        greedy=both,
        labelled=both,
    )
    logits = torch.tensor([[0.0, 0.0, 5.0], [5.0, 0.0, 0.0]])
    right, wrong = LossMix.parse("my_loss:focal").on_states(logits, labels).tolist()
    assert 0 <= right < 0.01
    assert 4 < wrong < 6
