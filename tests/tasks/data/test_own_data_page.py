"""What the page on your own data says of each format is taken by the contract, word for word."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from examples import tiny
from grpo_core.config.files import parse_config
from tests.conftest import config_values
from tests.formats import GSM8K
from tests.rows import screen
from tests.tasks.data.test_own_schema import _write

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "own-data.md").read_text()
CONFIGURATIONS = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
MODULE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
ROWS = [GSM8K, GSM8K]  # of the configurations


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)), ids=["GSM8K", "schema"])
def test_each_configuration_of_the_page_is_taken_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    (tmp_path / "my_data.py").write_text(MODULE)
    tokenizer = tiny.make_tokenizer([])
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.make_model(tokenizer, context=1024).save_pretrained(tmp_path / "model")
    _write(tmp_path / "train.jsonl", ROWS[number][:8])
    _write(tmp_path / "eval.jsonl", ROWS[number][8:])
    values = config_values(tmp_path / "model", tmp_path)
    values["rewards"] = CONFIGURATIONS[0]["rewards"]  # the rest of the second is as in the first
    values["rollout"] = CONFIGURATIONS[0]["rollout"]
    values["data"] = CONFIGURATIONS[number]["data"] | {key: str(tmp_path / f"{key}.jsonl") for key in ("train", "eval")}
    screened = screen(parse_config(values))
    assert (screened.shape, screened.report["findings"]) == ([], [])
    first = screened.kept["train"]["prompt"][0]
    asked = first if isinstance(first, str) else first.to_list()[-1]["content"]
    assert asked == GSM8K[0]["question"]
    assert screened.kept["train"].height == 8


def test_the_first_configuration_is_complete() -> None:
    parse_config(CONFIGURATIONS[0])
    assert len(CONFIGURATIONS) == len(ROWS)
