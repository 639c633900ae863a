"""Which version came into service last, and what it is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculator.versions.lifecycle import Lifecycle, State
from trainer.release.live_review import Newcomers

TO_LIVE = (State.WRITTEN, State.VALIDATED, State.SCORED, State.LIVE)


@pytest.mark.parametrize("removed", [False, True])
def test_an_incumbent_that_is_no_longer_good_is_not_gone_back_to(tmp_path: Path, *, removed: bool) -> None:
    states = Lifecycle(tmp_path)
    newcomers = Newcomers(states)
    for version, way in ((1, (*TO_LIVE, State.PROMOTED)), (2, (*TO_LIVE, State.PROMOTED)), (3, TO_LIVE)):
        for state in way:
            states.move(version, state, actor="engine:0")
    found = newcomers.look()
    assert found is not None
    assert (found.version, found.incumbent) == (3, 2)
    assert newcomers.look() == found
    states.bar(2, actor="operator:ann", reason="")
    if removed:
        assert states.forget(2)
    assert newcomers.look() == found._replace(incumbent=1)
