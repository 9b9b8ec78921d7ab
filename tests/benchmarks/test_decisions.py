"""The simulation of decisions, cut down: what it shows of groups holds."""

from __future__ import annotations

import pytest

from benchmarks.decisions import groups_table


@pytest.mark.slow
def test_groups_of_prompts_err_as_little_as_stated_where_their_prompts_do_not() -> None:
    """Of 40 sweeps, with 2.5 % and 5 % allowed: none stops an arm, and at most six of 40 candidates are better."""
    rows = {label: [float(cell.rstrip(" %")) for cell in cells] for label, *cells in groups_table(40)}
    assert all(stopped == 0 and better <= 15 for _, stopped, _, better in rows.values())
    stopped, _, better, _ = rows["10 prompts per group"]
    assert stopped > 40 and better > 15
    one, other = rows["each prompt by itself"][::2], rows["each prompt by itself"][1::2]
    assert one == other
