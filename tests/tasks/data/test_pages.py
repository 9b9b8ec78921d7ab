"""What pages say of each format of data is taken by the contract, word for word; and the rewards of the pages for those
who come from ms-swift and verl know a right answer."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import tiny
from grpo_core.config.files import parse_config
from grpo_core.rewards.rehearsal import rehearse
from tests.conftest import config_values
from tests.formats import GSM8K
from tests.rows import screen, write_lines

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
PAGE = (PAGES / "own-data.md").read_text()
CONFIGURATIONS = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
MODULE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
ROWS = [GSM8K, GSM8K]  # of the configurations


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)), ids=["GSM8K", "schema"])
def test_each_configuration_of_the_page_is_taken_as_the_page_says(
    tmp_path: Path, words_model: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    (tmp_path / "my_data.py").write_text(MODULE)
    write_lines(tmp_path / "train.jsonl", ROWS[number][:8])
    write_lines(tmp_path / "eval.jsonl", ROWS[number][8:])
    values = config_values(words_model, tmp_path)
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


OF_VERL = [  # as verl's examples/data_preprocess/gsm8k.py writes them
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"].rpartition("#### ")[2]},
        "extra_info": {"split": "train", "index": n, "answer": row["answer"], "question": row["question"]},
    }
    for n, row in enumerate(GSM8K)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "rows"), [("from-swift", GSM8K), ("from-verl", OF_VERL)])
def test_the_example_of_the_page_is_taken_and_its_reward_knows_a_right_answer(
    tmp_path: Path, words_model: Path, monkeypatch: pytest.MonkeyPatch, page: str, rows: list[dict[str, Any]]
) -> None:
    text = (PAGES / f"{page}.md").read_text()
    (module,) = re.findall(r"^```python\n(# (\w+\.py), unchanged\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    (config,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / module[1]).write_text(module[0])
    monkeypatch.syspath_prepend(tmp_path)
    values = tomllib.loads(config)
    values["model"]["name_or_path"] = str(words_model)
    for key, part in (("train", rows[:8]), ("eval", rows[8:])):
        path = tmp_path / values["data"][key]
        write_lines(path, part) if path.suffix == ".jsonl" else pq.write_table(pa.Table.from_pylist(part), path)
        values["data"][key] = str(path)
    parsed = parse_config(values)
    screened = screen(parsed)
    assert (screened.shape, screened.report["findings"]) == ([], [])
    report = rehearse(parsed, screened.kept["train"].to_dicts(), lambda: tiny.make_tokenizer([]))
    assert report["warnings"] == []
    ((name, given),) = report["rewards"].items()
    assert parsed.rewards[0].function.endswith(name)
    assert (given["right"], given["empty"], given["garbage"]) == (1, 0, 0)
