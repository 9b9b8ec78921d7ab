"""Entries of a mapping that a block holds: what other threads see as it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.held import held


class Watched(dict[str, Any]):
    """Fails if the entry `kept`, which the block does not hold, is ever gone."""

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        assert "kept" in self

    def clear(self) -> None:
        raise AssertionError("another thread would find nothing")


@pytest.mark.parametrize("ours", ["", "our."])
def test_what_a_block_does_not_hold_is_there_throughout_and_the_rest_is_as_before(ours: str) -> None:
    mapping = Watched({"kept": 1, "changed": 2, "our.old": 3})
    with pytest.raises(ZeroDivisionError), held(mapping, {"changed": 4, "given": 5}, ours):
        assert mapping == {"kept": 1, "changed": 4, "our.old": 3, "given": 5}
        del mapping["our.old"]
        mapping |= {"our.new": 6, "theirs": 7}
        raise ZeroDivisionError
    left = {} if ours == "" else {"theirs": 7}
    assert mapping == {"kept": 1, "changed": 2, "our.old": 3, **left}
