"""What finished runs depend on does not change unnoticed: it has a version, which is part of their lineage."""

from __future__ import annotations

import pytest

from tests.behaviour import RECORD, changed, present, recorded


@pytest.mark.slow
def test_rewards_environments_and_defaults_give_what_their_version_gave() -> None:
    """If this fails: take the change back, or raise the version so that the runs it concerns are made again; for a
    change of a source that changes no value, edit the record. Then `python -m tests.behaviour` records."""
    before, now = recorded(), present()
    assert [name for name in now if name in before and changed(name, before[name], now[name])] == []
    assert before == now, f"{RECORD.name} does not have everything: run `python -m tests.behaviour`"
