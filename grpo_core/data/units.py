"""The unit of every statistic over prompts: the distinct prompt, or the group of prompts that belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import plain
from grpo_core.errors import GrpoError


def number_units(rows: Iterable[Mapping[str, Any]], config: RunConfig) -> np.ndarray:
    """Number of each row's unit: its group with `evaluation.group_column`, else its prompt; equal ones have the same
    number. Images are part of a prompt. With an environment, which begins with the whole row, prompts differ if their
    rows do. (N,)"""
    column = config.evaluation.group_column
    if column:
        return number_equal(group_of(row, column) for row in rows)
    if config.environment.factories:
        return number_equal(map(whole_row, rows))
    return number_equal((plain(row["prompt"]), *(row.get("images") or ())) for row in rows)


def number_equal(values: Iterable[Any]) -> np.ndarray:
    """Number the values in the order in which they first occur; equal ones have the same number. (N,)"""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(repr(value), len(numbers)) for value in values], dtype=int)


def per_unit(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Outcomes of rows (N,) → of units (U,): the mean over the rows that have the same number and a value.

    Rows of the same unit are not independent: counted one by one, they would look like more evidence.
    """
    scored = ~np.isnan(values)
    distinct, places = np.unique(numbers, return_inverse=True)
    sums = np.bincount(places[scored], values[scored], minlength=len(distinct))
    counts = np.bincount(places[scored], minlength=len(distinct))
    return np.divide(sums, counts, out=np.full(len(distinct), np.nan), where=counts > 0)


def paired_units(before: np.ndarray, after: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of two policies on rows (N,) → on units (U,): means over those of a unit's rows that have a value of
    both policies, since prompts of a group may differ in difficulty."""
    unpaired = np.isnan(before) | np.isnan(after)
    one, other = (per_unit(np.where(unpaired, np.nan, values), numbers) for values in (before, after))
    return one, other


def group_of(row: Mapping[str, Any], column: str) -> str:
    """Value of `evaluation.group_column` as text. Raises GrpoError if the row has none."""
    if row.get(column) is None:
        raise GrpoError(f"evaluation.group_column = {column!r}: an evaluated prompt has no value in this column")
    return str(row[column])


def whole_row(row: Mapping[str, Any]) -> str:
    """Hash of a row's values."""
    return hashlib.blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
