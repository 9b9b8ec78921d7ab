"""Division of rows among processes: whole groups where possible, and about as many tokens on each process.

Every process waits for the slowest in each update, and a prompt is computed once per process that has one of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

BOUND = 0.05  # largest deviation of a process's tokens from the mean, relative; beyond it, groups are split


@dataclass
class _Load:
    """Rows of one process, and their tokens."""

    tokens: int = 0
    held: dict[int, list[int]] = field(default_factory=dict)  # rows by group


def divide(
    prompt_of: Sequence[int], prompt_lengths: Sequence[int], completion_lengths: Sequence[int], processes: int
) -> list[list[int]]:
    """Return the rows of each process. A pure function of lengths and groups: all processes find the same on their own.

    A process's load is the tokens of its completions, and of each of its prompts once. Groups (rows with the same
    `prompt_of`) go to the process with the least load, the costliest first. While a process is more than 5 % off the
    mean, some rows of one group move from the fullest to the emptiest. If few long completions dominate, dealing single
    rows in the same way may make the fullest less full; then that is done.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(prompt_of):
        groups.setdefault(group, []).append(row)
    prompts = {group: prompt_lengths[rows[0]] for group, rows in groups.items()}

    def tokens(rows: Sequence[int]) -> int:
        return sum(completion_lengths[row] for row in rows)

    def with_prompt(load: _Load, group: int) -> int:
        return load.tokens + (0 if group in load.held else prompts[group])

    def deal(pieces: list[tuple[int, list[int]]]) -> list[_Load]:
        loads = [_Load() for _ in range(processes)]
        for group, rows in sorted(pieces, key=lambda piece: -(prompts[piece[0]] + tokens(piece[1]))):
            load = min(loads, key=lambda load: with_prompt(load, group))
            load.tokens = with_prompt(load, group) + tokens(rows)
            load.held.setdefault(group, []).extend(rows)
        while _largest_deviation(loads) > BOUND and _move_rows(loads, prompts, completion_lengths):
            pass
        return loads

    loads = deal([*groups.items()])
    if _largest_deviation(loads) > BOUND:
        by_row = deal([(group, [row]) for group, rows in groups.items() for row in rows])
        loads = min(loads, by_row, key=lambda loads: max(load.tokens for load in loads))
    return [sorted(row for rows in load.held.values() for row in rows) for load in loads]


def _largest_deviation(loads: Sequence[_Load]) -> float:
    """Largest deviation of a process's load from the mean, relative."""
    mean = sum(load.tokens for load in loads) / len(loads)
    return max(abs(load.tokens - mean) for load in loads) / mean if mean else 0.0


def _move_rows(loads: Sequence[_Load], prompts: dict[int, int], lengths: Sequence[int]) -> bool:
    """Move some rows of one group from the fullest process to the emptiest; False if no move helps."""
    mean = sum(load.tokens for load in loads) / len(loads)
    fullest, emptiest = max(loads, key=lambda load: load.tokens), min(loads, key=lambda load: load.tokens)
    wanted = min(fullest.tokens - mean, mean - emptiest.tokens)
    best, after = None, (fullest.tokens, emptiest.tokens)
    for group, rows in fullest.held.items():
        arriving = 0 if group in emptiest.held else prompts[group]
        chosen = _rows_within(wanted - arriving, rows, lengths)
        moved = sum(lengths[row] for row in chosen)
        leaving = prompts[group] if len(chosen) == len(rows) else 0
        found = fullest.tokens - moved - leaving, emptiest.tokens + moved + arriving
        if max(found) < max(after):
            best, after = (group, chosen), found
    if best is None:
        return False
    group, chosen = best
    emptiest.held.setdefault(group, []).extend(chosen)
    if left := [row for row in fullest.held.pop(group) if row not in chosen]:
        fullest.held[group] = left
    fullest.tokens, emptiest.tokens = after
    return True


def _rows_within(tokens: float, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Choose rows of at most `tokens` together, the longest first; the shortest row if none fits."""
    ordered = sorted(rows, key=lambda row: -lengths[row])
    chosen = []
    for row in ordered:
        if lengths[row] <= tokens:
            chosen.append(row)
            tokens -= lengths[row]
    return chosen or ordered[-1:]
