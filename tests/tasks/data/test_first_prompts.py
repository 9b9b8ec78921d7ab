"""Before data are validated, forecasts know the lengths of the first prompts, where files of this machine tell them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.shapes import PromptLengths
from tasks.data.forecast_inputs import FIRST, first_lengths
from tests.conftest import config_values


def _lengths(model_folder: Path, folder: Path, prompts: list[Any]) -> PromptLengths | None:
    pl.DataFrame({"prompt": prompts}).write_parquet(folder / "train.parquet")
    return first_lengths(parse_config(config_values(model_folder, folder)))


def test_texts_and_conversations_have_the_lengths_of_the_first_ones(model_folder: Path, tmp_path: Path) -> None:
    found = _lengths(model_folder, tmp_path, ["1", "12+34", None, *["123"] * (FIRST - 3), "1" * 50])
    assert found is not None
    assert (found.mean, found.longest) == (pytest.approx(3, abs=0.01), 5)
    assert f"of the first {FIRST - 1} prompts" in found.how
    conversations = [[{"role": "user", "content": "12+34"}], [{"role": "user", "content": "1"}]]
    found = _lengths(model_folder, tmp_path, conversations)
    assert found is not None
    assert (found.mean, found.longest) == (3, 5)


@pytest.mark.parametrize("prompts", [[], [None], [3, 4], [[1], [2]], [""], [{"role": "user"}]])
def test_prompts_that_tell_no_lengths_prevent_no_plan(prompts: list[Any], model_folder: Path, tmp_path: Path) -> None:
    assert _lengths(model_folder, tmp_path, prompts) is None


def test_data_and_tokenizers_that_cannot_be_read_prevent_no_plan(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert _lengths(tmp_path, tmp_path, ["1"]) is None
    (tmp_path / "train.parquet").write_text("damaged")
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None
    (tmp_path / "train.parquet").unlink()
    assert first_lengths(parse_config(config_values(model_folder, tmp_path))) is None
