"""The columns that the signatures of rewards ask for, and what these have to hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from tests.conftest import config_values
from tests.rows import screen

REWARDS = """
from collections.abc import Sequence
from functools import partial
from typing import Optional
def untyped(completions, fact): ...
def text(completions, fact: list[str]): ...
def number(completions, fact: list[float]): ...
def whole(completions, fact: list[int]): ...
def flag(completions, fact: list[bool]): ...
def lists(completions, fact: list[list[str]]): ...
def gaps(completions, fact: list[str | None]): ...
def maybe(completions, fact: Optional[tuple[str, ...]], n: "Unknown" = 0): ...
class Grader:
    def __call__(self, completions, fact: "Sequence[str]"): ...
called = Grader()
part = partial(text)
def none(completions, fact=None, **columns): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "accepted_by"),
    [
        (["a", "b"], {"untyped", "text", "gaps", "none", "maybe", "called", "part"}),
        ([1.5, 2.5], {"untyped", "number", "none"}),
        ([1, 2], {"untyped", "number", "whole", "none"}),
        ([True, False], {"untyped", "flag", "none"}),
        ([["a"], ["b"]], {"untyped", "lists", "none"}),
        (["a", None], {"gaps", "none"}),
        ([1.5, float("nan")], {"none"}),
        (None, {"none"}),
    ],
)
def test_what_a_column_must_hold_follows_from_the_rewards_signatures(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any] | None, accepted_by: set[str]
) -> None:
    (tmp_path / "signatures.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    for name, prompts in {"train": ["1", "2"], "eval": ["3", "4"]}.items():
        columns = {"prompt": prompts} | ({} if values is None else {"fact": values})
        pl.DataFrame(columns).write_parquet(tmp_path / f"{name}.parquet")
    accepted = set()
    names = ("untyped", "text", "number", "whole", "flag", "lists", "gaps", "none", "maybe", "called", "part")
    for reward in names:
        configured = {**config_values(model_folder, tmp_path), "rewards": [{"function": f"signatures:{reward}"}]}
        if not screen(parse_config(configured)).refused:
            accepted.add(reward)
    assert accepted == accepted_by
